"""Counters by table, row numbers for new keys, and the meta of all rows, in GPU memory.

Shapes: U unique keys, T tables, R rows that were ever made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

from girih.kernels.cpu import layout as at
from girih.kernels.gpu.jit import block_of, kernel, launch
from girih.kernels.gpu.layout import (
    COUNT,
    LAST_USED,
    NO_ROW,
    STAMP,
    TABLE,
    items,
    load,
    longs_at,
    record,
    words_at,
)

NUM_FREE, ROWS_EVER, NUM_ROWS, ADDED = range(4)
"""Entries of a shard's ``words``: the numbers of free rows, rows ever made, rows with keys, keys added to the index."""
_NUM_FREE, _ROWS_EVER, _NUM_ROWS, _ADDED = map(constexpr, range(4))
_COLUMNS, _TABLE_ROWS, _LOOKUPS, _HITS, _NEW, _REFUSED, _UPDATES, _DROPPED = map(
    constexpr,
    (at.TABLE_COLUMNS, at.TABLE_ROWS, at.LOOKUPS, at.HITS, at.NEW, at.REFUSED, at.UPDATES, at.DROPPED),
)


@triton.jit
def _add(
    counters: tensor, table: tensor, first: tensor, last: tensor, counted: tensor, column: constexpr
) -> None:  # fmt: skip
    """Adds the number of ``counted`` keys of each table to a column. All tables are between ``first`` and ``last``."""
    if first == last:  # nearly always, as keys of a table are adjacent: one atomic per program
        tl.atomic_add(counters + first * _COLUMNS + column, tl.sum(counted.to(tl.int64)), sem="relaxed")
    else:
        tl.atomic_add(counters + table * _COLUMNS + column, counted.to(tl.int64), mask=counted, sem="relaxed")


@triton.jit
def _tables_of(tables: tensor, i: tensor, mask: tensor) -> Any:
    """Returns the table of each key, and the lowest and the highest table."""
    table = load(tables + i, mask)
    return table, tl.min(tl.where(mask, table, 1 << 30)), tl.max(tl.where(mask, table, -1))


