"""Where rows live: ``[store]`` of a config."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from girih.errors import ConfigError, StorageFullError
from girih.files import named
from girih.store import File, GroupSpec, Heap, Store
from girih.tables import positive_count

MOST_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Shards, and the memory that holds them.

    Attributes:
        shards: parts of every table, by key, one thread each. Results do not depend on their number, except
            where a table has ``max_rows``: each shard holds its part of them, rounded up, and makes room in it.
            None takes as many as torch has threads, at most 8; and one where rows are bounded, by ``max_rows``
            or ``reserve_rows``.
        arena: "heap" is private memory; "file" maps files below ``directory``, so that tables may outgrow memory.
        directory: for arena "file": the disk whose room they take; they have no names there and end with
            the process, for it is checkpoints that keep rows.
        reserve_rows: bounds the rows of a shard's group; None reserves as many as memory (or disk) could hold.
    """

    shards: int | None = None
    arena: Literal["heap", "file"] = "heap"
    directory: str | None = None
    reserve_rows: int | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.shards, int) and not isinstance(self.shards, bool)
        if self.shards is not None and not (whole and 1 <= self.shards <= 256):
            raise ConfigError(f"store: shards = {self.shards!r}: expected an integer from 1 to 256")
        positive_count("store", "reserve_rows", self.reserve_rows)
        if self.arena not in ("heap", "file"):
            raise ConfigError(f"store: arena = {self.arena!r}: expected 'heap' or 'file'")
        if (self.arena == "file") != (self.directory is not None):
            raise ConfigError("store: arena = 'file' and directory belong together; give both or neither")

    def num_shards(self, specs: Iterable[GroupSpec]) -> int:
        """How many shards all these groups have."""
        if self.shards is not None:
            return self.shards
        rules = [table.eviction for spec in specs for table in spec.tables]
        if self.reserve_rows is not None or any(getattr(rule, "max_rows", None) for rule in rules):
            return 1
        return min(torch.get_num_threads(), MOST_THREADS)

    def open_stores(self, spec: GroupSpec, num_shards: int) -> list[Store]:
        """All shards of a group.

        Raises:
            StorageFullError: no memory or disk to begin with.
        """
        stores: list[Store] = []
        try:
            for shard in range(num_shards):
                stores.append(self._open_store(spec, shard, num_shards))
        except BaseException:
            for store in stores:
                store.close()
            raise
        return stores

    def _open_store(self, spec: GroupSpec, shard: int, num_shards: int) -> Store:
        arena = self._arena(spec, shard)
        store = Store(spec, shard=shard, num_shards=num_shards, arena=arena)
        if isinstance(arena, File):  # the mapping keeps it; a name would outlive a process that is killed
            os.unlink(arena.path)
        return store

    def _arena(self, spec: GroupSpec, shard: int) -> Heap | File:
        if self.directory is None:
            return Heap(reserve_rows=self.reserve_rows)
        directory = Path(self.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if isinstance(named(error, directory), StorageFullError):
                raise named(error, directory) from None
            raise ConfigError(
                f"store: directory = {self.directory!r}: cannot be used ({error.strerror}); name another"
            ) from None
        name = f"{spec.name}-{shard:04d}-{os.getpid()}.arena"
        return File(path=str(directory / name), reserve_rows=self.reserve_rows)
