"""Where rows live: ``[store]`` of a config."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from girih.errors import ConfigError, StorageFullError
from girih.files import named
from girih.store import File, GroupSpec, Heap, Store
from girih.tables import positive_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Shards, and the memory that holds them.

    Attributes:
        shards: parts of every table, by key, one thread each. Results do not depend on their number, except
            where a table has ``max_rows``: each shard holds its part of them, rounded up, and makes room in it.
        arena: "heap" is private memory; "file" maps files below ``directory``, so that tables may outgrow memory.
        directory: for arena "file": the disk whose room they take; they have no names there and end with
            the process, for it is checkpoints that keep rows.
        reserve_rows: bounds the rows of a shard's group; None reserves as many as memory (or disk) could hold.
    """

    shards: int = 1
    arena: Literal["heap", "file"] = "heap"
    directory: str | None = None
    reserve_rows: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, int) or not 1 <= self.shards <= 256:
            raise ConfigError(f"store: shards = {self.shards!r}: expected an integer from 1 to 256")
        positive_count("store", "reserve_rows", self.reserve_rows)
        if self.arena not in ("heap", "file"):
            raise ConfigError(f"store: arena = {self.arena!r}: expected 'heap' or 'file'")
        if (self.arena == "file") != (self.directory is not None):
            raise ConfigError("store: arena = 'file' and directory belong together; give both or neither")

    def open_store(self, spec: GroupSpec, shard: int) -> Store:
        """One shard of a group.

        Raises:
            StorageFullError: no memory or disk to begin with.
        """
        arena = self._arena(spec, shard)
        store = Store(spec, shard=shard, num_shards=self.shards, arena=arena)
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
