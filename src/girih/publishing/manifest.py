"""The manifest of a segment, and the head of a log, which says what is there.

Both are JSON with a checksum of all else in them. A segment's manifest is written behind its parts, and the head behind the
manifest; so what the head names is complete.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from girih.checkpoint.manifest import DENSE, Parts, check_coverage
from girih.checkpoint.storage import Storage
from girih.config import build, checks
from girih.errors import CheckpointError, MissingFileError
from girih.version import __version__

NAME, HEAD, PIN = "manifest.json", "head.json", "pin.json"
CHECKSUM = "crc32"
FORMAT = 1
_MOST = (1 << 53) - 1
_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """A version as its log and its followers know it, without rows and parameters.

    Attributes:
        number: of the version.
        run: names the run that wrote it. epoch: how often a process has begun to write to this log; each begins with a snapshot.
        step: steps of training. time: seconds since 1970, when the rows and parameters were as they are here.
        schema: as ``Schema.to_dict`` gives it; fingerprint: of that schema.
        needs: feature → what the model reads of it, see :mod:`girih.models.needs`.
        recipe: see :mod:`girih.training.recipe`. normalization: of standardized features, if it is known.
    """

    number: int
    run: str
    epoch: int
    step: int
    time: float
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

    previous: int | None
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
        return _sealed(asdict(self))

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
        try:
            manifest = cls(**_opened(text))
            manifest._check()
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
        except _UNUSABLE as error:
            raise CheckpointError(f"{where}: damaged ({type(error).__name__}: {error})") from None
        check_coverage(manifest.shards, place.url)
        return manifest

    def _check(self) -> None:
        checks.integer("number", self.number, 1, _MOST)
        if self.previous is not None:
            checks.integer("previous", self.previous, 1, self.number - 1)
        checks.integer("epoch", self.epoch, 1, _MOST)
        checks.integer("step", self.step, 0, _MOST)
        for what, kind, found in (
            ("run", str, self.run),
            ("time", float, self.time),
            ("schema", dict[str, Any], self.schema),
            ("needs", dict[str, list[str]], self.needs),
            ("recipe", dict[str, Any], self.recipe),
            ("normalization", dict[str, Any] | None, self.normalization),
            ("parts", dict[str, dict[str, Any]], self.parts),
        ):
            build(kind, found, what)
        if DENSE not in self.parts:
            raise ValueError(f"it lists no {DENSE}")
        for name, facts in self.parts.items():
            if name.startswith("~") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"part {name!r} does not lie in it")
            checks.integer(f"bytes of {name}", facts["bytes"], 0)
            for crc in facts["crc32"].values():
                checks.integer(f"crc32 of {name}", crc, 0)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A version as the head knows it: its number, the step, when it was taken, and the checksum of its manifest's file."""

    number: int
    step: int
    time: float
    manifest_crc32: int


@dataclass(frozen=True, kw_only=True)
class Head:
    """``head.json``: what followers look at.

    Attributes:
        run, epoch: of the process that writes; see :class:`SegmentManifest`.
        newest: the newest version that can be had: the snapshot, or what segments behind it lead to.
        snapshot: the newest snapshot.
        written: seconds since 1970.
    """

    run: str
    epoch: int
    newest: Pointer
    snapshot: Pointer
    written: float
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The file."""
        return _sealed(asdict(self))

    @classmethod
    def read(cls, root: Storage) -> Head | None:
        """The head of a log; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        try:
            text = root.read(HEAD)
        except MissingFileError:
            return None
        try:
            content = _opened(text)
            head: Head = build(cls, content, HEAD)
            return head
        except _UNUSABLE as error:
            told = str(error) if isinstance(error, CheckpointError) else f"damaged ({error})"
            raise CheckpointError(f"{root}/{HEAD}: {told}") from None


def read_pin(root: Storage) -> int | None:
    """The number of the version that followers have to stay at; None where they follow the newest.

    Raises:
        CheckpointError: damaged.
    """
    try:
        content = _opened(root.read(PIN))
        number = content["number"]
        if number is not None:
            checks.integer("number", number, 1, _MOST)
    except MissingFileError:
        return None
    except _UNUSABLE as error:
        raise CheckpointError(f"{root}/{PIN}: damaged ({error})") from None
    return None if number is None else int(number)


def write_pin(root: Storage, number: int | None) -> None:
    """Has followers go to a version and stay there; None has them follow the newest again."""
    root.replace(PIN, _sealed({"number": number, "format": FORMAT}))


def _sealed(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content)
    checksum = json.dumps({CHECKSUM: zlib.crc32(text.encode())})
    return f"{checksum[:-1]}, {text[1:]}".encode()


def _opened(text: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    checksum = content.pop(CHECKSUM)
    if content["format"] != FORMAT:
        raise CheckpointError(f"format {content['format']}, expected {FORMAT}; update girih")
    if zlib.crc32(json.dumps(content).encode()) != checksum:
        raise ValueError("its checksum differs")
    return content
