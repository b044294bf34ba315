"""Opens, counts, saves and loads the shards that one process holds.

All processes of a run hold the same number of shards, with consecutive numbers. A checkpoint has one file per shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from girih.checkpoint.manifest import PartFacts, Parts, part_name, parts_for
from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.publishing.shards import SegmentRows, SegmentShards
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import threads_for
from girih.sparse.options import StoreOptions
from girih.store import Keys, LiveSnapshot, Push, SnapshotFile, Store, write_rows
from girih.store.clock import refuse_expired
from girih.store.spec import shard_of
from girih.telemetry.stats import LiveNumber


class ShardsSave:
    """Snapshots of shards at one moment. Each becomes one part of a checkpoint.

    Args:
        files: the name of each part, and its shard. The constructor takes a snapshot of each shard. Training may change
            the rows while the snapshot is written.
    """

    def __init__(self, writer: Storage, files: Iterable[tuple[str, Store]]) -> None:
        self._writer = writer
        self._parts: list[tuple[str, PartFacts, LiveSnapshot]] = []
        try:
            for name, store in files:
                covers: PartFacts = {
                    "group": store.spec.name,
                    "tables": _rows_of(store),
                    "shard": store.shard,
                    "num_shards": store.num_shards,
                }
                self._parts.append((name, covers, store.snapshot(writer.scratch)))
        except BaseException:
            self.close()
            raise

    def write(self) -> Parts:
        """Writes the part of every shard. Releases the snapshot of each shard when its part is written."""
        parts: dict[str, PartFacts] = {}
        for name, covers, snapshot in self._parts:
            with snapshot, self._writer.create(name) as sink:
                facts = write_rows(snapshot, sink, f"{self._writer}/{name}")
            parts[name] = {"bytes": facts["bytes"], "crc32": facts["crc32"], **covers}
        return parts

    def close(self) -> None:
        """Releases the snapshots that were not written."""
        for _, _, snapshot in self._parts:
            snapshot.close()


class LocalShards:
    """The shards of one process: its part of all tables.

    Args:
        place, num_places: the number of this process, and the number of processes that hold shards.
        segment: the prefix of the names of shared memory. None if shards are private to the process.
        elsewhere: the tables that other processes hold whole. None if every process has a part of each table.
        gpu: see :class:`girih.sparse.spec.SparseSpec`.
        attach: attaches to the shared memory that an earlier process left. Repairs the memory if the process died
            during a change.
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
        gpu: int | None = None,
        attach: bool = False,
    ) -> None:
        self.groups = tuple(groups)
        self.shards_each = options.num_shards(group.spec for group in groups)
        self._elsewhere = elsewhere or ()
        self._on_gpu = options.on_gpu
        self._first_file = place * self.shards_each
        if elsewhere is not None:
            place, num_places = 0, 1
        self.num_threads = threads_for(self.shards_each)
        self.pool = ThreadPoolExecutor(self.num_threads, "girih-shard") if self.num_threads > 1 else None
        self.stores: list[list[Store]] = [[] for _ in groups]
        num_shards = num_places * self.shards_each
        num_tables = sum(len(group.spec.tables) for group in groups) + len(self._elsewhere)
        try:
            for number, (group, stores) in enumerate(zip(groups, self.stores, strict=True)):
                own_segment = None if segment is None else f"{segment}-{number}"
                share = len(group.spec.tables) / num_tables
                for shard in range(place * self.shards_each, (place + 1) * self.shards_each):
                    stores.append(
                        options.open_store(
                            group.spec, shard, num_shards, own_segment, share, gpu, attach=attach
                        )
                    )
        except BaseException:
            self.close()
            raise

    def counters(self) -> dict[str, int]:
        """Returns sums over all shards: ``Store.counters``, ``tier_counters``, and ``rows``, ``peeks``, ``absent``."""
        total: Counter[str] = Counter()
        for _, store in self.files():
            total.update(store.counters())
            total.update(store.tier_counters())
            total.update(store.peek_counters())
            total.update(rows=store.num_rows)
        return dict(total)

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each table in this process."""
        rows: Counter[str] = Counter()
        for _, store in self.files():
            rows.update(_rows_of(store))
        return dict(rows)

    def live(self) -> Mapping[str, LiveNumber]:
        """Returns counters and rows for :meth:`girih.telemetry.stats.Stats.watch`.

        Empty if rows are on a GPU, because reading them takes GPU time.
        """
        return {} if self._on_gpu else {"store": self.counters(), "rows": self.rows()}

    def repair_summary(self) -> str:
        """Returns a line about the repairs of attached memory, or "" if no verb was interrupted."""
        repaired = [(store.spec, store.repaired) for _, store in self.files() if store.repaired is not None]
        if not repaired:
            return ""
        torn = [
            f"id {state.torn[0]} of {spec.tables[state.torn[1]].name!r}"
            for spec, state in repaired
            if state.torn is not None
        ]
        rows = (
            "no row is torn" if not torn else f"torn rows (partly from before an update): {', '.join(torn)}"
        )
        return f"{len(repaired)} of {len(list(self.files()))} shards were repaired, {rows}"

    def have_applied(self, push: Push) -> bool:
        """Returns whether all shards have applied a push completely."""
        return all(store.has_applied(push) for _, store in self.files())

    def forget_pushes(self) -> None:
        """Forgets all pushes, because their senders restart their numbering."""
        for _, store in self.files():
            store.forget_pushes()

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a snapshot of every shard. The returned object writes it, while training continues."""
        return ShardsSave(writer, self.files())

    def knows_changes(self, since: int) -> bool:
        """Returns whether all shards know their changes since a version."""
        return all(store.knows_changes(since) for _, store in self.files())

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> SegmentRows:
        """Starts a segment of a log. See :class:`girih.publishing.shards.SegmentShards`."""
        return SegmentShards(writer, self.files(), number, since, self.pool)

    def load(self, reader: PartReader) -> None:
        """Replaces all rows with the checkpoint's rows that belong to this process. The number of shards may differ.

        Raises:
            CheckpointError: a part is damaged, its rows do not fit, or all rows of a table would expire. No row was
                replaced.
        """
        opened_files: list[tuple[Store, list[SnapshotFile], set[str]]] = []
        all_tables = {table.name for group in self.groups for table in group.spec.tables}
        for group, stores in zip(self.groups, self.stores, strict=True):
            tables = [table.name for table in group.spec.tables]
            # the checkpoint may have packed tables into other groups
            elsewhere = {*self._elsewhere, *(all_tables - set(tables))}
            opened: dict[str, SnapshotFile] = {}
            for store in stores:
                names = parts_for(reader.parts, tables, store.shard, store.num_shards)
                for name in names:
                    opened[name] = opened.get(name) or reader.open(name)
                opened_files.append((store, [opened[name] for name in names], elsewhere))
                if reader.begins:
                    for file in opened_files[-1][1]:
                        file.verify()
                    continue
                store.check(opened_files[-1][1], optimizer_state=reader.optimizer_state, elsewhere=elsewhere)
        refuse_expired(reader.newest, (table for group in self.groups for table in group.spec.tables))
        for store, files, elsewhere in opened_files:
            if reader.begins:
                store.inherit(files)
                continue
            store.restore(files, optimizer_state=reader.optimizer_state, elsewhere=elsewhere)

    def peek(self, table: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Reads columns of a table's rows without changing them: float32[n, W], initial values for ids without a row.

        Args:
            ids: int64[n], which may repeat.

        Raises:
            KeyError: this process does not hold the table.
        """
        number = next((n for n, group in enumerate(self.groups) if table in _names(group)), None)
        if number is None:
            raise KeyError(table)
        group, stores = self.groups[number], self.stores[number]
        unique, inverse = np.unique(ids, return_inverse=True)
        tables = np.full(len(unique), _names(group).index(table), np.int32)
        values = np.empty((len(unique), group.spec.dim), np.float32)
        shards = shard_of(unique, tables, stores[0].num_shards)
        for store in stores:
            positions = np.flatnonzero(shards == store.shard)
            out = np.empty((len(positions), group.spec.dim), np.float32)
            store.peek(Keys(unique[positions], tables[positions]), out)
            values[positions] = out
        return values[inverse]

    def close(self) -> None:
        """Releases the memory of all shards."""
        if self.pool is not None:
            self.pool.shutdown()
        for _, store in self.files():
            store.close()

    def files(self) -> Iterator[tuple[str, Store]]:
        """Yields every shard of this process, with the name of its checkpoint part."""
        for stores in self.stores:
            for number, store in enumerate(stores, self._first_file):
                yield part_name(store.spec.name, number), store


def _names(group: Group) -> list[str]:
    return [table.name for table in group.spec.tables]


def _rows_of(store: Store) -> dict[str, int]:
    names = (table.name for table in store.spec.tables)
    return dict(zip(names, store.rows_of_tables(), strict=True))
