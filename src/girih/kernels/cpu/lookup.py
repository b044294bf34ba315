"""Reads rows. A read for training marks rows as used and makes new rows. A read for evaluation changes nothing.

A read for training has three passes. :func:`expire` drops rows that are too old. :func:`read_known` finds the keys that
have rows and marks the rows as used. :func:`read_new` admits the remaining keys. In this order, no new key of a batch
can evict a row of the same batch. :func:`read_new` returns early if Python code must first claim memory or choose rows
to evict (LFU). The caller then calls it again with the key at which to continue.

A read copies rows, or returns their ``addresses``. If rows are float32 and read in place, the addresses are in the
shard. Otherwise they are in ``out``. Addresses are valid until the next read or update.

Shapes: U unique keys, W columns of a row, T tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import admission, index, recency
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.arrays import F32, I32, I64, U8, F32x2, F64x2
from girih.kernels.cpu.initial import read_initial
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.layout import Layout, Shard
from girih.kernels.cpu.rows import (
    ROWS_AHEAD,
    begin_state,
    drop_row,
    prefetch_row,
    read_row,
    take_row,
    write_row,
)
from girih.kernels.cpu.saving import keep_cells, keep_row
from girih.kernels.cpu.system import row_address

DONE, NEED_ROWS, NEED_INDEX, NEED_LFU, REFUSE = range(5)
_AHEAD = 24
_SLOTS_AHEAD = 2 * ROWS_AHEAD
_NEIGHBOURS_AHEAD = 8
_MOST = 2**31 - 1


@kernel()
def expire(shard: Shard, layout: Layout, now: I64, most: int) -> Any:
    """Drops the rows of ``ttl`` tables that were last used too long before ``now``, int64[T].

    Drops at most ``most`` rows, and returns their number.
    """
    dropped = 0
    for table in range(layout.rules.shape[0]):
        if layout.rules[table, at.EVICTION] == at.EVICT_TTL:
            row = shard.tables[table, at.OLDEST]
            while row >= 0 and now[table] - shard.meta[row, at.LAST_USED] > layout.rules[table, at.TTL]:
                if dropped == most:
                    return dropped
                drop_row(shard, layout, row)
                dropped += 1
                shard.tables[table, at.EXPIRED] += 1
                row = shard.tables[table, at.OLDEST]
    return dropped


@njit_lean
def is_listed(layout: Layout, table: Any) -> Any:
    """Returns whether a read moves the rows of a table to the newest end of its list."""
    policy = layout.rules[table, at.EVICTION]
    return policy == at.EVICT_LRU or policy == at.EVICT_TTL


@njit_lean
def run_end(tables: I32, start: Any) -> Any:
    """Returns the end of the run of keys of one table that begins at ``start``."""
    end = start + 1
    while end < tables.shape[0] and tables[end] == tables[start]:
        end += 1
    return end


@njit_lean
def proven_row(shard: Shard, guessed: Any, tag: Any, key_id: Any, table: Any) -> Any:
    """Returns the row of a key, or ``NO_ROW``, given the first row of its tag."""
    if guessed < 0 or index.holds_key(shard, guessed, key_id, table):
        return guessed
    return index.find_tagged(shard, tag, key_id, table)


@njit_lean
def guess_row(shard: Shard, tags: I32, rows: I32, i: Any, num_words: Any) -> None:
    """Writes the first row of a key's tag to ``rows``, and prefetches the row."""
    rows[i] = index.guess(shard, np.int64(tags[i]))
    prefetch_row(shard, rows[i], num_words)


@njit_lean
def begin_guesses(shard: Shard, ids: I64, tables: I32, tags: I32, rows: I32, num_words: Any) -> None:
    """Computes all tags, and guesses the rows of the first keys; see :func:`guess_ahead`."""
    index.tag_all(ids, tables, tags)
    for i in range(min(_SLOTS_AHEAD, ids.shape[0])):
        index.prefetch_home(shard, np.int64(tags[i]))
    for i in range(min(ROWS_AHEAD, ids.shape[0])):
        guess_row(shard, tags, rows, i, num_words)


@njit_lean
def guess_ahead(shard: Shard, tags: I32, rows: I32, i: Any, num_words: Any) -> None:
    """Works ahead of key ``i``: prefetches the slot of one key, and guesses the row of a nearer key.

    So the misses of the index and of the rows overlap, which takes two thirds of the time of one pass for each.
    """
    if i + _SLOTS_AHEAD < tags.shape[0]:
        index.prefetch_home(shard, np.int64(tags[i + _SLOTS_AHEAD]))
    if i + ROWS_AHEAD < tags.shape[0]:
        guess_row(shard, tags, rows, i + ROWS_AHEAD, num_words)


