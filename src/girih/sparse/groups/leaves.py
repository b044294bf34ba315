"""The outputs of all groups as leaves of torch's graph: what a model takes, and where its gradients gather.

Shapes: B examples, L ids of a sequence feature in the batch, D width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.needs import EMBEDDING
from girih.sparse.groups.group import BoundsOf
from girih.sparse.groups.pack import Group, Output


class Leaves:
    """Tensors over the outputs of all groups.

    Args:
        arrays: of the outputs of all groups: float32[B, F, D], or [L, D] of a whole sequence.
        bounds_of: bounds of sequence features.
        train: whether they collect gradients.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        arrays: Sequence[NDArray[np.float32]],
        bounds_of: BoundsOf,
        *,
        train: bool,
    ) -> None:
        self._outputs = [output for group in groups for output in group.outputs]
        self._arrays = arrays
        self._bounds_of, self._train = bounds_of, train
        self._parts: list[tuple[slice | None, list[Tensor]]] = []

    def embeddings(self, examples: slice | None = None) -> Embeddings:
        """Embeddings for a model: of all examples, or of a micro-batch. Each call makes leaves of its own."""
        blocks, first_order, sequences = [], [], {}
        leaves: list[Tensor] = []
        for output, array in zip(self._outputs, self._arrays, strict=True):
            leaf = torch.from_numpy(array[self._rows(output, examples)]).requires_grad_(self._train)
            leaves.append(leaf)
            if output.whole:
                bounds = self._bounds(output, examples)
                sequences[output.names[0]] = Jagged(leaf, torch.from_numpy(bounds).long() - int(bounds[0]))
            elif output.segment.name == EMBEDDING:
                blocks.append(Block(output.names, leaf))
            else:
                first_order.append(Block(output.names, leaf))
        self._parts.append((examples, leaves))
        return Embeddings(tuple(blocks), sequences, tuple(first_order))

    def gradients(self) -> list[NDArray[np.float32] | None]:
        """For each output of all groups float32[·, D], or None where it took no part in the loss."""
        return [self._gradient(number) for number in range(len(self._arrays))]

    def _gradient(self, number: int) -> NDArray[np.float32] | None:
        given = [(examples, leaves[number].grad) for examples, leaves in self._parts]
        if len(given) == 1 and given[0][0] is None:
            gradient = given[0][1]
            return None if gradient is None else _flat(gradient.contiguous().numpy())
        if all(gradient is None for _, gradient in given):
            return None
        whole = np.zeros_like(self._arrays[number])
        for examples, part in given:
            if part is not None:
                whole[self._rows(self._outputs[number], examples)] += part.numpy()
        return _flat(whole)

    def _rows(self, output: Output, examples: slice | None) -> slice:
        if examples is None or not output.whole:
            return examples or slice(None)
        bounds = self._bounds_of(int(output.features[0]))
        own = self._bounds(output, examples)
        return slice(int(own[0] - bounds[0]), int(own[-1] - bounds[0]))

    def _bounds(self, output: Output, examples: slice | None) -> NDArray[Any]:
        bounds = self._bounds_of(int(output.features[0]))
        return bounds if examples is None else bounds[examples.start : examples.stop + 1]


def _flat(gradient: NDArray[np.float32]) -> NDArray[np.float32]:
    return gradient.reshape(-1, gradient.shape[-1])
