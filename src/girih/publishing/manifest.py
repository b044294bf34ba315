"""The manifest of a segment, and the head of a log, which says what is there.

Both are JSON with a checksum of all else in them. A segment's manifest is written behind its parts, and the head behind the
manifest; so what the head names is complete.
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
"""Numbers versions and epochs."""


@dataclass(frozen=True, kw_only=True)
class SegmentManifest(PartsManifest):
    """``manifest.json`` of a segment, which leads to a version of a model.

    Attributes:
        number: of the version.
        previous: of the version that it is to be applied to; None where it has all rows: a snapshot.
        run: names the run that wrote it. epoch: how often a process has begun to write to this log; each begins with a snapshot.
        time: seconds since 1970, when the rows and parameters were as they are here.
        parts: those with rows have ``left`` too, the number of keys that have no row any more.
    """

    number: Number
    previous: Number | None
    run: str
    epoch: Number
    time: Finite
    format: int = FORMAT

    @property
    def kind(self) -> str:
        """``snapshot`` or ``delta``."""
        return "snapshot" if self.previous is None else "delta"

    def to_bytes(self) -> bytes:
        """The file."""
        return seal(asdict(self))

    @classmethod
    def read(cls, place: Storage, expected: int | None = None) -> SegmentManifest:
        """Reads one, and checks that parts hold all shards of all tables.

        Args:
            expected: the checksum of the file, where it is known.

        Raises:
            MissingFileError: there is none. CheckpointError: damaged, or another one than is expected.
        """
        text, where = place.read(NAME), f"{place}/{NAME}"
        if expected is not None and zlib.crc32(text) != expected:
            raise CheckpointError(f"{where}: is another one than the head names")
        content = unseal(text, where, FORMAT, _FIX)
        with refusing(where, _FIX):
            manifest = cls.build(content)
            if manifest.previous is not None and manifest.previous >= manifest.number:
                raise ValueError(f"version {manifest.number} follows {manifest.previous}")
        check_coverage(manifest.shards, place.url)
        return manifest


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A version as the head knows it: its number, the step, when it was taken, and the checksum of its manifest's file."""

    number: Number
    step: Count
    time: Finite
    manifest_crc32: Crc


@dataclass(frozen=True, kw_only=True)
class LogHead:
    """``head.json``: what followers look at.

    Attributes:
        run, epoch: of the process that writes; see :class:`SegmentManifest`.
        newest: the newest version that can be had: the snapshot, or what segments behind it lead to.
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
        """The file."""
        return seal(asdict(self))

    @classmethod
    def read(cls, root: Storage) -> LogHead | None:
        """The head of a log; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        return _read(cls, root, HEAD, _FIX)


@dataclass(frozen=True, kw_only=True)
class _Pin:
    number: Number | None
    format: int = FORMAT


def read_pin(root: Storage) -> int | None:
    """The number of the version that followers have to stay at; None where they follow the newest.

    Raises:
        CheckpointError: damaged.
    """
    pin = _read(_Pin, root, PIN, "pin a version again, or delete the file")
    return None if pin is None else pin.number


def write_pin(root: Storage, number: int | None) -> None:
    """Has followers go to a version and stay there; None has them follow the newest again."""
    root.replace(PIN, seal(asdict(_Pin(number=number))))


def _read(kind: type[Kind], root: Storage, name: str, fix: str) -> Kind | None:
    """A small file of a log; None where there is none."""
    try:
        text = root.read(name)
    except MissingFileError:
        return None
    where = f"{root}/{name}"
    with refusing(where, fix):
        content: Kind = build(kind, unseal(text, where, FORMAT, fix), "")
    return content
