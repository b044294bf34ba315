"""A log: the places of its segments, its available versions, and the removal of old ones.

    head.json                       the newest version, the newest snapshot
    pin.json                        the version that followers must stay at, if any
    segments/00000017/              leads from version 16 to version 17
    snapshots/00000100/             all rows of version 100
        manifest.json  dense.safetensors  tables/<group>/shard-0000.safetensors
    epochs/00000003-<name>          the mark of a process that writes in epoch 3

If a version has a snapshot and a segment, both lead to the same rows. Files are never renamed, with one exception: on a
local disk, a file is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from girih.checkpoint.storage import DOOMED, Storage
from girih.config import read_toml
from girih.config.bounds import Count, Positive
from girih.config.options import Options
from girih.errors import CheckpointError, ConfigError, GirihError, MissingFileError
from girih.publishing.manifest import HEAD, NAME, LogHead, SegmentManifest, read_pin, write_pin

SEGMENTS, SNAPSHOTS, EPOCHS = "segments", "snapshots", "epochs"
_NUMBER = re.compile(r"[0-9]{8,}")


@dataclass(frozen=True)
class Log:
    """A log at an address."""

    root: Storage

    def head(self) -> LogHead | None:
        """See :meth:`LogHead.read`."""
        return LogHead.read(self.root)

    def write_head(self, head: LogHead) -> None:
        """Replaces the head as a whole."""
        self.root.make()
        self.root.replace(HEAD, head.to_bytes())

    def pin(self) -> int | None:
        """See :func:`girih.publishing.manifest.read_pin`."""
        return read_pin(self.root)

    def place(self, number: int, *, whole: bool) -> Storage:
        """Returns the storage of a segment, or of a snapshot."""
        return self.root / (SNAPSHOTS if whole else SEGMENTS) / name_of(number)

    def read(self, number: int, *, whole: bool, expected: int | None = None) -> SegmentManifest:
        """Returns the manifest of a segment, or of a snapshot.

        Raises:
            MissingFileError: there is none. CheckpointError: it is damaged, or has another number.
        """
        place = self.place(number, whole=whole)
        manifest = SegmentManifest.read(place, expected)
        if manifest.number != number or (manifest.previous is None) != whole:
            raise CheckpointError(
                f"{place}/{NAME}: says {manifest.kind} {manifest.number}; expected {'snapshot' if whole else 'segment'} {number}"
            )
        return manifest

    def numbers(self, *, whole: bool) -> list[int]:
        """Returns the numbers of the segments, or snapshots, that exist or have been begun, in order."""
        names = (self.root / (SNAPSHOTS if whole else SEGMENTS)).names()
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def snapshots(self, most: int) -> list[int]:
        """Returns the numbers of the complete snapshots, up to a version, in order."""
        return sorted(self._complete(self.numbers(whole=True), most, whole=True))

    def versions(self) -> list[int]:
        """Returns the available versions.

        These are the snapshots, and the versions that segments reach from a snapshot.
        """
        head = self.head()
        if head is None:
            return []
        newest, numbers = head.newest.number, []
        segments = self._complete(self.numbers(whole=False), newest, whole=False)
        at = None
        wholes = set(self.snapshots(newest))
        for number in sorted(segments | wholes):
            if number in wholes or at == number - 1:
                numbers.append(number)
                at = number
        return numbers

    def claim(self, epoch: int, name: str) -> bool:
        """Reserves an epoch for a process. Returns False if another process has reserved it.

        If two processes reserve it at the same time, at most one succeeds. The later writer sees the mark of the other.
        """
        place = self.root / EPOCHS
        place.make()
        place.replace(f"{name_of(epoch)}-{name}", b"")
        return len([claimed for claimed in place.names() if claimed.startswith(f"{name_of(epoch)}-")]) == 1

    def go_back_to(self, number: int) -> None:
        """Makes followers go to a version and stay there, even if newer versions are published.

        Raises:
            CheckpointError: the version is gone, or never existed; lists those that exist. Followers continue as
                before.
        """
        self._expect(number)
        before = None
        with contextlib.suppress(CheckpointError):  # a damaged pin is overwritten
            before = self.pin()
        write_pin(self.root, number)
        try:
            self._expect(number)  # the version may have been removed meanwhile
        except GirihError:
            write_pin(self.root, before)
            raise

    def go_on(self) -> None:
        """Makes followers follow the newest version again."""
        write_pin(self.root, None)

    def remove_unfinished(self, newest: int) -> None:
        """Removes segments and snapshots that a killed process left.

        They are newer than the newest version, or partly removed.
        """
        for whole, directory in ((False, SEGMENTS), (True, SNAPSHOTS)):
            place = self.root / directory
            for number in self.numbers(whole=whole):
                if number > newest or not self.place(number, whole=whole).exists(NAME):
                    place.remove(name_of(number), first=NAME)
            for name in place.names():
                if name.startswith(DOOMED):
                    place.remove(name, first=NAME)

    def remove_old(self, keep: int) -> None:
        """Removes everything before the last ``keep`` snapshots, except the segments and snapshot that lead to the
        pinned version.
        """
        head, pin = self.head(), self.pin()
        if head is None:
            return
        wholes = self.snapshots(head.snapshot.number)
        if len(wholes) <= keep:
            return
        oldest = wholes[-keep]
        base = max((n for n in wholes if pin is not None and n <= pin), default=None)
        self._remove((n for n in self.numbers(whole=True) if n < oldest and n != base), whole=True)
        stays = range(0) if base is None or pin is None else range(base, pin + 1)
        self._remove((n for n in self.numbers(whole=False) if n <= oldest and n not in stays), whole=False)

    def _remove(self, numbers: Iterable[int], *, whole: bool) -> None:
        for number in numbers:
            (self.root / (SNAPSHOTS if whole else SEGMENTS)).remove(name_of(number), first=NAME)

    def _complete(self, numbers: Iterable[int], newest: int, *, whole: bool) -> set[int]:
        return {n for n in numbers if n <= newest and self.place(n, whole=whole).exists(NAME)}

    def _expect(self, number: int) -> None:
        if self.head() is None:
            raise MissingFileError(f"{self.root}: nothing was published there")
        versions = self.versions()
        if number not in versions:
            raise CheckpointError(
                f"{self.root}: version {number} is not there; there are {describe_numbers(versions)}; name one of them"
            )


def find_log(address: str) -> Log:
    """Returns the log at an address, or the log of a run directory.

    Raises:
        ConfigError: the run publishes nothing.
    """
    root = Storage.at(address)
    if root.local is None or not (root.local / "config.toml").is_file():
        return Log(root.absolute())
    publish = read_toml(root.local / "config.toml").get("publish")
    to = publish.get("to") if isinstance(publish, dict) else None
    if not isinstance(to, str):
        raise ConfigError(
            f"{address}: this run publishes nothing; train it with [publish] to, or name the address of a log"
        )
    return Log(Storage.at(to).absolute())


def name_of(number: int) -> str:
    """Returns the name of a number, for example ``00000017``."""
    return f"{number:08d}"


def describe_numbers(numbers: list[int]) -> str:
    """Returns numbers in order as text, with runs as ``3 to 9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs) or "none"


