"""Kernels on records in GPU memory, wherever they are: initial values, columns, sums of gradients, optimizer steps.

Records are named by their numbers in the chunks: those of rows, or of slots in which rows lie for a while.

Shapes: U unique keys, n what there is room for, W columns of a row, T tables, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.kernels.cpu import layout as at
from girih.kernels.gpu import jit, lookup, update
from girih.kernels.gpu.dedup import BagTerms
from girih.kernels.gpu.gradients import (
    FusedInputs,
    Pieces,
    Sources,
    find_largest,
    safe_limit,
    sum_pieces,
    sum_terms,
)
from girih.store.gpu.gpu_memory import RecordChunks, to_device
from girih.store.keys import Keys
from girih.store.rows.record import RowLayout
from girih.store.spec import Longs


@dataclass
class DeviceKeys:
    """Unique keys on a device; those of one table stand together.

    Attributes:
        ids, tables, counts: int64[n], int32[n], int32[n], with room for n.
        num: int32[1], U: how many there are.
        most: int64[T], how many there are of each table at most, on the host.
        on_host: the same on the host, once somebody has asked for them.
    """

    ids: Tensor
    tables: Tensor
    counts: Tensor
    num: Tensor
    most: Longs
    on_host: Keys | None = None

    def __len__(self) -> int:
        """n."""
        return len(self.ids)


@dataclass(frozen=True)
class DeviceSegments:
    """The segments of a shard's rows, and what their values begin with, on a device.

    Attributes:
        dtype: that of columns, by number.
        described: of each segment: first column, dim, first word and width of the state, optimizer.
        seeds, kinds, options: uint64 by its bits, int64, float64: [T, S], [T, S], [T, S, 2].
        table_seeds: int64[T].
    """

    dtype: int
    described: list[list[int]]
    seeds: Tensor
    kinds: Tensor
    options: Tensor
    table_seeds: Tensor

    @classmethod
    def of(cls, row_layout: RowLayout, device: torch.device) -> DeviceSegments:
        """Those of a layout."""
        kernel = row_layout.kernel
        return cls(
            dtype=kernel.dtype,
            described=kernel.segments.tolist(),
            seeds=to_device(kernel.seeds.view(np.int64), device),
            kinds=to_device(kernel.initializers, device),
            options=to_device(kernel.initializer_options, device),
            table_seeds=to_device(kernel.table_seeds.view(np.int64), device),
        )

    @property
    def num_columns(self) -> int:
        """W."""
        return sum(segment[at.DIM] for segment in self.described)

    @property
    def value_bytes(self) -> int:
        """Bytes of a column."""
        return 4 if self.dtype == at.FLOAT32 else 2

    def aligned(self, first_column: int, dim: int) -> bool:
        """True if these columns begin and end at multiples of 16 bytes, in records and in initial values."""
        return jit.aligned(first_column * self.value_bytes, dim * self.value_bytes)


class RecordKernels:
    """Launches kernels on records of a ``device``; waits for nothing."""

    def __init__(self, records: RecordChunks, row_layout: RowLayout) -> None:
        self._records, self.device = records, records.device
        self.segments = DeviceSegments.of(row_layout, self.device)
        self._first_hyper = to_device(row_layout.first_hyper, self.device)

    def begin(self, keys: DeviceKeys, rows: Tensor, takes: Tensor, *, all_there: bool = False) -> Tensor:
        """Writes the values of records that are new; returns where the columns of all keys lie until the next call, int64[n].

        Initial values of keys without a row share memory with the returned tensor, and last as long as it does.

        Args:
            rows: int32[n], -1 for keys that have none and read initial values.
            takes: int32[n], 1 where the record is new.
            all_there: no key has none, which saves memory for initial values.
        """
        segments, n = self.segments, len(keys)
        first_value = (
            n + n % 2
        )  # initial values begin at a multiple of 16 bytes, and so does each row of them
        row_bytes = 16 * -(-segments.num_columns * segments.value_bytes // 16)
        memory = torch.empty(
            first_value + (0 if all_there else n * row_bytes // 8),
            dtype=torch.int64,
            device=self.device,
        )
        # never 0, even without values: Triton would compile the kernel again for 0, an int32
        addresses, scratch = memory[:n], memory.data_ptr() + 8 * first_value
        for number, (first, dim, state, width, optimizer) in enumerate(segments.described):
            self._launch(
                lookup.write_initial, keys, dim, keys.ids, keys.tables, keys.num, rows, takes, scratch, addresses, segments.seeds,
                segments.kinds, segments.options, self._first_hyper, number, len(segments.described), first, dim, state, row_bytes,
                OPTIMIZER=optimizer, STATE_WIDTH=width, ALIGNED=segments.aligned(first, dim),
            )  # fmt: skip
        return addresses

    def columns(self, keys: DeviceKeys, addresses: Tensor) -> Tensor:
        """Columns at addresses, int64[n], as float32[n, W]."""
        segments = self.segments
        values = torch.empty((len(keys), segments.num_columns), dtype=torch.float32, device=self.device)
        columns = jit.columns_of(segments.num_columns)
        jit.launch(
            lookup.gather, len(keys), jit.rows_at_once(columns), addresses, keys.num, values, segments.num_columns,
            DTYPE=segments.dtype, ALIGNED=segments.aligned(0, segments.num_columns), COLUMNS=columns,
        )  # fmt: skip
        return values

    def sums(
        self, keys: DeviceKeys, terms: BagTerms, pieces: Pieces, sources: Sequence[Sources]
    ) -> tuple[Tensor, Tensor]:
        """Sums the gradients of keys.

        Args:
            terms, pieces: which ids each key has.
            sources: of each segment, where the gradients of its outputs lie.

        Returns:
            float32[n, W], and int32[1]: a key whose gradient is not finite, or -1.
        """
        totals, nonfinite, _ = self._sums(keys, terms, pieces, sources)
        return totals, nonfinite

    def direct_sums(
        self,
        keys: DeviceKeys,
        terms: BagTerms,
        pieces: Pieces,
        sources: Sequence[Sources],
        lent: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, FusedInputs]:
        """:meth:`sums`, unless none can overflow: :meth:`move` forms them then, by the third of what is returned.

        Args:
            lent: the gradients that sources are of, float32 and contiguous; factors of terms are 1 at most.
        """
        limit, largest = safe_limit(len(keys)), torch.zeros(1, dtype=torch.int32, device=self.device)
        find_largest(lent, largest)
        totals, nonfinite, parts = self._sums(keys, terms, pieces, sources, largest, limit)
        return totals, nonfinite, FusedInputs(terms, pieces, sources, lent, parts, largest, limit)

    def move(
        self,
        keys: DeviceKeys,
        moving: Tensor,
        gradients: Tensor,
        hyper: NDArray[np.float64],
        step: int,
        direct: FusedInputs | None = None,
    ) -> None:
        """One optimizer step on the records of keys.

        Args:
            moving: int32[n], -1 for keys that have none.
            gradients: float32[n, W]. hyper: float64[S, 8].
            direct: what :meth:`direct_sums` returned beside the gradients.
        """
        segments, there = self.segments, to_device(hyper, self.device)
        for number, (first, dim, state, width, optimizer) in enumerate(segments.described):
            kernel: Any = update.move_rows
            more: tuple[Any, ...] = ()
            first_state = 4 * state if width > 1 else 0
            kinds = {"ALIGNED": segments.aligned(first, dim) and jit.aligned(first_state)}
            if direct is not None:
                kernel, more, source = (
                    update.sum_and_move_rows,
                    direct.arguments(number),
                    direct.sources[number],
                )
                kinds = {
                    "ALIGNED": kinds["ALIGNED"] and source.aligned,
                    "POOLED": source.pooled,
                    "WHOLE": source.whole,
                }
            self._launch(
                kernel, keys, dim, moving, keys.ids, keys.tables, keys.num, there[number], segments.table_seeds, step, gradients,
                segments.num_columns, first, dim, state, *more, OPTIMIZER=optimizer, STATE_WIDTH=width, **kinds,
            )  # fmt: skip

    def _sums(
        self,
        keys: DeviceKeys,
        terms: BagTerms,
        pieces: Pieces,
        sources: Sequence[Sources],
        largest: Tensor | None = None,
        limit: int = 0,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See :meth:`sums`; also returns the sums of pieces, by segment."""
        totals = torch.empty((len(keys), self.segments.num_columns), dtype=torch.float32, device=self.device)
        nonfinite = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        parts = []
        for source, (first, dim, *_) in zip(sources, self.segments.described, strict=True):
            parts.append(sum_pieces(source, terms, pieces, keys.num, dim))
            sum_terms(
                source, terms, pieces, parts[-1], keys.num, totals, first, dim, nonfinite, largest, limit
            )
        return totals, nonfinite, parts

    def assign(self, keys: DeviceKeys, rows: Tensor, values: Tensor, step: int) -> None:
        """Sets the records of keys, int32[n], to ``values``, float32[n, W]; optimizer state is made to agree."""
        segments = self.segments
        for number, (first, dim, state, _, optimizer) in enumerate(segments.described):
            self._launch(
                update.assign_rows, keys, dim, rows, keys.num, values, segments.num_columns, self._first_hyper[number], step,
                first, dim, state, OPTIMIZER=optimizer, ALIGNED=segments.aligned(first, dim),
            )  # fmt: skip

    def _launch(
        self, kernel: object, keys: DeviceKeys, dim: int, *arguments: object, **options: object
    ) -> None:
        """Launches a kernel on the records of keys, with tiles for ``dim`` columns."""
        columns, records = jit.columns_of(dim), self._records
        jit.launch(
            kernel, len(keys), jit.rows_at_once(columns), records.chunks, *arguments, **options, DTYPE=self.segments.dtype,
            CHUNK_BITS=records.chunk_bits, STRIDE=records.stride, COLUMNS=columns,
        )  # fmt: skip
