"""Follows a log. Copies published versions into mapped files on this machine, one whole version after the other.

    head.json ──► version ──► segments after the current one, if all are there ──► a file on top of each stack
                         └──► else the newest snapshot, and the segments after it ──► new stacks

If something is missing, damaged, repeated or of another model, the follower logs a line and keeps the current version.
The next poll tries again, from a snapshot if necessary.
"""

from __future__ import annotations

import fcntl
import itertools
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from girih.checkpoint.description import ModelDescription
from girih.checkpoint.manifest import DENSE
from girih.errors import CheckpointError, ConfigError, StorageFullError
from girih.files.sealed import reason_of, refusing
from girih.files.whole import disk_full, unfinished
from girih.kernels.cpu import ahead
from girih.publishing.log import Log
from girih.publishing.manifest import LogHead, SegmentManifest
from girih.publishing.part import SegmentPart
from girih.schema import Schema
from girih.serving.limits import Notify
from girih.serving.row_files import Merging, most_to_merge, replaced, write_rows
from girih.serving.signature import (
    NAME,
    Dense,
    ModelFile,
    RowsFile,
    Signature,
    inputs_of,
    outputs_of,
    read_file,
)
from girih.sparse.groups.pack import Group, served_groups
from girih.store.mapped import MappedFile, Stack
from girih.store.snapshot.tensorfile import StoredTensor, check_tensors

_AT_ONCE = 64  # segments that become one file
_KEPT = 3  # versions whose files stay, for servers that are about to map them


@dataclass(frozen=True)
class _CheckedSegment:
    """A segment or a snapshot that is complete. Its checksums are right."""

    manifest: SegmentManifest
    groups: tuple[Group, ...]
    parts: list[SegmentPart]
    dense: bytes
    tensors: list[StoredTensor]


class _Unreachable(CheckpointError):
    """The error if no available segments or snapshot lead to a version, for now."""


class _CheckedGroups:
    """The groups of the last description of a model.

    The description rarely changes, and its check takes longer than everything else that is read with a small segment.
    """

    def __init__(self) -> None:
        self._description: tuple[object, ...] = ()
        self._groups: tuple[Group, ...] = ()

    def of(self, version: ModelDescription, where: str) -> tuple[Group, ...]:
        """Returns the groups in which a version's rows are served, if its description of the model is usable.

        Raises:
            CheckpointError: schema, needs, recipe or normalization cannot be used.
        """
        description = (*_model(version), version.normalization)
        if self._description != description:
            fault = "its schema, needs, recipe or normalization cannot be used"
            with refusing(where, "publish again", fault=fault):
                checked = version.checked("schema")
                self._groups = served_groups(checked.schema, checked.needs, checked.options.seed)
            self._description = description
        return self._groups