EVERY_S = 0.5


class PublishOptions(Options):
    """Options of a log that servers follow: its place, the interval of segments, and the time that segments stay.

    Attributes:
        to: a directory, or any other fsspec address such as ``s3://bucket/ads``.
        every_s: seconds of training between two segments; 0.5 if neither this nor ``every_steps`` is given.
        every_steps: steps between two segments, instead of ``every_s``.
        snapshot_every: number of segments between two snapshots of all rows, from which new followers begin.
        keep: number of snapshots that stay, with all segments after the oldest of them.
        on_error: decides what happens if a segment cannot be written. Training goes on and tries again, or it stops.

    Examples:
        >>> import girih
        >>> publish = girih.PublishOptions(to="s3://bucket/ads", every_s=2.0, keep=3)
        >>> publish.seconds, publish.snapshot_every
        (2.0, 100)
    """

    owner = "publish: "

    to: str
    every_s: Positive | None = None
    every_steps: Count | None = None
    snapshot_every: Count = 100
    keep: Count = 2
    on_error: Literal["go_on", "stop"] = "go_on"

    def _check(self) -> None:
        if not self.to:
            raise ConfigError("publish: to = '': expected a directory or an fsspec address")
        if self.every_s is not None and self.every_steps is not None:
            raise ConfigError(
                f"publish: every_s = {self.every_s:g} and every_steps = {self.every_steps}: expected one of them"
            )

    @property
    def seconds(self) -> float | None:
        """Seconds of training between two segments; None if ``every_steps`` counts them."""
        return (self.every_s or EVERY_S) if self.every_steps is None else None
