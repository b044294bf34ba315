"""Parts of a checkpoint, as a process with shards writes and loads them: where they lie, and their facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from girih.checkpoint.manifest import PartFacts, Parts
from girih.checkpoint.storage import Storage
from girih.store import SnapshotFile
from girih.store.snapshot.columns import counts_seconds
from girih.store.snapshot.file import add_newest_uses, describe_header
from girih.store.snapshot.tensorfile import TensorHeader, damaged


class SparseSave(Protocol):
    """Rows as they were when a write began; written once, by any thread."""

    def write(self) -> Parts:
        """Writes the parts that this process answers for; returns their facts by name."""

    def close(self) -> None:
        """Ends the write, done or not."""


class ReaderFields(TypedDict):
    """The plain values of a :class:`PartReader`."""

    url: str
    parts: dict[str, PartFacts]
    optimizer_state: bool
    begins: bool
    newest: dict[str, int]


@dataclass(frozen=True)
class PartReader:
    """The parts of a checkpoint that hold rows.

    Attributes:
        storage: the checkpoint. parts: their facts, as the manifest has them.
        optimizer_state: whether it is taken with the rows; else the optimizer begins anew.
        begins: whether a new run begins with the rows, as far as they fit; else all of them have to.
        newest: table → second of its newest use, where training goes on with the rows: whoever loads them refuses those that would all
            expire.
    """

    storage: Storage
    parts: Parts
    optimizer_state: bool = True
    begins: bool = False
    newest: Mapping[str, int] = field(default_factory=dict)

    def newest_uses(self) -> dict[str, int]:
        """The second of the newest use of each table that counts seconds, as rows count it; reads two columns of their parts.

        Raises:
            CheckpointError: damaged. MissingFileError: a part is gone.
        """
        newest: dict[str, int] = {}
        for name in self.parts:
            tables = describe_header(self.header(name), f"{self.storage}/{name}")["tables"]
            if any(map(counts_seconds, tables)):
                add_newest_uses(newest, self.open(name))
        return newest

    def open(self, name: str) -> SnapshotFile:
        """A part, its form checked; its content when it is read.

        Raises:
            CheckpointError: damaged, or other than the manifest says. MissingFileError: it is gone.
        """
        facts = self.parts[name]
        with self.storage.fetch(name) as file:
            snapshot = SnapshotFile(file, f"{self.storage}/{name}", facts["crc32"])
        described = snapshot.description
        tables = [table["name"] for table in described["tables"]]
        for fact, actual, expected in (
            ("group", described["group"], facts["group"]),
            ("shard", described["shard"], facts["shard"]),
            ("num_shards", described["num_shards"], facts["num_shards"]),
            ("tables", tables, list(facts["tables"])),
            ("num_rows", snapshot.num_rows, sum(facts["tables"].values())),
        ):
            if actual != expected:
                raise damaged(snapshot.where, f"{fact} is {actual!r}, the manifest says {expected!r}")
        return snapshot

    def header(self, name: str) -> TensorHeader:
        """Reads the header, in which a part describes itself, without the rest.

        Raises:
            CheckpointError: damaged. MissingFileError: it is gone.
        """
        where = f"{self.storage}/{name}"
        length = TensorHeader.length(self.storage.read(name, 0, 8), self.parts[name]["bytes"], where)
        return TensorHeader(self.storage.read(name, 8, 8 + length), where)

    def to_dict(self) -> ReaderFields:
        """For another process, which may be on another machine."""
        return {
            "url": self.storage.absolute().url,
            "parts": dict(self.parts),
            "optimizer_state": self.optimizer_state,
            "begins": self.begins,
            "newest": dict(self.newest),
        }

    @classmethod
    def from_dict(cls, tree: ReaderFields) -> PartReader:
        """The inverse of :meth:`to_dict`."""
        return cls(
            Storage(tree["url"]), tree["parts"], tree["optimizer_state"], tree["begins"], tree["newest"]
        )