class Follower(AbstractContextManager["Follower"]):
    """Follows a log into a directory of this machine. One thread uses it.

    Args:
        directory: a directory that no other follower uses. The follower continues with files of an earlier follower
            there.
        notify: receives a line on every event.
        fingerprint: identifies the served schema. By default it is the schema of the first version. The follower
            refuses versions of other schemas.

    Attributes:
        current: the current version, as servers read it; None before the first.
        again_s: seconds until it tries again to reach a version.

    Raises:
        ConfigError: another follower uses the directory.
    """

    def __init__(self, log: Log, directory: Path, notify: Notify, *, fingerprint: str | None = None) -> None:
        self._log, self.directory, self._notify, self._fingerprint = log, directory, notify, fingerprint
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_directory(directory)
        ahead.make_ready([*ahead.writing_mapped(), *ahead.serving()], notify)
        self.again_s = 1.0
        self._gap: tuple[LogHead, float] | None = None  # an unreachable head; time of the next try
        self._logged: dict[str, str] = {}
        self._merging = Merging()
        self._tensors: list[StoredTensor] = []  # the current version's dense half, without values
        self._groups = _CheckedGroups()
        self._recent: deque[set[str]] = deque(maxlen=_KEPT)
        self.current = self._find_version()
        if self.current is not None:
            self._fingerprint = self._fingerprint or self.current.fingerprint
            self._recent.append(_names(self.current))
        self._counts = itertools.count(_next_count(directory))
        self._clean()

    def poll(self) -> bool:
        """Checks once for a new version. Returns whether :attr:`current` has changed."""
        before = None if self.current is None else self.current.number
        try:
            self._apply_merged()
            self._follow()
            if self.current is not None and self.current.number != before:
                self._merge()
            self._allow_logging("log")
        except Exception as error:  # whatever is wrong in the log, the current version stays
            self._log_once("log", self._describe_stay(reason_of(error)))
        after = None if self.current is None else self.current.number
        return after != before

    def close(self) -> None:
        """Ends. The files stay."""
        self._merging.close()
        self._lock.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _follow(self) -> None:
        head = self._log.head()
        if head is None:
            self._log_once("empty", f"{self._log.root}: nothing is published there yet; waits")
            return
        self._allow_logging("empty")
        pin, current = self._log.pin(), self.current
        target = head.newest.number if pin is None else pin
        if current is not None and current.number == target and (pin is not None or _same_run(head, current)):
            return
        if current is not None and pin is None and _same_run(head, current) and target < current.number:
            self._log_once("repeat", f"the head went back to version {target}; stays at {current.number}")
            return
        self._allow_logging("repeat")
        if self._gap is not None and self._gap[0] == head and time.monotonic() < self._gap[1]:
            return
        self._gap = head, time.monotonic() + self.again_s
        if self._go_to(target, head, pinned=pin is not None):
            self._gap = None
            self._allow_logging("gap")

    def _go_to(self, target: int, head: LogHead, *, pinned: bool) -> bool:
        """Moves to a version, or as close to it as possible. Returns whether it reached the version."""
        current, gap = self.current, ""
        if current is not None and current.number < target and (pinned or _same_run(head, current)):
            segments, why = self._segments(current, self._tensors, target)
            if segments:
                self._apply(None, segments)
            if why is None:
                return True
            gap = f"version {current.number + len(segments) + 1} cannot be reached: {why}"
        snapshot = self._snapshot_for(target, head)
        if (
            self.current is not None
            and snapshot <= self.current.number <= target
            and (pinned or _same_run(head, self.current))
        ):
            self._log_once("gap", f"{gap}; stays at {self.current.number} until there is a newer snapshot")
            return False
        crc = head.snapshot.manifest_crc32 if snapshot == head.snapshot.number else None
        base = self._read(snapshot, whole=True, expected=crc)
        segments, why = [], None
        if snapshot < target:
            segments, why = self._segments(base.manifest, base.tensors, target)
        if gap:
            self._notify(f"{gap}; begins again with snapshot {snapshot}")
        elif current is not None and not pinned and head.run != current.run:
            self._notify(
                f"another run publishes now: {head.run}, after {current.run}; begins with snapshot {snapshot}"
            )
        self._apply(base, segments)
        if why is not None:
            self._log_once(
                "gap",
                f"version {snapshot + len(segments) + 1} cannot be reached: {why}; stays at {snapshot + len(segments)}",
            )
        return why is None

    def _snapshot_for(self, target: int, head: LogHead) -> int:
        if head.snapshot.number <= target:
            return head.snapshot.number
        there = self._log.snapshots(target)
        if not there:
            raise _Unreachable(f"version {target} cannot be reached: no snapshot leads to it")
        return there[-1]

    def _segments(
        self, version: SegmentManifest | Signature, tensors: list[StoredTensor], target: int
    ) -> tuple[list[_CheckedSegment], str | None]:
        """Returns the segments after a version, in order.

        Also returns the reason why the next segment is unusable, or None.

        Args:
            tensors: the tensors of its dense half, without their values.
        """
        after, run, model = version.number, (version.run, version.epoch), _model(version)
        segments: list[_CheckedSegment] = []
        for number in range(after + 1, min(target, after + _AT_ONCE) + 1):
            try:
                segment = self._read(number, whole=False)
            except StorageFullError:
                raise
            except Exception as error:
                return segments, reason_of(error)
            segment_run = segment.manifest.run, segment.manifest.epoch
            if segment.manifest.previous != number - 1 or segment_run != run:
                return (
                    segments,
                    f"segment {number} applies to version {segment.manifest.previous} of {segment_run}, not to {number - 1} of {run}",
                )
            if _model(segment.manifest) != model or segment.tensors != tensors:
                return segments, f"segment {number} is of another model than version {after}"
            segments.append(segment)
        return segments, None

    def _read(self, number: int, *, whole: bool, expected: int | None = None) -> _CheckedSegment:
        """Reads a whole segment or snapshot.

        Raises:
            MissingFileError: it, or a part of it, is missing. CheckpointError: it is damaged, or of another model.
        """
        manifest = self._log.read(number, whole=whole, expected=expected)
        if self._fingerprint is not None and manifest.fingerprint != self._fingerprint:
            raise CheckpointError(
                f"version {number} has schema {manifest.fingerprint}, this follower {self._fingerprint}; start a new follower for it"
            )
        place, parts = self._log.place(number, whole=whole), []
        groups = self._groups.of(manifest, place.url)
        for name, facts in manifest.shards.items():
            with place.fetch(name) as file:
                parts.append(SegmentPart(file, f"{place}/{name}", facts))
        for group in groups:
            names = {table.name for table in group.spec.tables}
            shards = [part for part in parts if names & part.tables.keys()]
            for part in shards:
                part.check_columns(group.spec)
            if missing := names.difference(*(part.tables for part in shards)):
                raise CheckpointError(f"{place}: damaged: no part holds table {min(missing)!r}")
        dense, facts = place.read(DENSE), manifest.parts[DENSE]
        if zlib.crc32(dense) != facts["crc32"].get(""):
            raise CheckpointError(f"{place}/{DENSE}: damaged: its checksum differs")
        tensors = check_tensors(dense, f"{place}/{DENSE}")
        return _CheckedSegment(manifest, groups, parts, dense, tensors)

    def _apply(self, base: _CheckedSegment | None, segments: list[_CheckedSegment]) -> None:
        """Builds a version and makes it current.

        It consists of a snapshot or the current files, and the segments after them.
        """
        last = segments[-1] if segments else base
        if last is None:
            return
        manifest = last.manifest

        def written(*sources: Sequence[SegmentPart]) -> list[RowsFile]:
            count = next(self._counts)
            return [
                write_rows(self.directory / f"rows-{g}-{count}.safetensors", group, sources)
                for g, group in enumerate(last.groups)
            ]

        stacks: Sequence[tuple[RowsFile, ...]] = () if self.current is None else self.current.rows
        if base is not None:
            stacks = [(file,) for file in written(base.parts)]
        if segments:
            on_top = written(*(segment.parts for segment in reversed(segments)))
            pairs = zip(on_top, stacks, strict=True)
            stacks = [(file, *files) if file.keys else files for file, files in pairs]
        dense = self.directory / f"dense-{next(self._counts)}.safetensors"
        _write(dense, last.dense)
        self._set_current(_signature_of(manifest, self._log.root.url, stacks, ModelFile.of(dense)))
        self._fingerprint = self._fingerprint or manifest.fingerprint
        self._tensors = last.tensors
        source = f"snapshot {base.manifest.number}" if base is not None else ""
        if segments:
            first, final = segments[0].manifest.number, manifest.number
            span = f"segment {final}" if first == final else f"segments {first} to {final}"
            source = f"{source} and {span}" if source else span
        self._notify(f"version {manifest.number}, step {manifest.step}, by {source}")

    def _set_current(self, version: Signature) -> None:
        version.write(self.directory)
        self.current = version
        self._recent.append(_names(version))
        self._clean()

    def _merge(self) -> None:
        """Begins to merge files of the stack that most needs a merge."""
        if self.current is None or not self._merging.is_idle:
            return
        wanted = [(most_to_merge(files), g) for g, files in enumerate(self.current.rows)]
        most, g = max(wanted, default=(0, 0))
        if most < 2:
            return
        files, spec = self.current.rows[g], self._groups.of(self.current, str(self.directory))[g].spec
        path = self.directory / f"rows-{g}-{next(self._counts)}.safetensors"
        self._merging.begin(path, spec, g, files[:most], whole=most == len(files))

    def _apply_merged(self) -> None:
        result = self._merging.result()
        if result is None or self.current is None:
            return
        g, merged, by = result
        files = replaced(self.current.rows[g], merged, by) if g < len(self.current.rows) else None
        if files is not None:
            rows = (*self.current.rows[:g], tuple(files), *self.current.rows[g + 1 :])
            self._set_current(replace(self.current, rows=rows))
        self._merge()

    def _find_version(self) -> Signature | None:
        """Returns the version that an earlier follower left in this directory, if it is complete and of this log."""
        if not (self.directory / NAME).exists():
            return None
        try:
            version = Signature.read(self.directory, f"delete {self.directory} to begin again")
            if version.source.get("log") != self._log.root.url:
                raise CheckpointError(f"{self.directory}: has versions of log {version.source.get('log')}")
            if self._fingerprint is not None and version.fingerprint != self._fingerprint:
                raise CheckpointError(f"{self.directory}: has versions of another schema")
            groups = self._groups.of(version, str(self.directory))
            for group, files in zip(groups, version.rows, strict=True):
                Stack(group.spec, [MappedFile(self.directory / f.name, f.facts) for f in files])
            parameters = version.dense.parameters
            self._tensors = check_tensors(read_file(self.directory, parameters), parameters.name)
        except Exception as error:
            self._notify(f"{reason_of(error)}; begins again")
            (self.directory / NAME).unlink(missing_ok=True)
            return None
        self._notify(f"goes on with version {version.number}, step {version.step}, which is here")
        return version

    def _clean(self) -> None:
        """Deletes files of versions that no server will map any more. Also deletes leftovers of a killed follower."""
        stays: set[str] = set().union(*self._recent)
        stays |= {self._merging.name or ""}
        for path in [*self.directory.glob("rows-*.safetensors"), *self.directory.glob("dense-*.safetensors")]:
            if path.name not in stays:
                path.unlink(missing_ok=True)
        if self._merging.is_idle:
            for path in unfinished(self.directory):
                path.unlink(missing_ok=True)

    def _describe_stay(self, reason: str) -> str:
        return reason if self.current is None else f"stays at version {self.current.number}: {reason}"

    def _log_once(self, kind: str, message: str) -> None:
        if self._logged.get(kind) != message:
            self._logged[kind] = message
            self._notify(message)

    def _allow_logging(self, kind: str) -> None:
        self._logged.pop(kind, None)