@kernel
def count_read(
    tables: tensor, is_new: tensor, admitted: tensor, takes: tensor, num_keys: tensor, counters: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Adds a read to the counters of tables, ``counters``, int64[T, 16].

    Args:
        is_new, admitted, takes: int32[U], 1 for keys without a row, for admitted keys, and for keys that get a row.
    """
    i = items(BLOCK)
    mask = i < tl.load(num_keys)
    table, first, last = _tables_of(tables, i, mask)
    new = load(is_new + i, mask) != 0
    may = load(admitted + i, mask) != 0
    made = load(takes + i, mask) != 0
    _add(counters, table, first, last, mask, _LOOKUPS)
    _add(counters, table, first, last, mask & (new == 0), _HITS)
    _add(counters, table, first, last, new & (may == 0), _REFUSED)
    _add(counters, table, first, last, made, _NEW)
    _add(counters, table, first, last, made, _TABLE_ROWS)


@kernel
def count_moved(
    tables: tensor, moving: tensor, refused: tensor, num_keys: tensor, counters: tensor, BLOCK: constexpr
) -> None:  # fmt: skip
    """Adds a step to the counters of tables.

    For the arguments see :func:`~girih.kernels.gpu.update.rows_to_move` and :func:`count_read`.
    """
    i = items(BLOCK)
    mask = (i < tl.load(num_keys)) & (tl.load(refused) < 0)
    table, first, last = _tables_of(tables, i, mask)
    row = tl.load(moving + i, mask=mask, other=NO_ROW)
    _add(counters, table, first, last, mask & (row >= 0), _UPDATES)
    _add(counters, table, first, last, mask & (row < 0), _DROPPED)


@kernel
def _number_rows(
    takes: tensor,
    ranks: tensor,
    free: tensor,
    words: tensor,
    rows: tensor,
    n: tensor,
    BLOCK: constexpr,
) -> None:
    i = items(BLOCK)
    mask = i < n
    mask = mask & (load(takes + i, mask) != 0)
    rank = tl.load(ranks + i, mask=mask, other=1).to(tl.int64) - 1
    num_free, ever = tl.load(words + _NUM_FREE), tl.load(words + _ROWS_EVER)
    again = mask & (rank < num_free)
    used = load(free + num_free - 1 - rank, again)
    row = tl.where(again, used, (ever + rank - num_free).to(tl.int32))
    tl.store(rows + i, row, mask=mask)


@kernel
def _take_rows(ranks: tensor, words: tensor, n: tensor, BLOCK: constexpr) -> None:
    total = tl.load(ranks + n - 1).to(tl.int64)
    num_free = tl.load(words + _NUM_FREE)
    again = tl.minimum(total, num_free)
    tl.store(words + _NUM_FREE, num_free - again)
    tl.store(words + _ROWS_EVER, tl.load(words + _ROWS_EVER) + total - again)
    tl.store(words + _NUM_ROWS, tl.load(words + _NUM_ROWS) + total)
    tl.store(words + _ADDED, tl.load(words + _ADDED) + total)


def number_rows(takes: Tensor, free: Tensor, words: Tensor, rows: Tensor) -> None:
    """Gives each key with ``takes`` a row, in key order. First uses the rows that became free last, then new rows.

    Args:
        takes: int32[U], 0 after the last key. free: int32[·], the free rows. words: int64[4], updated.
        rows: int32[U], output for keys that take a row.
    """
    ranks = torch.cumsum(takes, 0, dtype=torch.int32)
    launch(_number_rows, len(takes), block_of(1024, len(takes)), takes, ranks, free, words, rows, len(takes))
    launch(_take_rows, min(1, len(takes)), 1, ranks, words, len(takes))


@kernel
def _read_meta(
    chunks: tensor, rows: tensor, num_rows: tensor, tables: tensor, last_used: tensor, counts: tensor, stamps: tensor, CHOSEN: constexpr,
    CHUNK_BITS: constexpr, STRIDE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    place = items(BLOCK)
    mask = place < num_rows
    row = place
    if CHOSEN:
        row = load(rows + place, mask)
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    words = words_at(address)
    tl.store(tables + place, tl.load(words + TABLE, mask=mask, other=NO_ROW), mask=mask)
    tl.store(last_used + place, load(words + LAST_USED, mask), mask=mask)
    tl.store(counts + place, load(words + COUNT, mask), mask=mask)
    tl.store(stamps + place, load(longs_at(address) + STAMP // 2, mask), mask=mask)


@dataclass(frozen=True)
class Meta:
    """The meta of R rows, for eviction: ``tables``, ``last_used``, ``counts``, int32[R], and ``stamps``, int64[R]."""

    tables: Tensor
    last_used: Tensor
    counts: Tensor
    stamps: Tensor

    def taken(self, places: Tensor) -> Meta:
        """Returns the columns of some rows, int64[·]."""
        return Meta(self.tables[places], self.last_used[places], self.counts[places], self.stamps[places])


def read_meta(chunks: Tensor, rows: Tensor | int, chunk_bits: int, stride: int) -> Meta:
    """Returns the meta of some rows, int32[R], or of the first R rows."""
    chosen = isinstance(rows, Tensor)
    num = len(rows) if isinstance(rows, Tensor) else rows
    place = chunks.device
    tables, last_used, counts = (torch.empty(num, dtype=torch.int32, device=place) for _ in range(3))
    stamps = torch.empty(num, dtype=torch.int64, device=place)
    launch(
        _read_meta, num, block_of(1024, num), chunks, rows if chosen else chunks, num, tables, last_used, counts, stamps,
        CHOSEN=chosen, CHUNK_BITS=chunk_bits, STRIDE=stride,
    )  # fmt: skip
    return Meta(tables, last_used, counts, stamps)
