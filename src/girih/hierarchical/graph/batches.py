"""The tensors of a batch as inputs of a net. Also makes batches of other sizes from its examples.

Shapes: B examples, n examples of the new batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError
from girih.models.embeddings import Block, Embeddings, Jagged

Place = tuple[str, int | str]
"""A tensor in embeddings: ("blocks", 0), ("first_order", 0), ("values", feature) or ("offsets", feature)."""
SIZES = (5, 7, 11, 1)
"""The sizes of the batches that a net is traced on.

They are primes, so that none is a multiple of another. One example is included, because models may treat it
differently.
"""
DRAWS = 50
"""The number of random draws in search of sequences that all differ in length."""


def tensors_of(embeddings: Embeddings) -> Iterator[tuple[Place, Tensor]]:
    """All tensors of a batch's embeddings."""
    for number, block in enumerate(embeddings.blocks):
        yield ("blocks", number), block.values
    for number, block in enumerate(embeddings.first_order):
        yield ("first_order", number), block.values
    for name, sequence in embeddings.sequences.items():
        yield ("values", name), sequence.values
        yield ("offsets", name), sequence.offsets


def read(embeddings: Embeddings, kind: str, key: int | str) -> Tensor:
    """Returns a tensor of embeddings by its place."""
    if kind in ("values", "offsets"):
        tensor: Tensor = getattr(embeddings.sequences[str(key)], kind)
        return tensor
    blocks: tuple[Block, ...] = getattr(embeddings, kind)
    return blocks[int(key)].values


def packing_of(embeddings: Embeddings) -> tuple[object, ...]:
    """Returns the packing that a net is traced for: the features of each block, and the sequences."""
    blocks, first_order = (
        tuple(block.features for block in packed) for packed in (embeddings.blocks, embeddings.first_order)
    )
    return blocks, first_order, tuple(embeddings.sequences)


def batches_of(
    numeric: Tensor, embeddings: Embeddings, sizes: tuple[int, ...]
) -> list[tuple[Tensor, Embeddings]]:
    """Makes batches of these sizes that support gradients. Their examples are drawn from a batch with repetition.

    A sequence that is empty in all examples gets random vectors instead.

    Raises:
        ConfigError: the batch is empty.
    """
    if not len(numeric):
        raise ConfigError(
            "an empty batch: expected an example batch with at least one example to trace a model on"
        )
    random = np.random.default_rng(0)
    embeddings = _filled(embeddings, random)
    return [_drawn(numeric, embeddings, size, random) for size in sizes]


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Isolates random numbers and warnings, and turns gradients on."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _drawn(
    numeric: Tensor, embeddings: Embeddings, size: int, random: np.random.Generator
) -> tuple[Tensor, Embeddings]:
    lengths = [each.offsets.diff().cpu().numpy() for each in embeddings.sequences.values()]
    for _ in range(DRAWS):
        examples = random.integers(0, len(numeric), size)
        totals = [size, *(int(each[examples].sum()) for each in lengths)]
        if len(set(totals)) == len(totals):
            break
    index = torch.from_numpy(examples).to(numeric.device)
    drawn = embeddings.mapped(lambda values: values.index_select(0, index), lambda each: _taken(each, index))
    return numeric.index_select(0, index), drawn.mapped(lambda values: values.detach().requires_grad_())


def _taken(sequence: Jagged, index: Tensor) -> Jagged:
    begins, ends = (bounds.index_select(0, index) for bounds in (sequence.offsets[:-1], sequence.offsets[1:]))
    offsets = torch.cat([sequence.offsets.new_zeros(1), (ends - begins).cumsum(0).to(sequence.offsets.dtype)])
    rows = Jagged(sequence.values, offsets)
    number = torch.arange(int(offsets[-1]), device=offsets.device)
    example = torch.repeat_interleave(offsets.diff())
    return rows._replace(values=sequence.values[begins[example] + number - offsets[example]])


def _filled(embeddings: Embeddings, random: np.random.Generator) -> Embeddings:
    def filled(sequence: Jagged) -> Jagged:
        if len(sequence.values):
            return sequence
        lengths = torch.from_numpy(random.integers(1, 4, len(sequence.offsets) - 1))
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(sequence.offsets)
        shape = int(offsets[-1]), sequence.values.shape[1]
        values = torch.from_numpy(random.normal(scale=0.01, size=shape)).to(sequence.values)
        return Jagged(values, offsets)

    return embeddings.mapped(lambda values: values, filled)
