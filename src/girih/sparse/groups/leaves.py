"""Makes the outputs of all groups leaves of torch's graph: inputs of a model, which collect its gradients.

Also makes an example batch, so that the dense net can be traced before there are data (HT §3.2).

Shapes: B examples, L ids of a sequence feature in the batch, D width of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group.trainers import largest_of
from girih.data.batch import Batch
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.needs import EMBEDDING
from girih.schema import Schema
from girih.sparse.groups.pack import Group, GroupOutput, sequence_bounds
from girih.sparse.spec import SparseSpec


class Leaves:
    """Leaf tensors of torch's graph over the outputs of all groups.

    Args:
        arrays: the outputs of all groups: float32[B, F, D], or [L, D] for a whole sequence. Arrays, or tensors on a
            GPU.
        bounds: the bounds of each whole output: see :func:`~girih.sparse.groups.pack.sequence_bounds`.
        train: whether the leaves collect gradients.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        arrays: Sequence[NDArray[np.float32] | Tensor],
        bounds: Iterable[NDArray[np.int32]],
        *,
        train: bool,
    ) -> None:
        self._arrays, self._train = arrays, train
        self._outputs: list[GroupOutput] = []
        self._bounds: list[NDArray[np.int32] | None] = []
        self._leaves: list[list[tuple[slice, Tensor]]] = []
        remaining_bounds = iter(bounds)
        for group in groups:
            for output in group.outputs:
                self._outputs.append(output)
                self._bounds.append(next(remaining_bounds) if output.whole else None)
                self._leaves.append([])

    def embeddings(self, examples: slice | None = None) -> Embeddings:
        """Returns the embeddings of all examples, or of a micro-batch, for a model. Each call makes new leaves."""
        blocks, first_order, sequences = [], [], {}
        for output, array, bounds, leaves in zip(
            self._outputs, self._arrays, self._bounds, self._leaves, strict=True
        ):
            rows = examples or slice(None)
            if bounds is not None:
                cut = bounds if examples is None else bounds[examples.start : examples.stop + 1]
                rows = slice(int(cut[0] - bounds[0]), int(cut[-1] - bounds[0]))
            own_rows = array[rows]
            leaf = own_rows if isinstance(own_rows, Tensor) else torch.from_numpy(own_rows)
            leaf.requires_grad_(self._train)
            leaves.append((rows, leaf))
            if bounds is not None:
                sequences[output.names[0]] = Jagged(leaf, torch.from_numpy(cut).long() - int(cut[0]))
            elif output.segment.name == EMBEDDING:
                blocks.append(Block(output.names, leaf))
            else:
                first_order.append(Block(output.names, leaf))
        return Embeddings(tuple(blocks), sequences, tuple(first_order))

    def gradients(self) -> list[Any]:
        """Returns each output's gradient, float32[·, D] on its device, or None if it took no part in the loss."""
        return list(map(_summed, self._arrays, self._leaves))

    def largest(self, gradients: Sequence[NDArray[np.float32] | Tensor | None]) -> Tensor:
        """Returns float32[·]: the largest absolute value of each gradient, or NaN if the gradient contains NaN.

        The result is on the gradients' device. Does not wait for the device.
        """
        device = torch.as_tensor(self._arrays[0]).device if len(self._arrays) else torch.device("cpu")
        return largest_of([gradient for _, gradient in self._with_gradients(gradients)], device)

    def nonfinite_feature(
        self, gradients: Sequence[NDArray[np.float32] | Tensor | None], largest: Sequence[float]
    ) -> str | None:
        """Returns a feature with a gradient that is NaN or infinite, or None.

        Args:
            largest: the result of :meth:`largest`.
        """
        for (output, gradient), value in zip(self._with_gradients(gradients), largest, strict=True):
            if not math.isfinite(value):
                by_feature = gradient.view(-1, 1 if output.whole else len(output.names), gradient.shape[-1])
                bad = ~torch.isfinite(by_feature).all(dim=2).all(dim=0)
                return output.names[int(bad.nonzero()[0])]
        return None

    def _with_gradients(
        self, gradients: Sequence[NDArray[np.float32] | Tensor | None]
    ) -> list[tuple[GroupOutput, Tensor]]:
        """Returns the outputs with a gradient that is not empty."""
        pairs = zip(self._outputs, gradients, strict=True)
        present = [(output, torch.as_tensor(gradient)) for output, gradient in pairs if gradient is not None]
        return [(output, gradient) for output, gradient in present if gradient.numel()]


def _summed(
    like: NDArray[np.float32] | Tensor, leaves: list[tuple[slice, Tensor]]
) -> NDArray[np.float32] | Tensor | None:
    """Adds up the gradients of leaves over one array. Returns None if no leaf has a gradient."""
    present = []
    for rows, leaf in leaves:
        if leaf.grad is not None:
            present.append((rows, leaf.grad))
    if not present:
        return None
    if len(present) == 1 and present[0][1].shape == like.shape:
        whole = present[0][1].contiguous()
    else:
        whole = torch.zeros_like(torch.as_tensor(like))
        for rows, gradient in present:
            whole[rows] += gradient
    whole = whole.reshape(-1, whole.shape[-1])
    return whole if isinstance(like, Tensor) else whole.numpy()


EXAMPLES = 8
MOST_IDS = 3
SCALE = 0.01


def example_of(spec: SparseSpec) -> tuple[Tensor, Embeddings]:
    """Returns an example batch with the groups of a run; see :func:`example_for`."""
    return example_for(spec.schema, spec.groups())


def example_for(schema: Schema, groups: Sequence[Group], *, train: bool = True) -> tuple[Tensor, Embeddings]:
    """Returns zeros as numeric inputs, float32[B, X], and random embeddings of all groups.

    Sequences have one to three ids. With ``train``, the embeddings collect gradients.
    """
    random = np.random.default_rng(0)
    lengths = np.array(
        [1 + example % MOST_IDS for _ in schema.sparse for example in range(EXAMPLES)], np.int64
    )
    batch = Batch(
        ids=np.zeros(int(lengths.sum()), np.int64),
        offsets=np.concatenate([[0], lengths.cumsum()]).astype(np.int32),
        numeric=np.zeros((EXAMPLES, len(schema.numeric)), np.float32),
        labels=np.zeros((EXAMPLES, len(schema.labels.names)), np.float32),
    )
    shapes = [output.shape_in(batch) for group in groups for output in group.outputs]
    outputs = [random.normal(scale=SCALE, size=shape).astype(np.float32) for shape in shapes]
    leaves = Leaves(groups, outputs, sequence_bounds(groups, batch), train=train)
    return torch.from_numpy(batch.numeric), leaves.embeddings()
