"""Turns ids into unique keys, rows into bags, and gradients of bags into gradients of keys, on a GPU.

This module reads rows by their addresses. Other modules decide which memory holds the rows.

Shapes: F features of the group, B examples, N ids in the batch, n of the group, T tables, D columns of a segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import jit, pool
from girih.kernels.gpu.dedup import BagTerms, Unique, describe_terms, unique
from girih.kernels.gpu.gradients import Pieces, Sources
from girih.kernels.gpu.pool import SHORT_BAG
from girih.sparse.groups.gpu_batch import GpuBatch, SharedCopy
from girih.sparse.groups.pack import Group, GroupOutput
from girih.store.gpu.gpu_memory import reached, to_device
from girih.store.gpu.record_kernels import DeviceKeys


class SideStream:
    """A separate stream on one device, which starts after the work that the device already has.

    Does nothing if kernels are interpreted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if jit.INTERPRETED else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[torch.cuda.Event | None]:
        """Runs the block's GPU work on this stream. Yields the event of its end, or None if work is done in order."""
        if self._stream is None:
            yield None
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield event
            event.record()


def take_over(ready: torch.cuda.Event | None, results: object, device: torch.device) -> None:
    """Makes the current stream of a device wait for results of another stream.

    Also keeps the memory of the results until the current stream has used them.

    Args:
        ready: the event of a :class:`SideStream`, or None if there is nothing to wait for.
        results: an object with the tensors that the other stream made.
    """
    if ready is None:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(ready)
    for tensor in tensors_of(results):
        tensor.record_stream(stream)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yields all tensors in an object of girih: in its fields, in their fields, and so on."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif type(value).__module__.startswith("girih."):
        yield from tensors_of([*vars(value).values()])


_BATCH_SIZES = 8  # the number of batch sizes with cached bounds


@dataclass(frozen=True)
class GpuKeys:
    """The keys of a batch on a GPU, and the order of the batch's ids. All of it depends only on ids.

    Attributes:
        unique: the unique keys of the batch.
        of_tables: int64[T], the number of ids of each table.
        longest: int64[F], the number of ids in the longest bag of each feature.
        terms, pieces: the ids of each key, or None if gradients are not needed.
        offsets, weights: int32[·], float32[N] or None, the batch's offsets and weights.
        ready: tells other streams when all of this is computed, or None if the current stream computed it.
    """

    unique: Unique
    of_tables: NDArray[np.int64]
    longest: NDArray[np.int64]
    terms: BagTerms | None
    pieces: Pieces | None
    offsets: Tensor
    weights: Tensor | None
    ready: torch.cuda.Event | None

    def of_training(self) -> tuple[BagTerms, Pieces]:
        """Returns the ids of each key: ``terms`` and ``pieces``.

        Raises:
            ConfigError: the rows were read for evaluation.
        """
        if self.terms is None or self.pieces is None:
            raise ConfigError("gradients of rows that were read for evaluation; read them for training")
        return self.terms, self.pieces

    @cached_property
    def keys(self) -> DeviceKeys:
        """The keys in the form that a store takes."""
        unique = self.unique
        return DeviceKeys(unique.keys, unique.tables, unique.counts, unique.num_keys, self.of_tables)


class RowAddresses(NamedTuple):
    """Addresses of rows in GPU memory.

    Attributes:
        addresses: int64[n], the address of each key's columns.
        dtype: the number of the columns' dtype.
        aligned: True if all addresses are multiples of 16.
    """

    addresses: Tensor
    dtype: int
    aligned: bool


