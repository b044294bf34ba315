"""A version as a follower has it on the disk of its machine: mapped files of rows, parameters, and one small file that says which of them are a version.

    current.json                     replaced whole whenever the version is another one, or its files are
    rows-<group>-<count>.safetensors  see ``girih.store.mapped.file``
    dense-<count>.safetensors         parameters and buffers

Whoever serves reads ``current.json``, maps what it names, and has one version whole, or asks again. Rows of one segment, or of
several, become one mapped file. Files are merged so that a stack stays short.

Shapes: K keys of a chunk, W columns of a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from girih.checkpoint.manifest import Count, Crc
from girih.checkpoint.recipe import check_recipe, train_options
from girih.config import build
from girih.data.normalization import NormalizationStats
from girih.errors import CheckpointError, MissingFileError
from girih.files.sealed import check_inside, open_file, read_sealed, refusing, seal
from girih.files.whole import write_whole
from girih.models.needs import check_needs
from girih.publishing.manifest import SegmentManifest, VersionFacts
from girih.publishing.part import SegmentPart
from girih.schema import Schema
from girih.sparse.groups.pack import Group, served_groups
from girih.store.mapped import MappedFile, MappedFileFacts, MappedWriter, Stack, merge
from girih.store.spec import Floats, GroupSpec, Ints, Longs

CURRENT = "current.json"
_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFile:
    """A file of rows, and its facts."""

    name: str
    bytes: Count
    crc32: Crc
    rows: Count
    buried: Count

    @property
    def keys(self) -> int:
        """Keys that it knows, with a row or buried."""
        return self.rows + self.buried

    @property
    def facts(self) -> MappedFileFacts:
        """See :class:`girih.store.mapped.MappedFileFacts`."""
        return MappedFileFacts(self.bytes, self.crc32, self.rows, self.buried)

    @classmethod
    def of(cls, name: str, written: MappedFileFacts) -> RowsFile:
        """A file that was written."""
        return cls(name=name, **written.to_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(VersionFacts):
    """One version as it lies on this machine.

    Attributes:
        log: the address of the log. newest: the newest number that was known there.
        rows: of each group, in the order of :func:`~girih.sparse.groups.pack.served_groups`, the files of its stack, newest first.
        dense: the file of parameters. dense_crc32: its checksum.
    """

    log: str
    newest: Count
    rows: tuple[tuple[RowsFile, ...], ...]
    dense: str
    dense_crc32: Crc
    format: int = _FORMAT

    @classmethod
    def of(cls, manifest: SegmentManifest, **local: Any) -> Followed:
        """A version that a segment, or a snapshot, leads to."""
        shared = {each.name: getattr(manifest, each.name) for each in fields(VersionFacts)}
        return cls(**shared, **local)

    @property
    def files(self) -> set[str]:
        """Names of all its files."""
        return {self.dense, *(file.name for files in self.rows for file in files)}

    def with_rows(self, group: int, files: Sequence[RowsFile]) -> Followed:
        """The same version with other files of one group, which read alike."""
        rows = list(self.rows)
        rows[group] = tuple(files)
        return replace(self, rows=tuple(rows))

    def groups(self) -> tuple[Group, ...]:
        """The groups in which its rows are served."""
        return check_version(self, self.log)

    def stacks(self, directory: Path, *, verify: bool = False) -> list[Stack]:
        """Its rows, mapped.

        Args:
            verify: compares checksums, which reads all files.

        Raises:
            MissingFileError: a file is gone, since another version is there by now. CheckpointError: damaged.
        """
        return [
            Stack(group.spec, [MappedFile(directory / f.name, f.facts if verify else None) for f in files])
            for group, files in zip(self.groups(), self.rows, strict=True)
        ]

    def parameters(self, directory: Path) -> bytes:
        """The content of the file of parameters.

        Raises:
            MissingFileError: it is gone. CheckpointError: damaged.
        """
        path = directory / self.dense
        with open_file(path, directory) as file:
            content = file.read()
        if zlib.crc32(content) != self.dense_crc32:
            raise CheckpointError(f"{path}: damaged: its checksum differs")
        return content

    def write(self, directory: Path) -> None:
        """Makes it the current one."""
        write_whole(directory / CURRENT, seal(asdict(self)).decode())

    @classmethod
    def read(cls, directory: Path) -> Followed | None:
        """The current version; None where there is none yet.

        Raises:
            CheckpointError: damaged, or of another format.
        """
        path, fix = directory / CURRENT, f"delete {directory} to begin again"
        try:
            content = read_sealed(path, _FORMAT, fix)
        except MissingFileError:
            return None
        with refusing(path, fix):
            found: Followed = build(cls, content, "")
            for name in found.files:
                check_inside(name)
            found.groups()
        return found


def check_version(version: VersionFacts, where: str) -> tuple[Group, ...]:
    """The groups in which rows of a version are served, if all that it says of its model can be used.

    Raises:
        CheckpointError: schema, needs, recipe or normalization cannot be used.
    """
    with refusing(where, "publish again", fault="its schema, needs, recipe or normalization cannot be used"):
        schema = Schema.from_dict(version.schema, "schema")
        if schema.fingerprint() != version.fingerprint:
            raise ValueError(f"fingerprint {version.fingerprint} of a schema that has {schema.fingerprint()}")
        check_recipe(version.recipe)
        if version.normalization is not None:
            NormalizationStats.from_dict(version.normalization, schema)
        seed = train_options(version.recipe["train"]).seed
        return served_groups(schema, check_needs(version.needs, schema, "its needs"), seed)


GROWTH = 2
"""A file of a stack knows more than so many times the keys of all newer ones together; so thirteen files are enough for a million segments."""


def write_rows(path: Path, group: Group, segments: Sequence[Sequence[SegmentPart]]) -> RowsFile:
    """Writes what some segments say of a group's tables as one file.

    Args:
        segments: the parts of each, the newest segment first.

    Raises:
        CheckpointError: parts of other tables or columns. StorageFullError: the disk is full.
    """
    own = [[part for part in parts if concerns(part, group.spec)] for parts in segments]
    most_rows = sum(part.num_rows for parts in own for part in parts)
    most_left = sum(len(part.left[0]) for parts in own for part in parts)
    with MappedWriter(path, group.spec, most_rows + most_left, most_rows, durable=False) as writer:
        for parts in own:
            for part in parts:
                for ids, tables, rows in _rows_in(part, group.spec):
                    writer.add(ids, tables, rows)
            for part in parts:
                ids, tables = _left_in(part, group.spec)
                writer.bury(ids, tables)
        return RowsFile.of(path.name, writer.finish())


def most_to_merge(files: Sequence[RowsFile]) -> int:
    """Counts the newest files of a stack that are to be one; 0 for none."""
    keys, found = 0, 0
    for number, file in enumerate(files):
        if number and keys * GROWTH >= file.keys:
            found = number + 1
        keys += file.keys
    return found


class Merging:
    """Files that are merged in the background, those of one group at a time.

    Attributes:
        name: of the file that they become; None while nothing is being merged.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "girih-merge")
        self._under_way: tuple[int, tuple[RowsFile, ...], Future[RowsFile]] | None = None
        self.name: str | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being merged."""
        return self._under_way is None

    def begin(
        self, path: Path, spec: GroupSpec, number: int, files: Sequence[RowsFile], *, whole: bool
    ) -> None:
        """Begins to merge the newest files of a group's stack.

        Args:
            number: of the group. whole: whether these are all files of the stack.
        """
        mapped = [MappedFile(path.parent / file.name) for file in files]

        def work() -> RowsFile:
            return RowsFile.of(path.name, merge(path, spec, mapped, keep_buried=not whole, durable=False))

        self.name = path.name
        self._under_way = number, tuple(files), self._worker.submit(work)

    def result(self) -> tuple[int, tuple[RowsFile, ...], RowsFile] | None:
        """The group, the files that were merged, and the one that they are now; None while there is nothing new.

        Raises:
            StorageFullError: the disk is full; the files are as they were.
        """
        if self._under_way is None or not self._under_way[2].done():
            return None
        number, files, future = self._under_way
        self._under_way = self.name = None
        return number, files, future.result()

    def close(self) -> None:
        """Waits for what is under way."""
        self._worker.shutdown()


def replaced(files: Sequence[RowsFile], merged: Sequence[RowsFile], by: RowsFile) -> list[RowsFile] | None:
    """The files of a stack with one in place of those that it was merged of; None where they are not there any more."""
    size = len(merged)
    for start in range(len(files) - size + 1):
        if tuple(files[start : start + size]) == tuple(merged):
            return [*files[:start], by, *files[start + size :]]
    return None


def concerns(part: SegmentPart, spec: GroupSpec) -> bool:
    """Whether a part holds rows of a group's tables.

    Raises:
        CheckpointError: it does, with other columns.
    """
    own = {table.name for table in spec.tables}
    if own.isdisjoint(part.tables):
        return False
    expected = [(segment.name, segment.dim) for segment in spec.segments]
    if part.segments != expected:
        raise CheckpointError(
            f"rows of tables {part.tables} have columns {part.segments}, expected {expected}"
        )
    return True


def _numbers(part: SegmentPart, spec: GroupSpec) -> Ints:
    """This group's number of each of the part's tables, -1 for others."""
    own = {table.name: number for number, table in enumerate(spec.tables)}
    return np.array([own.get(name, -1) for name in part.tables], np.int32)


def _rows_in(part: SegmentPart, spec: GroupSpec) -> Iterator[tuple[Longs, Ints, Floats]]:
    numbers = _numbers(part, spec)
    for ids, theirs, rows in part.chunks():
        tables = numbers[theirs]
        here = tables >= 0
        yield (ids, tables, rows) if here.all() else (ids[here], tables[here], rows[here])


def _left_in(part: SegmentPart, spec: GroupSpec) -> tuple[Longs, Ints]:
    tables = _numbers(part, spec)[part.left[1]]
    return part.left[0][tables >= 0], tables[tables >= 0]
