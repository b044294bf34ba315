"""Reads rows in GPU memory. A read for training marks rows as used and makes new rows. Evaluation changes nothing.

A read for training has several passes, so that no new key of a batch can evict a row of the same batch.

1. :func:`read_known` finds the keys that have rows, and marks the rows as used.
2. :func:`ask_admission` decides for each remaining key whether it may get a row.
3. Prefix sums give each of these keys a row number. :func:`make_rows` fills in the rows.
4. Every key gets the address of its columns: in its record, or among initial values if it has no row.

Shapes: U unique keys, T tables, S segments, W columns of a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.cpu import admission as cpu_admission
from girih.kernels.cpu import layout as at
from girih.kernels.gpu.hashing import (
    as_uint64,
    initial_values,
    key_hash,
    mix,
    scaled,
    stream,
    uniform01,
    word16,
)
from girih.kernels.gpu.index import find_rows, insert_rows
from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import (
    COUNT,
    FLOAT32,
    ID,
    LAST_USED,
    NO_ROW,
    STAMP,
    TABLE,
    VALUES,
    VERSION,
    columns_at,
    floats_at,
    items,
    load,
    longs_at,
    record,
    whole_vectors,
    words_at,
)
from girih.kernels.gpu.optimizers import begin_state
from girih.kernels.gpu.rounding import narrow, widen

_MOST = constexpr(2**31 - 1)
_NEW = constexpr(1 << 31)  # the bit of stamps that makes new rows newer than rows that the same call read
_BY_COUNT, _BY_CHANCE = constexpr(at.ADMIT_MIN_COUNT), constexpr(at.ADMIT_PROBABILITY)
_ADMISSION, _MIN_COUNT, _RULES = map(constexpr, (at.ADMISSION, at.MIN_COUNT, at.RULE_COLUMNS))
_CELLS_START, _FIRST_BLOCK, _TOTAL_BLOCKS, _BLOCK_CELLS, _BLOOM = map(
    constexpr, (at.CELLS_START, at.FIRST_BLOCK, at.TOTAL_BLOCKS, at.BLOCK_CELLS, at.BLOOM_COLUMNS)
)
_NUM_HASHES, _MAX_CELL = constexpr(cpu_admission.NUM_HASHES), constexpr(cpu_admission.MAX_CELL)


@kernel
def read_known(
    slots: tensor, num_slots: tensor, chunks: tensor, keys: tensor, tables: tensor, counts: tensor, num_keys: tensor, now: tensor,
    listed: tensor, call: tensor, rows: tensor, is_new: tensor, MARKS: constexpr, CHUNK_BITS: constexpr, STRIDE: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Finds the rows of keys. With ``MARKS``, marks the rows as used and records the keys without a row.

    Args:
        num_keys: int32[1], U.
        now: int64[T]: the step, or the second for tables that count in seconds.
        listed: int32[T], 1 if a read makes a row the newest of its table. call: the number of the call, for stamps.
        rows, is_new: int32[U], output.
    """
    i = items(BLOCK)
    mask = i < tl.load(num_keys)
    key_id = load(keys + i, mask)
    table = load(tables + i, mask)
    row = find_rows(slots, num_slots, chunks, key_id, table, mask, CHUNK_BITS, STRIDE)
    tl.store(rows + i, row, mask=mask)
    if MARKS:
        known = row >= 0
        address = record(chunks, row, known, CHUNK_BITS, STRIDE)
        words = words_at(address)
        moment = load(now + table, known).to(tl.int32)
        used = load(words + LAST_USED, known)
        tl.store(words + LAST_USED, tl.maximum(used, moment), mask=known)
        seen = load(words + COUNT, known).to(tl.int64)
        seen += load(counts + i, known).to(tl.int64)
        tl.store(words + COUNT, tl.minimum(seen, _MOST).to(tl.int32), mask=known)
        moved = known & (load(listed + table, known) != 0)
        tl.store(longs_at(address) + STAMP // 2, stamp_of(call, i), mask=moved)
        tl.store(is_new + i, (mask & (row < 0)).to(tl.int32), mask=mask)


@triton.jit
def stamp_of(call: tensor, place: tensor) -> Any:
    """Returns the stamp of a key's use. Stamps are greater for later calls, and for later keys of the same call."""
    return (tl.zeros_like(place).to(tl.int64) + call << 32) | place.to(tl.int64)


@triton.jit
def _cell(bloom: tensor, hashed: tensor, table: tensor, number: constexpr, mask: tensor) -> Any:
    """Returns the index of a key's ``number``-th Bloom cell."""
    own = bloom + table * _BLOOM
    total = tl.load(own + _TOTAL_BLOCKS, mask=mask, other=1)
    block_cells = tl.load(own + _BLOCK_CELLS, mask=mask, other=1)
    block = scaled(hashed, total) - load(own + _FIRST_BLOCK, mask)
    within = (word16(mix(hashed), tl.full(hashed.shape, number, tl.int64)) * block_cells) >> 16
    return load(own + _CELLS_START, mask) + block * block_cells + within


@kernel
def ask_admission(
    keys: tensor, tables: tensor, counts: tensor, num_keys: tensor, is_new: tensor, rules: tensor, bloom: tensor, cells: tensor,
    chances: tensor, seeds: tensor, step: tensor, admitted: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Writes 1 to ``admitted``, int32[U], for each key without a row that may get a row.

    After this decision for all keys, :func:`add_sightings` adds the occurrences of this call. So if two keys share
    Bloom cells, the occurrences of one key in this call do not count for the other key.

    Args:
        cells: int32[·], the counting Bloom filters of all tables.
        chances: float64[T], the logarithm of the probability that one occurrence is not drawn.
    """
    i = items(BLOCK)
    mask = i < tl.load(num_keys)
    new = mask & (load(is_new + i, mask) != 0)
    key_id = load(keys + i, new)
    table = load(tables + i, new)
    count = load(counts + i, new).to(tl.int64)
    kind = load(rules + table * _RULES + _ADMISSION, new)
    by_count = new & (kind == _BY_COUNT)
    hashed = key_hash(key_id, table)
    seen = tl.full(key_id.shape, _MAX_CELL, tl.int64)
    for number in tl.static_range(_NUM_HASHES):
        cell = _cell(bloom, hashed, table, number, by_count)
        seen = tl.minimum(seen, load(cells + cell, by_count).to(tl.int64))
    enough = seen + count >= load(rules + table * _RULES + _MIN_COUNT, by_count)
    seed = load(seeds + table, new).to(tl.uint64, bitcast=True)
    moment = mix(as_uint64(tl.zeros_like(key_id) + step))
    draw = uniform01(mix(mix(stream(seed, key_id)) ^ moment))
    none_drawn = tl.exp(load(chances + table, new) * count.to(tl.float64))
    lucky = draw < 1.0 - none_drawn
    allowed = tl.where(kind == _BY_COUNT, enough, tl.where(kind == _BY_CHANCE, lucky, kind == kind))
    tl.store(admitted + i, (new & allowed).to(tl.int32), mask=mask)


@kernel
def add_sightings(
    keys: tensor, tables: tensor, counts: tensor, num_keys: tensor, is_new: tensor, admitted: tensor, rules: tensor, bloom: tensor,
    cells: tensor, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Adds the occurrences of keys that were not admitted to the Bloom filters, in tables that admit by count."""
    i = items(BLOCK)
    mask = i < tl.load(num_keys)
    new = mask & (load(is_new + i, mask) != 0)
    refused = new & (load(admitted + i, mask) == 0)
    table = load(tables + i, refused)
    refused = refused & (load(rules + table * _RULES + _ADMISSION, refused) == _BY_COUNT)
    key_id = load(keys + i, refused)
    count = load(counts + i, refused)
    hashed = key_hash(key_id, table)
    for number in tl.static_range(_NUM_HASHES):
        cell = _cell(bloom, hashed, table, number, refused)
        room = refused & (load(cells + cell, refused) < _MAX_CELL)
        tl.atomic_add(cells + cell, count, mask=room, sem="relaxed")


@kernel
def make_rows(
    slots: tensor, num_slots: tensor, chunks: tensor, keys: tensor, tables: tensor, counts: tensor, num_keys: tensor, now: tensor,
    call: tensor, step: tensor, rows: tensor, CHUNK_BITS: constexpr, STRIDE: constexpr, takes: tensor,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Makes the rows in ``rows`` for keys with ``takes``. Adds the keys to the index, and writes the rows' meta.

    The caller must still write the rows' values.
    """
    i = items(BLOCK)
    mask = i < tl.load(num_keys)
    mask = mask & (load(takes + i, mask) != 0)
    key_id = load(keys + i, mask)
    table = load(tables + i, mask)
    row = load(rows + i, mask)
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    words = words_at(address)
    tl.store(longs_at(address) + ID, key_id, mask=mask)
    tl.store(words + TABLE, table, mask=mask)
    tl.store(words + LAST_USED, load(now + table, mask).to(tl.int32), mask=mask)
    tl.store(words + COUNT, load(counts + i, mask), mask=mask)
    tl.store(words + VERSION, tl.zeros_like(row) + step, mask=mask)
    tl.store(longs_at(address) + STAMP // 2, stamp_of(call, i) | _NEW, mask=mask)
    insert_rows(slots, num_slots, key_id, table, row, mask)


@kernel
def write_initial(
    chunks: tensor, keys: tensor, tables: tensor, num_keys: tensor, rows: tensor, takes: tensor, scratch: tensor,
    addresses: tensor, seeds: tensor, kinds: tensor, initializer_options: tensor, hyper: tensor, segment: tensor,
    num_segments: tensor, first_column: tensor, dim: tensor, state_start: tensor, row_bytes: tensor,
    OPTIMIZER: constexpr, STATE_WIDTH: constexpr, DTYPE: constexpr, ALIGNED: constexpr, CHUNK_BITS: constexpr,
    STRIDE: constexpr, COLUMNS: constexpr, AT_ONCE: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Writes the initial values of one segment.

    For new rows, the values and the optimizer state are written to the records. For keys without a row, the values are
    written to ``scratch``. Most keys are known and need only their address, so a program has many keys. It writes initial
    values in tiles of ``AT_ONCE`` keys.

    Args:
        takes: int32[U], 1 for keys whose row is new.
        scratch: the address of memory for U rows. The distance of rows is ``row_bytes``, a multiple of 16, so that
            rows are aligned.
        addresses: int64[U], output: the address of each key's columns.
        seeds, kinds, initializer_options: int64[T, S], int64[T, S], float64[T, S, 2].
        hyper: float64[S, 8], for the initial optimizer state.
    """
    i, num, column = items(BLOCK), tl.load(num_keys), tl.arange(0, COLUMNS)[None, :]
    dim = whole_vectors(dim, DTYPE, ALIGNED)
    _in_record, address, _new, unwritten = _places(
        i, num, chunks, rows, takes, scratch, row_bytes, CHUNK_BITS, STRIDE
    )
    if segment == 0:
        tl.store(addresses + i, address, mask=i < num)
    if tl.sum(unwritten.to(tl.int32)) > 0:
        for first in range(tl.program_id(0) * BLOCK, tl.program_id(0) * BLOCK + BLOCK, AT_ONCE):
            key = first + tl.arange(0, AT_ONCE)
            in_record, start, new, wanted = _places(
                key, num, chunks, rows, takes, scratch, row_bytes, CHUNK_BITS, STRIDE
            )
            _write_tile(
                in_record, start, new, wanted, key, keys, tables, seeds, kinds, initializer_options, hyper, segment, num_segments,
                first_column, column, dim, state_start, OPTIMIZER, STATE_WIDTH, DTYPE, ALIGNED,
            )  # fmt: skip


@triton.jit
def _places(
    i: tensor, num: tensor, chunks: tensor, rows: tensor, takes: tensor, scratch: tensor, row_bytes: tensor, CHUNK_BITS: constexpr,
    STRIDE: constexpr,
) -> Any:  # fmt: skip
    """Returns for each key its columns in the record, the columns to read, and two flags: the row is new, values are missing."""
    mask = i < num
    row = tl.load(rows + i, mask=mask, other=NO_ROW)
    new = mask & (load(takes + i, mask) != 0)
    known = mask & (row >= 0)
    in_record = record(chunks, row, known, CHUNK_BITS, STRIDE) + 4 * VALUES
    elsewhere = tl.zeros_like(in_record) + scratch + i.to(tl.int64) * row_bytes
    return in_record, tl.where(known, in_record, elsewhere), new, new | (mask & (row < 0))


@triton.jit
def _write_tile(
    in_record: tensor, start: tensor, new: tensor, wanted: tensor, i: tensor, keys: tensor, tables: tensor, seeds: tensor,
    kinds: tensor, initializer_options: tensor, hyper: tensor, segment: tensor, num_segments: tensor, first_column: tensor,
    column: tensor, dim: tensor, state_start: tensor, OPTIMIZER: constexpr, STATE_WIDTH: constexpr, DTYPE: constexpr, ALIGNED: constexpr,
) -> None:  # fmt: skip
    """Writes the initial values of keys in one tile; see :func:`write_initial`."""
    SIZE: constexpr = 4 if DTYPE == FLOAT32 else 2
    if tl.sum(wanted.to(tl.int32)) > 0:
        table = load(tables + i, wanted)
        key_id = load(keys + i, wanted)
        at_segment = table * num_segments + segment
        seed = load(seeds + at_segment, wanted).to(tl.uint64, bitcast=True)
        kind = load(kinds + at_segment, wanted)
        first = load(initializer_options + 2 * at_segment, wanted)
        second = load(initializer_options + 2 * at_segment + 1, wanted)
        values = initial_values(
            key_id[:, None], seed[:, None], kind[:, None], first[:, None], second[:, None], column
        )
        inside = wanted[:, None] & (column < dim)
        place = columns_at(start + first_column * SIZE, column, DTYPE, ALIGNED)
        if DTYPE == FLOAT32:
            tl.store(place, values, mask=inside)
        else:
            halves = narrow(values, 0, DTYPE, True)
            tl.store(place, halves, mask=inside)
            values = widen(halves, DTYPE)  # the initial optimizer state is computed from the rounded row
        if STATE_WIDTH > 0:
            state = floats_at(in_record + 4 * (state_start - VALUES))[:, None]
            begin_state(values, state, hyper + 8 * segment, dim, column, new[:, None], OPTIMIZER, STATE_WIDTH)


@kernel
def gather(
    addresses: tensor, num_keys: tensor, out: tensor, num_columns: tensor, DTYPE: constexpr, ALIGNED: constexpr,
    COLUMNS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Copies columns at ``addresses`` to ``out``, float32[U, W]."""
    num_columns = whole_vectors(num_columns, DTYPE, ALIGNED)
    i = items(BLOCK)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = i < tl.load(num_keys)
    address = load(addresses + i, mask)
    inside = mask[:, None] & (column < num_columns)
    values = load_columns(address, column, inside, DTYPE, ALIGNED)
    tl.store(out + i.to(tl.int64)[:, None] * num_columns + column, values, mask=inside)


@triton.jit
def load_columns(address: tensor, column: tensor, mask: tensor, DTYPE: constexpr, ALIGNED: constexpr) -> Any:
    """Returns columns, int32[1, C], at addresses, int64[·], as float32[·, C].

    See :func:`girih.kernels.gpu.layout.columns_at`.
    """
    place = columns_at(address, column, DTYPE, ALIGNED)
    if DTYPE == FLOAT32:
        return load(place, mask)
    else:
        return widen(load(place, mask), DTYPE)
