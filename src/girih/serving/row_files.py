"""Files of rows that servers map. girih writes them from parts of checkpoints or segments, and merges them to keep
stacks short.

Shapes: K keys of a chunk, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError
from girih.serving.signature import RowsFile
from girih.sparse.groups.pack import Group
from girih.store.mapped import MappedFile, MappedWriter, merge
from girih.store.spec import Floats, GroupSpec, Ints, Longs

GROWTH = 2
"""A file of a stack has more than this many times the keys of all newer files together.

So 13 files are enough for a million segments.
"""


class RowsPart(Protocol):
    """A part of a checkpoint or a segment: rows of some shard.

    Attributes:
        where: its name in errors.
        tables: number of rows of each table, in the order of the tables' numbers.
        left: the keys that have no row any more.
    """

    where: str
    tables: Mapping[str, int]
    left: tuple[Longs, Ints]

    def chunks(self, spec: GroupSpec) -> Iterator[tuple[Longs, Ints, Floats]]:
        """Yields rows in chunks, with a group's columns: ids int64[K], part's tables int32[K], rows float32[K, W].

        Raises:
            CheckpointError: the part is damaged, or has other columns.
        """


def write_rows(
    path: Path, group: Group, sources: Sequence[Sequence[RowsPart]], *, durable: bool = False
) -> RowsFile:
    """Writes the rows of a group's tables, from some segments or a checkpoint, as one file.

    Args:
        sources: the parts of each segment, newest first.
        durable: if True, waits until the whole file is on the disk.

    Raises:
        CheckpointError: a part is damaged, or has other columns. StorageFullError: the disk is full.
    """
    spec = group.spec
    numbers = {table.name: number for number, table in enumerate(spec.tables)}
    known = [[part for part in parts if not numbers.keys().isdisjoint(part.tables)] for parts in sources]
    most_rows = sum(part.tables.get(name, 0) for parts in known for part in parts for name in numbers)
    most_left = sum(len(part.left[0]) for parts in known for part in parts)
    with MappedWriter(path, spec, most_rows + most_left, most_rows, durable=durable) as writer:
        for parts in known:
            left = []
            for part in parts:
                number_of = np.array([numbers.get(name, -1) for name in part.tables], np.int32)
                left.append(_of_group(number_of, *part.left))
                for ids, theirs, rows in part.chunks(spec):
                    taken = _of_group(number_of, ids, theirs, rows)
                    if writer.add(*taken) != len(taken[0]) and len(sources) == 1:
                        raise CheckpointError(
                            f"{part.where}: damaged: a key occurs twice; use another checkpoint"
                        )
            for keys in left:
                writer.bury(*keys)
        return RowsFile.written(path, writer.finish())


def most_to_merge(files: Sequence[RowsFile]) -> int:
    """Returns the number of newest files of a stack that should be merged into one; 0 for none."""
    keys, found = 0, 0
    for number, file in enumerate(files):
        if number and keys * GROWTH >= file.keys:
            found = number + 1
        keys += file.keys
    return found


class Merging:
    """Merges files in the background, for one group at a time.

    Attributes:
        name: the merged file's name; None while nothing is being merged.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "girih-merge")
        self._under_way: tuple[int, tuple[RowsFile, ...], Future[RowsFile]] | None = None
        self.name: str | None = None

    @property
    def is_idle(self) -> bool:
        """True if nothing is being merged."""
        return self._under_way is None

    def begin(
        self, path: Path, spec: GroupSpec, number: int, files: Sequence[RowsFile], *, whole: bool
    ) -> None:
        """Begins to merge the newest files of a group's stack.

        Args:
            number: the group's number. whole: True if these are all files of the stack.
        """
        mapped = [MappedFile(path.parent / file.name) for file in files]

        def work() -> RowsFile:
            return RowsFile.written(path, merge(path, spec, mapped, keep_buried=not whole, durable=False))

        self.name = path.name
        self._under_way = number, tuple(files), self._worker.submit(work)

    def result(self) -> tuple[int, tuple[RowsFile, ...], RowsFile] | None:
        """Returns the group, the old files, and the merged file.

        Returns None if no merge has finished since the last call.

        Raises:
            StorageFullError: the disk is full. The files have not changed.
        """
        if self._under_way is None or not self._under_way[2].done():
            return None
        number, files, future = self._under_way
        self._under_way = self.name = None
        return number, files, future.result()

    def close(self) -> None:
        """Waits for the merge in progress."""
        self._worker.shutdown()


def replaced(files: Sequence[RowsFile], merged: Sequence[RowsFile], by: RowsFile) -> list[RowsFile] | None:
    """Returns a stack's files with the merged file in place of the old files, or None if these are gone."""
    size = len(merged)
    for start in range(len(files) - size + 1):
        if tuple(files[start : start + size]) == tuple(merged):
            return [*files[:start], by, *files[start + size :]]
    return None


def _of_group(number_of: Ints, ids: Longs, theirs: Ints, *more: Floats) -> tuple[NDArray[Any], ...]:
    """Returns the keys of a group's tables, by the group's table numbers, and their values.

    Args:
        number_of: for each table of a part, its number in the group, or -1.
        theirs: the part's table numbers.
    """
    tables = number_of[theirs]
    arrays: tuple[NDArray[Any], ...] = (ids, tables, *more)
    kept = tables >= 0
    return arrays if kept.all() else tuple(array[kept] for array in arrays)