def _next_count(directory: Path) -> int:
    names = (path.stem.rpartition("-")[2] for path in directory.glob("*-*.safetensors"))
    return max((int(name) for name in names if name.isdecimal()), default=0) + 1


def _signature_of(
    manifest: SegmentManifest, log: str, rows: Sequence[tuple[RowsFile, ...]], parameters: ModelFile
) -> Signature:
    """Returns the signature of a version, from its segment or snapshot, and from its files on this machine."""
    schema = Schema.from_dict(manifest.schema, NAME)
    return Signature(
        step=manifest.step,
        schema=manifest.schema,
        fingerprint=manifest.fingerprint,
        needs=manifest.needs,
        recipe=manifest.recipe,
        normalization=manifest.normalization,
        inputs=inputs_of(schema),
        outputs=outputs_of(schema),
        rows=tuple(rows),
        dense=Dense(parameters=parameters),
        source={"log": log},
        number=manifest.number,
        run=manifest.run,
        epoch=manifest.epoch,
    )


def _names(version: Signature) -> set[str]:
    return {file.name for file in version.files}


def _model(version: ModelDescription) -> tuple[object, ...]:
    return version.schema, version.needs, version.recipe


def _same_run(head: LogHead, current: Signature) -> bool:
    return (head.run, head.epoch) == (current.run, current.epoch)


def _lock_directory(directory: Path) -> IO[str]:
    lock = (directory / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"{directory}: another follower uses it; name another directory") from None
    return lock


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise disk_full(error, path) or error from None
