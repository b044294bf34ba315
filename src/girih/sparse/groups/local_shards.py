"""The shards that one process holds: opened, counted, saved, loaded.

Every process of a run holds as many, neighbours among all; a checkpoint has one file a shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from girih.errors import CheckpointError
from girih.sparse.groups.pack import Group
from girih.sparse.options import StoreOptions
from girih.store import Snapshot, Store, header_checksum, read_snapshot, write_snapshot


class ShardsSave:
    """Shards as they were at one moment, one file each below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.snapshots: list[tuple[Path, Snapshot]] = []

    def write(self) -> dict[str, Any]:
        """Writes every shard's file; each shard is free again as soon as its own is written."""
        files = {}
        for name, snapshot in self.snapshots:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with snapshot:
                facts = write_snapshot(snapshot, path)
            files[name.as_posix()] = {**facts, "header_crc32": header_checksum(path)}
        return files

    def close(self) -> None:
        """Ends what was not written."""
        for _, snapshot in self.snapshots:
            snapshot.close()


class LocalShards:
    """One process's part of all tables.

    Args:
        place, num_places: which process of how many that hold shards.
        segment: begins the names of shared memory; None where shards are private to the process.
        elsewhere: tables that other processes hold whole; None where every process has a part of each table.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        options: StoreOptions,
        *,
        place: int = 0,
        num_places: int = 1,
        segment: str | None = None,
        elsewhere: Collection[str] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.shards_each = options.num_shards(group.spec for group in groups)
        self._elsewhere = elsewhere or ()
        self._first_file = place * self.shards_each
        if elsewhere is not None:
            place, num_places = 0, 1
        self.pool = ThreadPoolExecutor(self.shards_each, "girih-shard") if self.shards_each > 1 else None
        self.stores: list[list[Store]] = []
        try:
            for number, group in enumerate(groups):
                self.stores.append(
                    options.open_stores(
                        group.spec,
                        num_places * self.shards_each,
                        first=place * self.shards_each,
                        here=self.shards_each,
                        segment=None if segment is None else f"{segment}-{number}",
                    )
                )
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, int]:
        """Sums over all shards here, see ``Store.counters``, and ``rows``."""
        total: Counter[str] = Counter()
        for _, store in self.files():
            total.update(store.counters())
            total["rows"] += store.num_rows
        return dict(total)

    def rows(self) -> dict[str, int]:
        """Rows here of each table."""
        rows: Counter[str] = Counter()
        for group, stores in zip(self.groups, self.stores, strict=True):
            for store in stores:
                for number, table in enumerate(group.spec.tables):
                    rows[table.name] += store.num_rows_of(number)
        return dict(rows)

    def begin_save(self, directory: Path) -> ShardsSave:
        """Takes a live snapshot of every shard, to be written below a directory."""
        save = ShardsSave(directory)
        try:
            for name, store in self.files():
                save.snapshots.append((name, store.snapshot(directory)))
        except BaseException:
            save.close()
            raise
        return save

    def load(self, directory: Path, files: Mapping[str, Any]) -> None:
        """Replaces all rows by those of any number of shards that belong here."""
        for name, facts in files.items():  # a header holds the checksums of what follows it
            if header_checksum(directory / name) != facts["header_crc32"]:
                raise CheckpointError(
                    f"{directory / name}: damaged, or of another checkpoint (its header differs)"
                )
        snapshots = [read_snapshot(directory / name) for name in sorted(files)]
        for group, stores in zip(self.groups, self.stores, strict=True):
            tables = {table.name for table in group.spec.tables}
            mine = [s for s in snapshots if tables & {table["name"] for table in s.description["tables"]}]
            for store in stores:
                store.restore(mine, elsewhere=self._elsewhere)

    def close(self) -> None:
        """Gives the memory back."""
        if self.pool is not None:
            self.pool.shutdown()
        for _, store in self.files():
            store.close()

    def files(self) -> Iterator[tuple[Path, Store]]:
        """Every shard here, and the place of its file in a checkpoint."""
        for stores in self.stores:
            for number, store in enumerate(stores, self._first_file):
                yield Path("tables", store.spec.name, f"shard-{number:04d}.safetensors"), store
