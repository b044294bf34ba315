"""Reading rows: for training, which marks use and makes new rows, and for evaluation, which changes nothing.

A training read goes in three passes: :func:`expire` drops what is too old, :func:`read_known` finds the
keys that have rows and marks them used, :func:`read_new` admits the others. So no new key of a batch can
push out a row of the same batch. :func:`read_new` stops where it needs what only Python can give (memory,
an LFU pass) and is called again from there.

Shapes: U unique keys, W columns of a row, T tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import admission, index, recency
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import (
    ADMISSION,
    ADMIT_ALL,
    ADMIT_MIN_COUNT,
    COUNT,
    EVICT_LFU,
    EVICT_LRU,
    EVICT_TTL,
    EVICTED,
    EVICTION,
    EXPIRED,
    FREE_ROW,
    FULL,
    HITS,
    IN_SECONDS,
    LAST_USED,
    LOOKUPS,
    MAX_ROWS,
    MIN_COUNT,
    NEW,
    NO_ROW,
    NUM_ROWS,
    OLDEST,
    REFUSED,
    ROWS_COMMITTED,
    ROWS_EVER,
    TABLE_ROWS,
    TTL,
    Layout,
    Shard,
)
from girih.kernels.cpu.rows import (
    begin_state,
    drop_row,
    prefetch_row,
    prefetch_values,
    read_initial,
    read_row,
    take_row,
    write_row,
)

DONE, NEED_ROWS, NEED_INDEX, NEED_LFU, REFUSE = range(5)
_AHEAD = 8
_MOST = 2**31 - 1


@njit_lean
def expire(shard: Shard, layout: Layout, now: NDArray[np.int64]) -> None:
    """Drops the rows of ``ttl`` tables that were last used more than their time before ``now``, int64[T]."""
    for table in range(layout.rules.shape[0]):
        if layout.rules[table, EVICTION] == EVICT_TTL:
            row = shard.tables[table, OLDEST]
            while row >= 0 and now[table] - shard.meta[row, LAST_USED] > layout.rules[table, TTL]:
                drop_row(shard, layout, row)
                shard.tables[table, EXPIRED] += 1
                row = shard.tables[table, OLDEST]


@njit_lean
def read_known(
    shard: Shard,
    layout: Layout,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    counts: NDArray[np.int32],
    now: NDArray[np.int64],
    homes: NDArray[np.int64],
    touched: NDArray[np.int64],
    rows: NDArray[np.int32],
    out: NDArray[np.float32],
    out_bits: NDArray[np.uint32],
) -> None:
    """Reads and marks used the keys that have rows; ``rows`` int32[U] is -1 for the others.

    Args:
        counts: int32[U], how often each key occurs in the batch; or of length 0 where all occur once.
        now: int64[T]: the step, or the second for tables that count in seconds.
        homes: scratch, int64[U].
        touched: int64[T], adds the rows that this call has marked used.
        out: float32[U, W], written where there is a row; ``out_bits`` is the same memory as uint32.
    """
    index.find_all(shard.slots, ids, tables, homes, rows)
    num_keys = ids.shape[0]
    for i in range(num_keys):
        if i + 2 * _AHEAD < num_keys:
            prefetch_row(shard, rows[i + 2 * _AHEAD])
        table = np.int64(tables[i])
        listed = layout.rules[table, EVICTION] == EVICT_LRU or layout.rules[table, EVICTION] == EVICT_TTL
        if listed and i + _AHEAD < num_keys and rows[i + _AHEAD] >= 0:
            recency.prefetch_neighbours(shard.meta, rows[i + _AHEAD])
        shard.tables[table, LOOKUPS] += 1
        row = np.int64(rows[i])
        if row < 0:
            continue
        count = np.int64(counts[i]) if counts.shape[0] > 0 else 1
        shard.meta[row, LAST_USED] = max(np.int64(shard.meta[row, LAST_USED]), now[table])
        shard.meta[row, COUNT] = min(np.int64(shard.meta[row, COUNT]) + count, np.int64(_MOST))
        if listed:
            recency.touch(shard.meta, shard.tables, table, row)
            touched[table] += 1
        shard.tables[table, HITS] += 1
        read_row(shard, layout, row, out[i], out_bits[i])


@njit_lean
def admits(shard: Shard, layout: Layout, key_id: Any, table: Any, count: Any, step: Any) -> Any:
    """Whether a key without a row may get one now."""
    kind = layout.rules[table, ADMISSION]
    if kind == ADMIT_ALL:
        return True
    if kind == ADMIT_MIN_COUNT:
        seen = admission.seen(shard.cells, layout.bloom, key_id, table)
        return seen + count >= layout.rules[table, MIN_COUNT]
    return admission.lucky(layout.table_seeds[table], key_id, step, count, layout.chance[table])


@njit_lean
def may_evict(shard: Shard, layout: Layout, table: Any, step: Any, touched: NDArray[np.int64]) -> Any:
    """Whether the oldest row of a full table may leave: not if this batch uses it."""
    policy = layout.rules[table, EVICTION]
    if policy != EVICT_LRU and policy != EVICT_TTL:
        return False
    if touched[table] >= shard.tables[table, TABLE_ROWS]:
        return False
    oldest = shard.tables[table, OLDEST]
    return layout.rules[table, IN_SECONDS] != 0 or shard.meta[oldest, LAST_USED] < step


@njit_lean
def make_room(
    shard: Shard,
    layout: Layout,
    key_id: Any,
    table: Any,
    count: Any,
    step: Any,
    forced: Any,
    touched: NDArray[np.int64],
    stuck: NDArray[np.uint8],
) -> Any:
    """DONE where a key without a row may take one now; else REFUSE, or what is needed first."""
    rules = layout.rules[table]
    if not (forced or admits(shard, layout, key_id, table, count, step)):
        if rules[ADMISSION] == ADMIT_MIN_COUNT:
            admission.add(shard.cells, layout.bloom, key_id, table, count)
        shard.tables[table, REFUSED] += 1
        return REFUSE
    if shard.tables[table, TABLE_ROWS] >= rules[MAX_ROWS]:
        if rules[EVICTION] == EVICT_LFU and stuck[table] == 0:
            return NEED_LFU
        if not may_evict(shard, layout, table, step, touched):
            shard.tables[table, FULL] += 1
            return REFUSE
        drop_row(shard, layout, shard.tables[table, OLDEST])
        shard.tables[table, EVICTED] += 1
    elif shard.state[FREE_ROW] < 0 and shard.state[ROWS_EVER] >= shard.state[ROWS_COMMITTED]:
        return NEED_ROWS
    if 4 * (shard.state[NUM_ROWS] + 1) > 3 * shard.slots.shape[0]:
        return NEED_INDEX
    return DONE


@njit_lean
def read_new(
    shard: Shard,
    layout: Layout,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    counts: NDArray[np.int32],
    now: NDArray[np.int64],
    step: int,
    start: int,
    forced: bool,
    touched: NDArray[np.int64],
    stuck: NDArray[np.uint8],
    hyper: NDArray[np.float64],
    rows: NDArray[np.int32],
    out: NDArray[np.float32],
    out_bits: NDArray[np.uint32],
) -> Any:
    """Admits, from key ``start`` on, the keys whose ``rows`` is -1; all read their initial value.

    Args:
        forced: admission is not asked (``assign``).
        stuck: uint8[T], 1 for LFU tables in which no row may leave in this call.
        hyper: float64[S, 8], for the optimizers' first state.

    Returns:
        (key, DONE), or (the key to go on from, what is needed).
    """
    for i in range(start, ids.shape[0]):
        if rows[i] >= 0:
            continue
        key_id, table = ids[i], np.int64(tables[i])
        count = np.int64(counts[i]) if counts.shape[0] > 0 else 1
        twin = index.find(shard.slots, key_id, table)
        if twin >= 0:  # the caller sent a key twice: it must not get two rows
            rows[i] = twin
            read_row(shard, layout, twin, out[i], out_bits[i])
            continue
        need = make_room(shard, layout, key_id, table, count, step, forced, touched, stuck)
        if need != DONE and need != REFUSE:
            return i, need
        read_initial(shard, layout, key_id, table, out[i], out_bits[i])
        if need == DONE:
            row = take_row(shard, layout, key_id, table, now[table], min(count, _MOST), step)
            rows[i] = row
            write_row(shard, layout, row, out[i], out_bits[i])
            begin_state(shard, layout, row, out[i], hyper)
            shard.tables[table, NEW] += 1
            touched[table] += 1
    return ids.shape[0], DONE


@njit_lean
def peek(
    shard: Shard,
    layout: Layout,
    ids: NDArray[np.int64],
    tables: NDArray[np.int32],
    homes: NDArray[np.int64],
    rows: NDArray[np.int32],
    out: NDArray[np.float32],
    out_bits: NDArray[np.uint32],
) -> None:
    """Reads rows, or initial values where there is none (``rows`` is -1), and changes nothing."""
    index.find_all(shard.slots, ids, tables, homes, rows)
    num_keys = ids.shape[0]
    for i in range(num_keys):
        if i + _AHEAD < num_keys:
            prefetch_values(shard, rows[i + _AHEAD])
        if rows[i] == NO_ROW:
            read_initial(shard, layout, ids[i], tables[i], out[i], out_bits[i])
        else:
            read_row(shard, layout, rows[i], out[i], out_bits[i])
