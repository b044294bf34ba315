"""Notes of what changed since a moment, for whoever publishes a shard: a bit for each row, and the keys whose rows left.

Both arrays have length 0 where nobody asked for notes: then a row that changes costs one comparison.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.jit import njit_lean
from girih.kernels.cpu.layout import Shard


@njit_lean
def note_changed(shard: Shard, row: Any) -> None:
    """To be called where a row is made, moved or set."""
    byte = np.int64(row) >> 3
    if byte < shard.changed.shape[0]:
        shard.changed[byte] |= np.uint8(1 << (np.int64(row) & 7))


@njit_lean
def note_left(shard: Shard, row: Any) -> None:
    """To be called before a row is taken from its key; where there is no room for the key, that is noted instead."""
    if shard.left.shape[0] == 0:
        return
    place = shard.left[0, at.NUM_LEFT] + 1
    if place >= shard.left.shape[0]:
        shard.left[0, at.LEFT_LOST] = 1
        return
    shard.left[place, 0] = shard.keys[row, 0]
    shard.left[place, 1] = shard.meta[row, at.TABLE]
    shard.left[0, at.NUM_LEFT] = place
