"""The store: one shard of the tables in one process. Rows are found by key, and are in flat arrays of one arena."""

from girih.store.keys import Keys, RowUpdate
from girih.store.memory.mapping import ArenaOptions, File, Heap, Shared, remove_arena
from girih.store.memory.pushes import CutPush, Push
from girih.store.memory.repair import Repaired
from girih.store.snapshot.file import SnapshotFile, write_rows
from girih.store.snapshot.snapshot import LiveSnapshot, Snapshot
from girih.store.snapshot.tensorfile import DiskFile, Sink
from girih.store.spec import GroupSpec, Segment, TableSpec, shard_of
from girih.store.store import Store
from girih.store.tiers.tiered_values import Tiers

__all__ = [
    "ArenaOptions",
    "CutPush",
    "DiskFile",
    "File",
    "GroupSpec",
    "Heap",
    "Keys",
    "LiveSnapshot",
    "Push",
    "Repaired",
    "RowUpdate",
    "Segment",
    "Shared",
    "Sink",
    "Snapshot",
    "SnapshotFile",
    "Store",
    "TableSpec",
    "Tiers",
    "remove_arena",
    "shard_of",
    "write_rows",
]
