"""The outputs of all groups become what a model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.needs import EMBEDDING
from girih.sparse.groups.pack import Group


def assemble(
    groups: Sequence[Group], leaves: Sequence[Sequence[Tensor]], bounds_of: Callable[[int], NDArray[Any]]
) -> Embeddings:
    """The embeddings of a batch.

    Args:
        leaves: one tensor an output of each group.
        bounds_of: feature → where each example's ids begin and the last one's end, integers [B + 1].
    """
    blocks, first_order, sequences = [], [], {}
    for group, tensors in zip(groups, leaves, strict=True):
        for output, leaf in zip(group.outputs, tensors, strict=True):
            if output.whole:
                bounds = torch.from_numpy(bounds_of(int(output.features[0]))).long()
                sequences[output.names[0]] = Jagged(leaf, bounds - bounds[0])
            elif output.segment.name == EMBEDDING:
                blocks.append(Block(output.names, leaf))
            else:
                first_order.append(Block(output.names, leaf))
    return Embeddings(tuple(blocks), sequences, tuple(first_order))


def bounds_in(batch: Batch) -> Callable[[int], NDArray[Any]]:
    """The bounds of a batch's features."""
    size = batch.num_examples
    return lambda feature: batch.offsets[feature * size : (feature + 1) * size + 1]
