"""Decides which new keys get a row, by counting Bloom filters or by chance.

A filter consists of 8-bit saturating cells, in blocks of at most 4,096 cells. The upper bits of a key's hash choose the
block, in the same order as they choose the shard. So each shard has a contiguous range of the blocks of a table's
filter, and filters can be divided again if the number of shards changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import I64, U8
from girih.kernels.cpu.hashing import key_hash, mix, scaled, stream, uniform01, word16
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import BLOCK_CELLS, CELLS_START, FIRST_BLOCK, TOTAL_BLOCKS

NUM_HASHES = 4
MAX_BLOCK_CELLS = 4096
MAX_CELL = 255


@njit_lean
def cell_of(bloom: I64, key_id: Any, table: Any, number: Any) -> Any:
    """Returns the index in ``cells`` of one of a key's counters.

    A key has ``NUM_HASHES`` counters. ``number`` chooses one of them, from 0.
    """
    hashed = key_hash(key_id, table)
    block = scaled(hashed, bloom[table, TOTAL_BLOCKS]) - bloom[table, FIRST_BLOCK]
    within = (word16(mix(hashed), number) * bloom[table, BLOCK_CELLS]) >> 16
    return bloom[table, CELLS_START] + block * bloom[table, BLOCK_CELLS] + within


@njit_lean
def seen(cells: U8, bloom: I64, key_id: Any, table: Any) -> Any:
    """Returns an upper bound of the number of times a key was added. Counts stop at 255."""
    least = np.int64(MAX_CELL)
    for number in range(NUM_HASHES):
        least = min(least, np.int64(cells[cell_of(bloom, key_id, table, number)]))
    return least


@njit_lean
def add(cells: U8, bloom: I64, key_id: Any, table: Any, count: Any) -> None:
    """Counts ``count`` occurrences of a key."""
    for number in range(NUM_HASHES):
        cell = cell_of(bloom, key_id, table, number)
        cells[cell] = min(np.int64(cells[cell]) + np.int64(count), np.int64(MAX_CELL))


@njit_lean
def lucky(seed: Any, key_id: Any, step: Any, count: Any, probability: Any) -> Any:
    """Returns whether one of ``count`` occurrences in a step is drawn. Depends only on the arguments."""
    draw = uniform01(mix(mix(stream(seed, key_id)) ^ mix(step)))
    return draw < 1.0 - (1.0 - probability) ** count
