"""The shard that owns a key: a pure function of the key and the number of shards.

U keys.
"""

from __future__ import annotations

import numpy as np

from girih.errors import ConfigError
from girih.kernels.cpu.hashing import shards_of_keys
from girih.store.arrays import Ints, Longs


def shard_of(ids: Longs, tables: Ints, num_shards: int) -> Ints:
    """The owning shard of each key, int32[U], spread evenly.

    Args:
        ids: int64[U].
        tables: int32[U], table numbers within the group.
        num_shards: at least 1, below 2³¹.

    Raises:
        ConfigError: arrays of other types or of unequal lengths, or no shards.
    """
    if ids.dtype != np.int64 or tables.dtype != np.int32 or ids.ndim != 1 or ids.shape != tables.shape:
        raise ConfigError(
            f"shard_of: received ids {ids.dtype}{list(ids.shape)}, tables {tables.dtype}{list(tables.shape)};"
            " expected int64[U] and int32[U]"
        )
    if not 1 <= num_shards < 1 << 31:
        raise ConfigError(f"shard_of: num_shards = {num_shards}: expected 1 to 2³¹ - 1")
    out = np.zeros(len(ids), np.int32)
    if num_shards > 1:
        shards_of_keys(np.ascontiguousarray(ids), np.ascontiguousarray(tables), num_shards, out)
    return out
