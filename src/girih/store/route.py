"""The shard that owns a key: a pure function of the key and the number of shards.

U keys.
"""

from __future__ import annotations

import numpy as np

from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.hashing import shards_of_keys
from girih.store.arrays import Ints, Longs


def shard_of(ids: Longs, tables: Ints, num_shards: int) -> Ints:
    """The owning shard of each key, int32[U], spread evenly.

    Args:
        ids: int64[U].
        tables: int32[U], table numbers within the group.
        num_shards: at least 1, below 2³¹.
    """
    out = np.zeros(len(ids), np.int32)
    if num_shards > 1:
        shards_of_keys(
            sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), num_shards, out
        )
    return out
