"""Rows of segments into mapped files: those of one segment or of several, and files merged so that a stack stays short.

Shapes: K keys of a chunk, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from girih.errors import CheckpointError
from girih.publishing.part import SegmentPart
from girih.serving.followed import RowsFile
from girih.sparse.groups.pack import Group
from girih.store.mapped import MappedFile, MappedWriter, merge
from girih.store.spec import Floats, GroupSpec, Ints, Longs

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