@njit_lean
def find_row(shard: Shard, layout: Layout, row: Any, out: F32, i: Any, in_place: Any) -> Any:
    """Returns the address of a row's columns: in the shard, or in ``out[i]``, float32[W], to which they are copied."""
    if in_place and layout.dtype == at.FLOAT32:
        return row_address(shard.values, row) + 4 * at.VALUES
    read_row(shard, layout, row, out, i)
    return row_address(out, i)


@kernel()
def read_known(
    shard: Shard,
    layout: Layout,
    ids: I64,
    tables: I32,
    counts: I32,
    now: I64,
    tags: I32,
    touched: I64,
    in_place: bool,
    rows: I32,
    out: F32x2,
    addresses: I64,
) -> None:
    """Reads the rows of keys and marks them as used. Writes -1 to ``rows``, int32[U], for keys without a row.

    Args:
        counts: int32[U], the number of times that each key occurs in the batch, or of length 0 if all occur once.
        now: int64[T]: the step, or the second for tables that count in seconds.
        tags: scratch, int32[U].
        touched: int64[T], increased by the number of rows that this call marks as used.
        in_place: True does not copy float32 rows.
        out: float32[U, W], output for rows that are not read in place.
        addresses: int64[U], output for keys that have rows.
    """
    num_keys = ids.shape[0]
    num_words = at.VALUES + (1 if in_place else out.shape[1])
    tags = tags[:num_keys]
    begin_guesses(shard, ids, tables, tags, rows, num_words)
    start = 0
    while start < num_keys:
        end, table = run_end(tables, start), np.int64(tables[start])
        listed, moment, hits = is_listed(layout, table), now[table], 0
        for i in range(start, end):
            guess_ahead(shard, tags, rows, i, num_words)
            if listed and i + _NEIGHBOURS_AHEAD < end and rows[i + _NEIGHBOURS_AHEAD] >= 0:
                recency.prefetch_neighbours(shard.meta, rows[i + _NEIGHBOURS_AHEAD])
            row = np.int64(proven_row(shard, np.int64(rows[i]), np.int64(tags[i]), ids[i], table))
            rows[i] = row
            if row < 0:
                continue
            keep_row(shard, row)
            count = np.int64(counts[i]) if counts.shape[0] > 0 else 1
            shard.meta[row, at.LAST_USED] = max(np.int64(shard.meta[row, at.LAST_USED]), moment)
            shard.meta[row, at.COUNT] = min(np.int64(shard.meta[row, at.COUNT]) + count, np.int64(_MOST))
            if listed:
                recency.touch(shard, table, row)
            hits += 1
            addresses[i] = find_row(shard, layout, row, out, i, in_place)
        shard.tables[table, at.LOOKUPS] += end - start
        shard.tables[table, at.HITS] += hits
        if listed:
            touched[table] += hits
        start = end


@njit_lean
def admits(shard: Shard, layout: Layout, key_id: Any, table: Any, count: Any, step: Any) -> Any:
    """Returns whether a key without a row may get a row now."""
    kind = layout.rules[table, at.ADMISSION]
    if kind == at.ADMIT_ALL:
        return True
    if kind == at.ADMIT_MIN_COUNT:
        seen = admission.seen(shard.cells, layout.bloom, key_id, table)
        return seen + count >= layout.rules[table, at.MIN_COUNT]
    return admission.lucky(layout.table_seeds[table], key_id, step, count, layout.chance[table])


@njit_lean
def may_evict(shard: Shard, layout: Layout, table: Any, step: Any, touched: I64) -> Any:
    """Returns whether the oldest row of a full table may leave. A row that this batch uses may not leave."""
    policy = layout.rules[table, at.EVICTION]
    if policy != at.EVICT_LRU and policy != at.EVICT_TTL:
        return False
    if touched[table] >= shard.tables[table, at.TABLE_ROWS]:
        return False
    oldest = shard.tables[table, at.OLDEST]
    return layout.rules[table, at.IN_SECONDS] != 0 or shard.meta[oldest, at.LAST_USED] < step


