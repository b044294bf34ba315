"""RocksDB as a peer of the SSD tier: rows by key, from a table that was sorted and compacted before.

Shapes: n keys, R bytes of a record.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 8


class Way(NamedTuple):
    """How rows are asked for: batches of keys in threads, with or without RocksDB's own asynchronous reads."""

    num_threads: int
    asynchronous: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.num_threads} × multi_get{', async_io' if self.asynchronous else ''}"


class RocksSide:
    """A database below ``directory``, opened for reading once it is filled.

    Args:
        rocksdict: the module.
        records: parts of uint8[·, R], whose keys are their numbers.
        cache_bytes: of blocks; index and bloom filter (10 bits per key) are in memory beside it.
    """

    def __init__(
        self, rocksdict: ModuleType, directory: Path, records: Iterator[NDArray[np.uint8]], cache_bytes: int
    ) -> None:
        self._rocksdict, path = rocksdict, directory / "rocksdb"
        shutil.rmtree(path, ignore_errors=True)
        table = rocksdict.BlockBasedOptions()
        table.set_block_size(4096)
        table.set_bloom_filter(10, False)
        table.set_block_cache(rocksdict.Cache(cache_bytes))
        table.set_cache_index_and_filter_blocks(False)
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_block_based_table_factory(table)
        self._fill(options, path, directory / "rocksdb.sst", records)
        self._database = rocksdict.Rdict(str(path), options, access_type=rocksdict.AccessType.read_only())
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def read(self, way: Way, keys: list[bytes]) -> list[bytes]:
        """The values of some keys, in any order."""
        read_options = self._rocksdict.ReadOptions()
        read_options.set_async_io(way.asynchronous)
        if way.num_threads == 1:
            return list(self._database.get(keys, read_opt=read_options))
        pool = self._pools.setdefault(way.num_threads, ThreadPoolExecutor(way.num_threads))
        parts = [keys[first :: way.num_threads] for first in range(way.num_threads)]
        found = pool.map(lambda part: self._database.get(part, read_opt=read_options), parts)
        return [value for part in found for value in part]

    def _fill(
        self, options: Any, path: Path, sorted_file: Path, records: Iterator[NDArray[np.uint8]]
    ) -> None:
        writer, first = self._rocksdict.SstFileWriter(options), 0
        writer.open(str(sorted_file))
        for part in records:
            size, values = part.shape[1], part.tobytes()
            for number, key in enumerate(keys_of(np.arange(first, first + len(part)))):
                writer[key] = values[number * size : (number + 1) * size]
            first += len(part)
        writer.finish()
        with self._rocksdict.Rdict(str(path), options) as database:
            how = self._rocksdict.IngestExternalFileOptions()
            how.set_move_files(True)
            database.ingest_external_file([str(sorted_file)], how)


def keys_of(numbers: NDArray[np.int64]) -> list[bytes]:
    """Keys of records, which sort as their numbers do."""
    raw = numbers.astype(">u8").tobytes()
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]
