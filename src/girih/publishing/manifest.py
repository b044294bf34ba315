"""The manifest of a segment, and the head of a log, which says what is there.

Both are JSON with a checksum of all else in them. A segment's manifest is written behind its parts, and the head behind the
manifest; so what the head names is complete.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from girih.checkpoint.manifest import DENSE, Count, Crc, Parts, check_coverage, check_facts
from girih.checkpoint.storage import Storage
from girih.config import build
from girih.config.bounds import Bounds, Finite
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import refusing, seal, unseal
from girih.version import __version__

NAME, HEAD, PIN = "manifest.json", "head.json", "pin.json"
FORMAT = 1
_FIX = "publish again, with this girih"
Number = Annotated[int, Bounds(1, (1 << 53) - 1)]
"""Numbers versions and epochs."""


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """A version as its log and its followers know it, without rows and parameters.

    Attributes:
        number: of the version.
        run: names the run that wrote it. epoch: how often a process has begun to write to this log; each begins with a snapshot.
        step: steps of training. time: seconds since 1970, when the rows and parameters were as they are here.
        schema: as ``Schema.to_dict`` gives it; fingerprint: of that schema.
        needs: feature → what the model reads of it, see :mod:`girih.models.needs`.
        recipe: see :mod:`girih.checkpoint.recipe`. normalization: of standardized features, if it is known.
    """

    number: Number
    run: str
    epoch: Number
    step: Count
    time: Finite
    schema: Mapping[str, Any]
    fingerprint: str
    needs: Mapping[str, Sequence[str]]
    recipe: Mapping[str, Any]
    normalization: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class SegmentManifest(VersionFacts):
    """``manifest.json`` of a segment, with the facts of the version that it leads to.

    Attributes:
        previous: of the version that it is to be applied to; None where it has all rows: a snapshot.
        parts: name → bytes and checksums: ``dense.safetensors``, with parameters and buffers by name, and those with rows. Of these
            also ``group``, ``tables`` (rows of each), ``shard``, ``num_shards``, and ``left``, the number of keys that have no row any more.
    """

    previous: Number | None
    parts: Parts
    format: int = FORMAT
    girih: str = __version__

    @property
    def kind(self) -> str:
        """``snapshot`` or ``delta``."""
        return "snapshot" if self.previous is None else "delta"

    @property
    def shards(self) -> Parts:
        """The parts that hold rows."""
        return {name: facts for name, facts in self.parts.items() if name != DENSE}

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
            manifest: SegmentManifest = build(cls, content, "")
            check_facts(manifest.parts)
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

    def to_bytes(self) -> bytes:
        """The file."""
        return seal(asdict(self))

    @classmethod
    def read(cls, root: Storage) -> LogHead | None:
        """The head of a log; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        try:
            text = root.read(HEAD)
        except MissingFileError:
            return None
        where = f"{root}/{HEAD}"
        content = unseal(text, where, FORMAT, _FIX)
        with refusing(where, _FIX):
            head: LogHead = build(cls, content, "")
            if head.snapshot.number > head.newest.number:
                raise ValueError(
                    f"snapshot {head.snapshot.number} is newer than version {head.newest.number}"
                )
        return head


@dataclass(frozen=True, kw_only=True)
class _Pin:
    number: Number | None
    format: int = FORMAT


def read_pin(root: Storage) -> int | None:
    """The number of the version that followers have to stay at; None where they follow the newest.

    Raises:
        CheckpointError: damaged.
    """
    try:
        text = root.read(PIN)
    except MissingFileError:
        return None
    where, fix = f"{root}/{PIN}", "pin a version again, or delete the file"
    content = unseal(text, where, FORMAT, fix)
    with refusing(where, fix):
        pin: _Pin = build(_Pin, content, "")
        return pin.number


def write_pin(root: Storage, number: int | None) -> None:
    """Has followers go to a version and stay there; None has them follow the newest again."""
    root.replace(PIN, seal(asdict(_Pin(number=number))))
