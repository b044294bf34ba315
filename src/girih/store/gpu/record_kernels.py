"""Kernels on records in GPU memory: initial values, columns, sums of gradients, optimizer steps.

A record's number is its position in the chunks. It is the number of a row, or of a slot that holds a row for a while.

Shapes: U unique keys, n the capacity of the arrays, W columns of a row, T tables, S segments.
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
    """Unique keys on a device. Keys of one table are adjacent.

    Attributes:
        ids, tables, counts: int64[n], int32[n], int32[n], with room for n keys.
        num: int32[1], the number of keys, U.
        most: int64[T] on the host, upper bounds for the number of keys of each table.
        on_host: the same keys on the host, or None before the first request.
    """

    ids: Tensor
    tables: Tensor
    counts: Tensor
    num: Tensor
    most: Longs
    on_host: Keys | None = None

    def __len__(self) -> int:
        """The capacity, n."""
        return len(self.ids)


@dataclass(frozen=True)
class DeviceSegments:
    """The segments of a shard's rows, and their initial values, on a device.

    Attributes:
        dtype: the number of the columns' dtype.
        described: for each segment: first column, dim, first word and width of the state, optimizer.
        seeds, kinds, options: the initializers: the bits of uint64[T, S], int64[T, S], float64[T, S, 2].
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
        """Returns the segments of a layout."""
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
        """The number of columns, W."""
        return sum(segment[at.DIM] for segment in self.described)

    @property
    def value_bytes(self) -> int:
        """The size of a column in bytes."""
        return 4 if self.dtype == at.FLOAT32 else 2

    def aligned(self, first_column: int, dim: int) -> bool:
        """Returns whether these columns begin and end at multiples of 16 bytes, in records and in initial values."""
        return jit.aligned(first_column * self.value_bytes, dim * self.value_bytes)


class RecordKernels:
    """Launches kernels on records of a device. No method waits for the GPU."""

    def __init__(self, records: RecordChunks, row_layout: RowLayout) -> None:
        self._records, self.device = records, records.device
        self.segments = DeviceSegments.of(row_layout, self.device)
        self._first_hyper = to_device(row_layout.first_hyper, self.device)

    def begin(self, keys: DeviceKeys, rows: Tensor, takes: Tensor, *, all_there: bool = False) -> Tensor:
        """Writes the values of new records, and returns the addresses of the columns of all keys, int64[n].

        The addresses are valid until the next call. Initial values of keys without a row share memory with the
        returned tensor, and live as long as this tensor.

        Args:
            rows: int32[n], -1 for keys without a row, which read initial values.
            takes: int32[n], 1 if the record is new.
            all_there: True if all keys have rows. This saves memory for initial values.
        """
        segments, n = self.segments, len(keys)
        first_value = n + n % 2  # initial values, and each row of them, begin at a multiple of 16 bytes
        row_bytes = 16 * -(-segments.num_columns * segments.value_bytes // 16)
        memory = torch.empty(
            first_value + (0 if all_there else n * row_bytes // 8),
            dtype=torch.int64,
            device=self.device,
        )
        # never 0, even without values: Triton would compile the kernel again for 0, an int32
        addresses, scratch = memory[:n], memory.data_ptr() + 8 * first_value
        block = jit.block_of(256, n)
        for number, (first, dim, state, width, optimizer) in enumerate(segments.described):
            self._launch(
                lookup.write_initial, keys, dim, keys.ids, keys.tables, keys.num, rows, takes, scratch, addresses, segments.seeds,
                segments.kinds, segments.options, self._first_hyper, number, len(segments.described), first, dim, state, row_bytes,
                block=block, AT_ONCE=min(block, jit.rows_at_once(jit.columns_of(dim))), OPTIMIZER=optimizer, STATE_WIDTH=width,
                ALIGNED=segments.aligned(first, dim),
            )  # fmt: skip
        return addresses

    def columns(self, keys: DeviceKeys, addresses: Tensor) -> Tensor:
        """Returns the columns at addresses, int64[n], as float32[n, W]."""
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
            terms, pieces: the ids of each key.
            sources: for each segment, the gradients of its outputs.

        Returns:
            The sums, float32[n, W], and int32[1]: the number of a key whose gradient is not finite, or -1.
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
        """Sums gradients like :meth:`sums`, but only if a sum might overflow.

        If no sum can overflow, this call forms no sums. :meth:`move` forms them from the third result.

        Args:
            lent: the gradients that contain ``sources``, float32 and contiguous. The factors of terms are at most 1.
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
        """Makes one optimizer step on the records of keys.

        Args:
            moving: int32[n], -1 for keys without a record.
            gradients: float32[n, W]. hyper: float64[S, 8].
            direct: the third result of :meth:`direct_sums`.
        """
        segments, there = self.segments, to_device(hyper, self.device)
        for number, (first, dim, state, width, optimizer) in enumerate(segments.described):
            kernel: Any = update.move_rows
            more: tuple[Any, ...] = ()
            first_state = 4 * state if width > 1 else 0
            kinds = {"ALIGNED": segments.aligned(first, dim) and jit.aligned(first_state)}
            if direct is not None:
                kernel, more = update.sum_and_move_rows, direct.arguments(number)
                source = direct.sources[number]
                kinds["ALIGNED"] &= source.aligned
                kinds |= {"POOLED": source.pooled, "WHOLE": source.whole}
            self._launch(
                kernel, keys, dim, moving, keys.ids, keys.tables, keys.num, there[number], segments.table_seeds, step, gradients,
                segments.num_columns, first, dim, state, *more, in_turn=True, OPTIMIZER=optimizer, STATE_WIDTH=width,
                **kinds,
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
        """Returns the results of :meth:`sums`, and the sums of pieces by segment."""
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
        """Sets the records of keys, int32[n], to ``values``, float32[n, W], and adapts optimizer state."""
        segments = self.segments
        for number, (first, dim, state, _, optimizer) in enumerate(segments.described):
            self._launch(
                update.assign_rows, keys, dim, rows, keys.num, values, segments.num_columns, self._first_hyper[number], step,
                first, dim, state, OPTIMIZER=optimizer, ALIGNED=segments.aligned(first, dim),
            )  # fmt: skip

    def _launch(
        self,
        kernel: object,
        keys: DeviceKeys,
        dim: int,
        *arguments: object,
        block: int = 0,
        **options: object,
    ) -> None:
        """Launches a kernel on the records of keys, with tiles for ``dim`` columns of ``block`` keys, or as many as suit."""
        columns, records = jit.columns_of(dim), self._records
        jit.launch(
            kernel, len(keys), block or jit.rows_at_once(columns), records.chunks, *arguments, **options, DTYPE=self.segments.dtype,
            CHUNK_BITS=records.chunk_bits, STRIDE=records.stride, COLUMNS=columns,
        )  # fmt: skip