@njit_lean
def make_room(
    shard: Shard,
    layout: Layout,
    key_id: Any,
    table: Any,
    count: Any,
    step: Any,
    forced: Any,
    touched: I64,
    stuck: U8,
) -> Any:
    """Returns DONE if a key without a row may get a row now, REFUSE if not, or the need that must be met first."""
    rules = layout.rules[table]
    if not (forced or admits(shard, layout, key_id, table, count, step)):
        if rules[at.ADMISSION] == at.ADMIT_MIN_COUNT:
            keep_cells(shard, layout, key_id, table)
            admission.add(shard.cells, layout.bloom, key_id, table, count)
        shard.tables[table, at.REFUSED] += 1
        return REFUSE
    if shard.tables[table, at.TABLE_ROWS] >= rules[at.MAX_ROWS]:
        if rules[at.EVICTION] == at.EVICT_LFU and stuck[table] == 0:
            return NEED_LFU
        if not may_evict(shard, layout, table, step, touched):
            shard.tables[table, at.FULL] += 1
            return REFUSE
        drop_row(shard, layout, shard.tables[table, at.OLDEST])
        shard.tables[table, at.EVICTED] += 1
    elif shard.state[at.FREE_ROW] < 0 and shard.state[at.ROWS_EVER] >= shard.state[at.ROWS_COMMITTED]:
        return NEED_ROWS
    return NEED_INDEX if index.is_full(shard) else DONE


@kernel()
def read_new(
    shard: Shard,
    layout: Layout,
    ids: I64,
    tables: I32,
    counts: I32,
    now: I64,
    step: int,
    start: int,
    forced: bool,
    touched: I64,
    stuck: U8,
    hyper: F64x2,
    in_place: bool,
    rows: I32,
    out: F32x2,
    addresses: I64,
) -> Any:
    """Makes rows for the admitted keys among those whose ``rows`` is -1, from key ``start`` on.

    All of these keys read their initial values.

    Args:
        forced: True skips admission (``assign``).
        stuck: uint8[T], 1 for LFU tables in which no row may leave in this call.
        hyper: float64[S, 8], for the initial optimizer state.

    Returns:
        (the number of keys, DONE), or (the key at which to continue, the need that the caller must meet first).
    """
    num_keys = ids.shape[0]
    for i in range(start, num_keys):
        if i + _AHEAD < num_keys and rows[i + _AHEAD] < 0:
            index.prefetch_home(shard, index.tag_of(ids[i + _AHEAD], np.int64(tables[i + _AHEAD])))
        if rows[i] >= 0:
            continue
        key_id, table = ids[i], np.int64(tables[i])
        count = np.int64(counts[i]) if counts.shape[0] > 0 else 1
        twin = index.find(shard, key_id, table)
        if twin >= 0:  # a key that occurs twice in the call must not get two rows
            rows[i] = twin
            addresses[i] = find_row(shard, layout, twin, out, i, in_place)
            continue
        need = make_room(shard, layout, key_id, table, count, step, forced, touched, stuck)
        if need != DONE and need != REFUSE:
            return i, need
        read_initial(layout, key_id, table, out[i], shard.scratch_halves)
        addresses[i] = row_address(out, i)
        if need == DONE:
            row = take_row(shard, layout, key_id, table, now[table], min(count, _MOST), step)
            rows[i] = row
            write_row(shard, layout, row, out, i)
            begin_state(shard, layout, row, out[i], hyper)
            shard.tables[table, at.NEW] += 1
            touched[table] += 1
    return ids.shape[0], DONE


@kernel()
def peek(
    shard: Shard,
    layout: Layout,
    ids: I64,
    tables: I32,
    tags: I32,
    in_place: bool,
    rows: I32,
    out: F32x2,
    addresses: I64,
) -> None:
    """Reads rows, or initial values if there is no row (``rows`` is -1). Changes nothing."""
    num_keys, num_words = ids.shape[0], at.VALUES + (1 if in_place else out.shape[1])
    tags = tags[:num_keys]
    begin_guesses(shard, ids, tables, tags, rows, num_words)
    for i in range(num_keys):
        guess_ahead(shard, tags, rows, i, num_words)
        table = np.int64(tables[i])
        rows[i] = proven_row(shard, np.int64(rows[i]), np.int64(tags[i]), ids[i], table)
        if rows[i] < 0:
            read_initial(layout, ids[i], table, out[i], shard.scratch_halves)
            addresses[i] = row_address(out, i)
        else:
            addresses[i] = find_row(shard, layout, np.int64(rows[i]), out, i, in_place)
