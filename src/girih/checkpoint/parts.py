"""The parts of a checkpoint that a process with shards writes and loads, and the facts about them."""

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
    """The rows at the moment when a save began. Any thread may write them, once."""

    def write(self) -> Parts:
        """Writes this process's parts. Returns their facts by name."""

    def close(self) -> None:
        """Ends the save, even if the rows are not written."""


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
        storage: the checkpoint. parts: the facts about each part, from the manifest.
        optimizer_state: True loads the optimizer state with the rows. False starts it from its initial values.
        begins: True if a new run begins with the rows that fit, or False if all rows must fit.
        newest: maps each table to the second of its newest use, if training continues with the rows. A load refuses
            rows if all rows of a table would expire.
    """

    storage: Storage
    parts: Parts
    optimizer_state: bool = True
    begins: bool = False
    newest: Mapping[str, int] = field(default_factory=dict)

    def newest_uses(self) -> dict[str, int]:
        """Returns the newest use, in seconds, of each table that counts seconds. Reads two columns of the parts.

        Raises:
            CheckpointError: a part is damaged. MissingFileError: a part does not exist any more.
        """
        newest: dict[str, int] = {}
        for name in self.parts:
            tables = describe_header(self.header(name), f"{self.storage}/{name}")["tables"]
            if any(map(counts_seconds, tables)):
                add_newest_uses(newest, self.open(name))
        return newest

    def open(self, name: str) -> SnapshotFile:
        """Opens a part after checking its format. The content is checked when it is read.

        Raises:
            CheckpointError: the part is damaged, or differs from the manifest.
            MissingFileError: the part does not exist any more.
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
                raise damaged(snapshot.where, f"{fact} is {actual!r}, but the manifest says {expected!r}")
        return snapshot

    def header(self, name: str) -> TensorHeader:
        """Reads only a part's header, which has a description of the part.

        Raises:
            CheckpointError: the part is damaged. MissingFileError: the part does not exist any more.
        """
        where = f"{self.storage}/{name}"
        length = TensorHeader.length(self.storage.read(name, 0, 8), self.parts[name]["bytes"], where)
        return TensorHeader(self.storage.read(name, 8, 8 + length), where)

    def to_dict(self) -> ReaderFields:
        """Returns plain values for another process, which may be on another machine."""
        return {
            "url": self.storage.absolute().url,
            "parts": dict(self.parts),
            "optimizer_state": self.optimizer_state,
            "begins": self.begins,
            "newest": dict(self.newest),
        }

    @classmethod
    def from_dict(cls, tree: ReaderFields) -> PartReader:
        """Reverses :meth:`to_dict`."""
        return cls(
            Storage(tree["url"]), tree["parts"], tree["optimizer_state"], tree["begins"], tree["newest"]
        )
