"""The manifest of a segment, and the head of a log, which names the newest version.

Both are JSON with a checksum of the rest of the file. A segment's manifest is written after its parts, and the head
after the manifest. So everything that the head names is complete.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

from girih.checkpoint.manifest import Count, Crc, PartsManifest, check_coverage
from girih.checkpoint.storage import Storage
from girih.config import build
from girih.config.bounds import Bounds, Finite
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import refusing, seal, unseal

NAME, HEAD, PIN = "manifest.json", "head.json", "pin.json"
FORMAT = 1
_FIX = "publish again, with this girih"
Kind = TypeVar("Kind")
Number = Annotated[int, Bounds(1, (1 << 53) - 1)]
"""The number of a version or an epoch."""


@dataclass(frozen=True, kw_only=True)
class SegmentManifest(PartsManifest):
    """``manifest.json`` of a segment, which leads to a version of a model.

    Attributes:
        number: the version.
        previous: the version that the segment applies to; None for a snapshot, which has all rows.
        run: name of the run that wrote the segment.
        epoch: number of the process among those that wrote to this log. Each process begins with a snapshot.
        time: the moment of its rows and parameters, in seconds since 1970.
        parts: the files of the segment. Parts with rows also have ``left``, the number of keys that have no row any
            more.
    """

    number: Number
    previous: Number | None
    run: str
    epoch: Number
    time: Finite
    format: int = FORMAT

    @property
    def kind(self) -> str:
        """``snapshot`` or ``segment``."""
        return "snapshot" if self.previous is None else "segment"

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        return seal(asdict(self))

    @classmethod
    def read(cls, place: Storage, expected: int | None = None) -> SegmentManifest:
        """Reads a manifest, and checks that its parts hold all shards of all tables.

        Args:
            expected: the checksum of the file, if known.

        Raises:
            MissingFileError: there is none. CheckpointError: it is damaged, or another one than expected.
        """
        text, where = place.read(NAME), f"{place}/{NAME}"
        if expected is not None and zlib.crc32(text) != expected:
            raise CheckpointError(f"{where}: is not the manifest that the head names")
        content = unseal(text, where, FORMAT, _FIX)
        with refusing(where, _FIX):
            manifest = cls.build(content)
            if manifest.previous is not None and manifest.previous >= manifest.number:
                raise ValueError(f"version {manifest.number} follows {manifest.previous}")
        check_coverage(manifest.shards, place.url)
        return manifest


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A version in the head: its number, step, time, and the checksum of its manifest's file."""

    number: Number
    step: Count
    time: Finite
    manifest_crc32: Crc


@dataclass(frozen=True, kw_only=True)
class LogHead:
    """``head.json``, which followers poll.

    Attributes:
        run, epoch: the run and epoch of the writing process; see :class:`SegmentManifest`.
        newest: the newest available version: the snapshot, or the last segment after it.
        snapshot: the newest snapshot.
        written: seconds since 1970.
    """

    run: str
    epoch: Number
    newest: Pointer
    snapshot: Pointer
    written: Finite
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.snapshot.number > self.newest.number:
            raise ValueError(f"snapshot {self.snapshot.number} is newer than version {self.newest.number}")

    def to_bytes(self) -> bytes:
        """Returns the content of the file."""
        return seal(asdict(self))

    @classmethod
    def read(cls, root: Storage) -> LogHead | None:
        """Reads the head of a log; None if there is none yet.

        Raises:
            CheckpointError: it is damaged, or of another format.
        """
        return _read(cls, root, HEAD, _FIX)


@dataclass(frozen=True, kw_only=True)
class _Pin:
    number: Number | None
    format: int = FORMAT


def read_pin(root: Storage) -> int | None:
    """Returns the version that followers must stay at; None if they follow the newest version.

    Raises:
        CheckpointError: the file is damaged.
    """
    pin = _read(_Pin, root, PIN, "pin a version again, or delete the file")
    return None if pin is None else pin.number


def write_pin(root: Storage, number: int | None) -> None:
    """Makes followers go to a version and stay there. None makes them follow the newest version again."""
    root.replace(PIN, seal(asdict(_Pin(number=number))))


def _read(kind: type[Kind], root: Storage, name: str, fix: str) -> Kind | None:
    """Reads a small file of a log; None if there is none."""
    try:
        text = root.read(name)
    except MissingFileError:
        return None
    where = f"{root}/{name}"
    with refusing(where, fix):
        content: Kind = build(kind, unseal(text, where, FORMAT, fix), "")
    return content