class GpuBags:
    """Finds the keys of one group, pools its rows, and describes the addresses of gradients.

    Args:
        shared_copy: the copies of batches; one object serves all groups of a half. None for a single group.
    """

    def __init__(self, group: Group, device: torch.device, shared_copy: SharedCopy | None = None) -> None:
        self.group, self.device, self._shared_copy = group, device, shared_copy or SharedCopy()
        self._tables = to_device(group.tables, device)
        self._features = to_device(group.features.astype(np.int32), device)
        self._slot_of = {int(feature): slot for slot, feature in enumerate(group.features)}
        modes = np.zeros(len(group.features), np.int32)
        for output in group.outputs:
            for feature, mode in zip(output.features, output.modes, strict=True):
                if not output.whole:
                    modes[self._slot_of[int(feature)]] = mode
        self._modes = to_device(modes, device)
        self._first_bags: dict[tuple[int, int], Tensor] = {}
        self._output_modes = [to_device(output.modes.astype(np.int32), device) for output in group.outputs]
        self._factors = [to_device(pool.short_factors(output.modes), device) for output in group.outputs]

    def find(self, data: Batch | GpuBatch, *, train: bool, ready: torch.cuda.Event | None = None) -> GpuKeys:
        """Finds the unique keys of a batch, and for training the ids of each key. Does not wait for the GPU.

        Args:
            ready: an event that the caller records after this work.
        """
        batch = (
            data
            if isinstance(data, GpuBatch)
            else self._shared_copy.of(data, self.group.spec.name, self._copied)
        )
        take_over(batch.ready, batch, self.device)
        size, features = batch.num_examples, self.group.features
        begins = batch.bounds[features]
        counts = batch.bounds[features + 1] - begins
        n = int(counts.sum())
        positions_of = to_device(places_and_positions(begins, counts), self.device)
        offsets, weights = batch.offsets, batch.weights
        dedup = unique(batch.ids, positions_of, self._tables, n)
        terms = pieces = None
        if train:
            first_bags = self._features * size
            terms = describe_terms(dedup, positions_of, offsets, first_bags, self._modes, weights, n, size)
            pieces = Pieces(dedup.counts)
        of_tables = np.zeros(len(self.group.spec.tables), np.int64)
        np.add.at(of_tables, self.group.tables, counts)
        longest = batch.longest[features]
        return GpuKeys(dedup, of_tables, longest, terms, pieces, offsets, weights, ready)

    def _copied(self, batch: Batch) -> GpuBatch:
        """Copies the ids of a batch to the GPU. Does not wait for the copy."""
        size, num_features = batch.num_examples, batch.num_features or 1 + int(self.group.features.max())
        longest, single = np.zeros(num_features, np.int64), batch.has_single_ids
        if size:
            longest[:] = 1 if single else np.diff(batch.offsets).reshape(-1, size).max(axis=1)
        if single:  # a third of the bytes that would be copied
            offsets = torch.arange(len(batch.offsets), dtype=torch.int32, device=self.device)
        else:
            offsets = to_device(batch.offsets, self.device)
        return GpuBatch(
            ids=to_device(batch.ids, self.device),
            offsets=offsets,
            weights=None if batch.weights is None else to_device(batch.weights, self.device),
            num_examples=size,
            bounds=batch.offsets[np.arange(num_features + 1) * size].astype(np.int64),
            longest=longest,
            ready=reached(self.device),
        )

    def outputs(self, batch: Batch | GpuBatch) -> list[Tensor]:
        """Returns empty tensors for all outputs: float32[B, F, D], or [L, D] for a whole output."""
        return [
            torch.empty(output.shape_in(batch), dtype=torch.float32, device=self.device)
            for output in self.group.outputs
        ]

    def fill(
        self,
        outputs: Sequence[Tensor],
        keys: GpuKeys,
        rows: RowAddresses,
        batch: Batch | GpuBatch,
        examples: slice,
    ) -> None:
        """Fills in a range of examples in all outputs."""
        for number in range(len(outputs)):
            self._fill(number, outputs[number], keys, rows, batch, examples)

    def weight_gradients(
        self, keys: GpuKeys, values: Tensor, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> Tensor:
        """Returns float32[N], the gradients of the weights of ids. Ids in no bag with a gradient get 0.

        Args:
            values: float32[·, W], the columns of keys at the time when bags were filled in.
            gradients: the gradient of each output, float32[·, D], or None.
        """
        out = torch.zeros(len(keys.unique.inverse), dtype=torch.float32, device=self.device)
        for number, (output, gradient) in enumerate(zip(self.group.outputs, gradients, strict=True)):
            if output.whole or gradient is None:
                continue
            dim, num_features = output.segment.dim, len(output.features)
            columns, num_bags = jit.columns_of(dim), batch.num_examples * num_features
            short = self._are_short(output, keys)
            poolings = (self._factors if short else self._output_modes)[number]
            bags = self._bags(number, batch.num_examples)
            args = (values, keys.unique.inverse, keys.offsets, gradient.contiguous(), bags, poolings, out)
            width = (values.shape[1], output.first_column, dim)
            if short:
                jit.launch(
                    pool.weigh_short, num_bags, jit.rows_at_once(columns), *args, num_bags, num_features, *width,
                    COLUMNS=columns,
                )  # fmt: skip
            else:
                jit.launch(
                    pool.weigh_long, num_bags, 1, *args, num_features, *width, COLUMNS=columns,
                    AT_ONCE=min(128, jit.rows_at_once(columns)),
                )  # fmt: skip
        return out

    def sources(self, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch) -> list[Sources]:
        """Returns the addresses of the gradients of all outputs, by segment and feature.

        Args:
            gradients: float32[·, D] of each output, contiguous, or None. They must stay alive until they are read.
        """
        segments = self.group.spec.segments
        described = np.stack([self._describe_sources(segment.name, gradients, batch) for segment in segments])
        return [
            Sources(
                copy, pooled=bool(rows[0].any()), whole=bool(rows[2].any()), aligned=not (rows % 16).any()
            )
            for rows, copy in zip(described, to_device(described, self.device), strict=True)
        ]

    def _fill(
        self,
        number: int,
        out: Tensor,
        keys: GpuKeys,
        rows: RowAddresses,
        batch: Batch | GpuBatch,
        examples: slice,
    ) -> None:
        output = self.group.outputs[number]
        size = 4 if rows.dtype == at.FLOAT32 else 2
        dim = output.segment.dim
        columns = jit.columns_of(dim)
        first_byte = output.first_column * size
        aligned = rows.aligned and jit.aligned(first_byte, dim * size)
        shared = {"DTYPE": rows.dtype, "ALIGNED": aligned, "COLUMNS": columns}
        if output.whole:
            own_ids = output.ids_in(batch)
            first, last = own_ids.start, own_ids.stop
            if isinstance(batch, Batch):  # other batch types fill in the ids of all examples
                bag = int(output.features[0]) * batch.num_examples
                first, last = (
                    int(batch.offsets[bag + example]) for example in (examples.start, examples.stop)
                )
            part = out[first - own_ids.start :]
            jit.launch(
                pool.spread, last - first, jit.rows_at_once(columns), rows.addresses, keys.unique.inverse, part, first,
                last - first, first_byte, dim, **shared,
            )  # fmt: skip
            return
        num_features = len(output.features)
        first_bag = examples.start * num_features
        num_bags = (examples.stop - examples.start) * num_features
        bags = self._bags(number, batch.num_examples)
        weights = keys.weights if keys.weights is not None else out  # not read without weights
        shared["WEIGHTED"] = keys.weights is not None
        short = self._are_short(output, keys)
        arguments = (
            rows.addresses,
            keys.unique.inverse,
            keys.offsets,
            weights,
            bags,
            (self._factors if short else self._output_modes)[number],
            out,
            first_bag,
        )
        if short:
            jit.launch(
                pool.pool_short, num_bags, jit.rows_at_once(columns), *arguments, num_bags, num_features,
                first_byte, dim, **shared,
            )  # fmt: skip
        else:
            jit.launch(
                pool.pool_long, num_bags, 1, *arguments, num_features, first_byte, dim,
                AT_ONCE=min(128, jit.rows_at_once(columns)), **shared,
            )  # fmt: skip

    def _are_short(self, output: GroupOutput, keys: GpuKeys) -> bool:
        slots = [self._slot_of[int(feature)] for feature in output.features]
        return bool(keys.longest[slots].max() <= SHORT_BAG)

    def _bags(self, number: int, num_examples: int) -> Tensor:
        """Returns int32[P], for each feature of an output: the index of its first bag in the batch's offsets."""
        first_bags = self._first_bags.get((number, num_examples))
        if first_bags is None:
            if len(self._first_bags) >= _BATCH_SIZES * len(self.group.outputs):
                self._first_bags.clear()
            firsts = (self.group.outputs[number].features * num_examples).astype(np.int32)
            first_bags = self._first_bags[number, num_examples] = to_device(firsts, self.device)
        return first_bags

    def _describe_sources(
        self, segment: str, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> NDArray[np.int64]:
        """Returns int64[4, F]: see :class:`girih.kernels.gpu.gradients.Sources`."""
        described = np.zeros((4, len(self.group.features)), np.int64)
        for output, gradient in zip(self.group.outputs, gradients, strict=True):
            if output.segment.name != segment or gradient is None:
                continue
            row, start = 4 * output.segment.dim, gradient.data_ptr()
            if output.whole:
                slot = self._slot_of[int(output.features[0])]
                described[2:, slot] = start - row * output.ids_in(batch).start, row
                continue
            for place, feature in enumerate(output.features):
                described[:2, self._slot_of[int(feature)]] = start + row * place, row * len(output.features)
        return described


def places_and_positions(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns int32[2F]: the first place of each feature's ids, then position minus place for these ids.

    A place counts ids in the group. A position counts ids in the batch.

    Args:
        begins, counts: int64[F], the position of each feature's first id in the batch, and the number of its ids.
    """
    first_places = np.cumsum(counts) - counts
    return np.concatenate([first_places, begins - first_places]).astype(np.int32)
