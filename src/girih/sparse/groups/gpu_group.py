"""An embedding group in GPU memory: ids go over once, and rows, bags and gradients stay there.

What depends on ids alone (unique keys, the sorted ids of each key) is done on a stream of its own when the next batch is
prepared, beside the computation of this one.

Shapes: F features of the group, B examples, N ids in the batch, n of the group, D columns of a segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.errors import ConfigError
from girih.kernels.cpu import layout as at
from girih.kernels.gpu import jit, pool
from girih.kernels.gpu.dedup import Terms, Unique, describe_terms, unique
from girih.kernels.gpu.gradients import Pieces, Sources
from girih.sparse.groups.gpu_batch import GpuBatch
from girih.sparse.groups.group import Fill
from girih.sparse.groups.pack import Group
from girih.store import Store
from girih.store.gpu.gpu_memory import to_device
from girih.store.gpu.gpu_rows import Keys
from girih.store.gpu.gpu_state import GpuState

_BATCH_SIZES = 8  # of batches whose bounds are remembered
SHORT_BAG = 16  # ids of the longest bag up to which a program has several


@dataclass(frozen=True)
class GpuKeys:
    """The keys of a batch on a GPU, and the order of its ids: all that ids alone decide.

    Attributes:
        unique: its unique keys.
        of_tables: int64[T], ids of each table. longest: int64[F], ids of the longest bag of each feature.
        terms, pieces: the ids of each key; None where no gradient will be asked for.
        offsets, weights: int32[·], float32[N] or None, those of the batch.
        ready: when all of this is there, for other streams; None where it was done in order.
    """

    unique: Unique
    of_tables: NDArray[np.int64]
    longest: NDArray[np.int64]
    terms: Terms | None
    pieces: Pieces | None
    offsets: Tensor
    weights: Tensor | None
    ready: torch.cuda.Event | None

    def take_over(self, ready: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """Has a stream wait until all is there, and memory last until that stream is done with it."""
        stream.wait_event(ready)
        parts = (self.unique, self.terms, self.pieces)
        held = [each for part in parts if part is not None for each in vars(part).values()]
        for tensor in (*held, self.offsets, self.weights):
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)

    @property
    def keys(self) -> Keys:
        """The keys, as a store takes them."""
        found = self.unique
        return Keys(found.keys, found.tables, found.counts, found.num_keys, self.of_tables)


@dataclass(frozen=True)
class GpuRead:
    """The rows of a batch.

    Attributes:
        outputs: float32[B, F, D], or [L, D] where one is whole.
        keys: whose rows they are; rows: int32[n], where they are.
    """

    outputs: Sequence[Tensor]
    keys: GpuKeys
    rows: Tensor


@dataclass(frozen=True)
class GpuGradients:
    """Gradients of keys.

    Attributes:
        totals: float32[n, W].
        refused: int32[1]: a key whose own is not finite, or -1.
    """

    totals: Tensor
    refused: Tensor

    @property
    def nonfinite_key(self) -> int:
        """A key whose gradient is not finite, or -1: waits for the GPU."""
        return int(self.refused)


class GpuGroup:
    """A group on the GPU of this process.

    Args:
        shards: its one store, in GPU memory.

    Raises:
        ConfigError: several shards, or a store elsewhere.
    """

    def __init__(self, group: Group, shards: Sequence[Store]) -> None:
        if len(shards) != 1 or not isinstance(shards[0].state, GpuState):
            raise ConfigError(
                f"group {group.spec.name!r}: {len(shards)} shards; expected one, in GPU memory: set store.shards = 1"
            )
        self.group, self._state = group, shards[0].state
        self._device = self._state.memory.device
        self._tables = to_device(group.tables, self._device)
        self._slot_of = {int(feature): slot for slot, feature in enumerate(group.features)}
        self._side = None if jit.INTERPRETED else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        modes = np.zeros(len(group.features), np.int32)
        for output in group.outputs:
            for feature, mode in zip(output.features, output.modes, strict=True):
                if not output.whole:
                    modes[self._slot_of[int(feature)]] = mode
        self._modes = to_device(modes, self._device)
        self._first_bags: dict[tuple[int, int], Tensor] = {}
        self._output_modes = [
            to_device(output.modes.astype(np.int32), self._device) for output in group.outputs
        ]
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())

    def find(self, batch: Batch | GpuBatch) -> GpuKeys:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`; done beside whatever the GPU does."""
        with self._beside() as ready:
            return self._find(batch, train=True, ready=ready)

    def fetch(self, found: GpuKeys) -> None:
        """No-op: all rows are here."""

    def lookup(
        self, batch: Batch | GpuBatch, step: int, *, train: bool, found: GpuKeys | None = None
    ) -> tuple[GpuRead, Fill]:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`."""
        keys = self._find(batch, train=train, ready=None) if found is None else found
        if keys.ready is not None:
            keys.take_over(keys.ready, torch.cuda.current_stream())
        rows, addresses = self._state.read(keys.keys, step) if train else self._state.peeked(keys.keys)
        outputs = [
            torch.empty(output.shape_in(batch), dtype=torch.float32, device=self._device)
            for output in self.group.outputs
        ]
        read = GpuRead(outputs, keys, rows)

        def fill(examples: slice) -> None:
            for number in range(len(outputs)):
                self._fill(number, read, addresses, batch, examples)

        return read, fill

    def gradients(
        self, read: GpuRead, given: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> GpuGradients | None:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`; done without a wait."""
        if all(gradient is None for gradient in given):
            return None
        if read.keys.terms is None or read.keys.pieces is None:
            raise ConfigError("gradients of rows that were read for evaluation; read them for training")
        there = [None if gradient is None else gradient.contiguous() for gradient in given]
        sources = [self._sources(segment.name, there, batch) for segment in self.group.spec.segments]
        return GpuGradients(
            *self._state.gradients(read.keys.keys, read.keys.terms, read.keys.pieces, sources)
        )

    def apply(self, read: GpuRead, gradients: GpuGradients, step: int, lr_scale: float) -> None:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`."""
        keys = read.keys.keys
        self._state.move(keys, read.rows, gradients.totals, gradients.refused, step, lr_scale)

    def inverse(self, read: GpuRead) -> NDArray[np.int32]:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`: waits for the GPU."""
        numbers: NDArray[np.int32] = read.keys.unique.inverse.cpu().numpy()
        return numbers

    def _find(self, given: Batch | GpuBatch, *, train: bool, ready: torch.cuda.Event | None) -> GpuKeys:
        batch = given if isinstance(given, GpuBatch) else self._copied(given)
        size, features = batch.num_examples, self.group.features
        begins = batch.bounds[features]
        counts = batch.bounds[features + 1] - begins
        first_places = np.concatenate([[0], np.cumsum(counts)[:-1]])
        n = int(counts.sum())
        positions_of = to_device(
            np.concatenate([first_places, begins - first_places]).astype(np.int32), self._device
        )
        offsets, weights = batch.offsets, batch.weights
        found = unique(batch.ids, positions_of, self._tables, n)
        terms = pieces = None
        if train:
            first_bags = to_device((features * size).astype(np.int32), self._device)
            terms = describe_terms(found, positions_of, offsets, first_bags, self._modes, weights, n, size)
            pieces = Pieces(found.counts)
        of_tables = np.zeros(len(self.group.spec.tables), np.int64)
        np.add.at(of_tables, self.group.tables, counts)
        longest = batch.longest[features]
        return GpuKeys(found, of_tables, longest, terms, pieces, offsets, weights, ready)

    def _copied(self, batch: Batch) -> GpuBatch:
        """The ids of a batch, copied to this group's GPU without a wait."""
        size, num_features = batch.num_examples, 1 + int(self.group.features.max())
        longest = np.zeros(num_features, np.int64)
        if size:
            longest[:] = np.diff(batch.offsets).reshape(-1, size)[:num_features].max(axis=1)
        return GpuBatch(
            ids=to_device(batch.ids, self._device),
            offsets=to_device(batch.offsets, self._device),
            weights=None if batch.weights is None else to_device(batch.weights, self._device),
            num_examples=size,
            bounds=batch.offsets[np.arange(num_features + 1) * size].astype(np.int64),
            longest=longest,
        )

    @contextlib.contextmanager
    def _beside(self) -> Iterator[torch.cuda.Event | None]:
        """Runs what is done within on a stream of its own; the event says when it is done."""
        if self._side is None:
            yield None
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            yield event
            event.record()

    def _fill(
        self, number: int, read: GpuRead, addresses: Tensor, batch: Batch | GpuBatch, examples: slice
    ) -> None:
        """Fills in an output's part of some examples."""
        output, out, keys = self.group.outputs[number], read.outputs[number], read.keys
        own = self._state.rows.segments
        size = 4 if own.dtype == at.FLOAT32 else 2
        dim = output.segment.dim
        columns = jit.columns_of(dim)
        shared = {"DTYPE": own.dtype, "COLUMNS": columns}
        if output.whole:
            own_ids = output.ids_in(batch)
            first, last = own_ids.start, own_ids.stop
            if isinstance(batch, Batch):  # of another, the ids of all examples are filled in
                bag = int(output.features[0]) * batch.num_examples
                first, last = (
                    int(batch.offsets[bag + example]) for example in (examples.start, examples.stop)
                )
            part = out[first - own_ids.start :]
            jit.launch(
                pool.spread, last - first, jit.rows_at_once(columns), addresses, keys.unique.inverse, part, first,
                last - first, output.first_column * size, dim, **shared,
            )  # fmt: skip
            return
        num_features = len(output.features)
        first_bag = examples.start * num_features
        num_bags = (examples.stop - examples.start) * num_features
        bags = self._bags(number, batch.num_examples)
        weights = keys.weights if keys.weights is not None else out  # unread where there are none
        shared["WEIGHTED"] = keys.weights is not None
        given = (
            addresses,
            keys.unique.inverse,
            keys.offsets,
            weights,
            bags,
            self._output_modes[number],
            out,
            first_bag,
        )
        slots = [self._slot_of[int(feature)] for feature in output.features]
        if keys.longest[slots].max() <= SHORT_BAG:
            jit.launch(
                pool.pool_short, num_bags, jit.rows_at_once(columns), *given, num_bags, num_features,
                output.first_column * size, dim, **shared,
            )  # fmt: skip
        else:
            jit.launch(
                pool.pool_long, num_bags, 1, *given, num_features, output.first_column * size, dim,
                AT_ONCE=min(128, jit.rows_at_once(columns)), **shared,
            )  # fmt: skip

    def _bags(self, number: int, num_examples: int) -> Tensor:
        """int32[P]: where the bounds of each feature of an output begin."""
        found = self._first_bags.get((number, num_examples))
        if found is None:
            if len(self._first_bags) >= _BATCH_SIZES * len(self.group.outputs):
                self._first_bags.clear()
            firsts = (self.group.outputs[number].features * num_examples).astype(np.int32)
            found = self._first_bags[number, num_examples] = to_device(firsts, self._device)
        return found

    def _sources(self, segment: str, given: Sequence[Tensor | None], batch: Batch | GpuBatch) -> Sources:
        """The addresses of the gradients of one segment's outputs, by feature."""
        described = np.zeros((4, len(self.group.features)), np.int64)
        for output, gradient in zip(self.group.outputs, given, strict=True):
            if output.segment.name != segment or gradient is None:
                continue
            row, start = 4 * output.segment.dim, gradient.data_ptr()
            if output.whole:
                slot = self._slot_of[int(output.features[0])]
                described[2:, slot] = start - row * output.ids_in(batch).start, row
                continue
            for place, feature in enumerate(output.features):
                described[:2, self._slot_of[int(feature)]] = start + row * place, row * len(output.features)
        pooled, whole = bool(described[0].any()), bool(described[2].any())
        return Sources(to_device(described, self._device), pooled=pooled, whole=whole)
