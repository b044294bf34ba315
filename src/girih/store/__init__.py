"""One shard in one process: rows by key, in flat arrays on one arena."""

from girih.store.arena import ArenaOptions, File, Heap, Shared, remove_arena, remove_segments
from girih.store.live import LiveSnapshot
from girih.store.route import shard_of
from girih.store.snapshot import Snapshot, SnapshotFile, read_snapshot, write_snapshot
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.store.store import Store
from girih.store.tensorfile import header_checksum

__all__ = [
    "ArenaOptions",
    "File",
    "GroupSpec",
    "Heap",
    "LiveSnapshot",
    "Segment",
    "Shared",
    "Snapshot",
    "SnapshotFile",
    "Store",
    "TableSpec",
    "header_checksum",
    "read_snapshot",
    "remove_arena",
    "remove_segments",
    "shard_of",
    "write_snapshot",
]
