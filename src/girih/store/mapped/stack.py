"""A group's rows as a stack of mapped files; it stands where a store stands in reading.

Shapes: U unique keys, B examples, F features of a batch, P of them, W columns of a row, D and E of them, S files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from girih.kernels.cpu import mapped
from girih.kernels.cpu.arrays import sealed
from girih.store.arrays import Bools, Floats, Ints, Longs
from girih.store.mapped.file import MappedFile
from girih.store.rows.record import row_layout
from girih.store.spec import GroupSpec

_TOGETHER = 512  # ids that are on their way together: their rows stay in L2


class Stack:
    """Mapped files of one group, newest first: a key is looked up in each until one knows it, with a row or buried.

    A key that none knows, or that is buried, has its initial value, as the store would give it. It never changes, and any number
    of threads may read. A stack with another file on top is another object: ``Stack(spec, [newer, *stack.files])``.

    Args:
        spec: the group: its tables, segments, initializers, dtype and seed.

    Attributes:
        files: newest first. shard, num_shards: 0 of 1, as groups read them of a store.

    Raises:
        CheckpointError: a file of other tables or columns.
    """

    shard, num_shards = 0, 1

    def __init__(self, spec: GroupSpec, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.expect(spec)
        self.spec, self.files = spec, tuple(files)
        self._described = described(self.files)
        self._layout = row_layout(spec, 0, 1).kernel

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows, or initial values where there is none; as :meth:`girih.store.Store.peek`, but believes what it is given.

        Args:
            ids, tables: int64[U], int32[U], contiguous: the keys.
            out: float32[U, W], written: initial values; without ``addresses`` rows too.
            addresses: int64[U], written: where each key's float32[W] lie, in a file or in ``out``.

        Returns:
            int32[U]: the number of the file that has the row; -1 for a key that none knows, -2 for a buried one.
        """
        size = len(ids)
        found = np.empty(size, np.int32)
        mapped.read_stack(
            self._described, self._layout, ids, tables, np.empty(size, np.uint64), np.empty(self.spec.dim, np.uint16),
            addresses is not None, found, out, np.empty(size, np.int64) if addresses is None else addresses,
        )  # fmt: skip
        return found

    def copy_each(
        self,
        ids: Longs,
        features: Longs,
        tables: Ints,
        places: Longs,
        out: Floats,
        tail: Floats | None,
    ) -> None:
        """Copies the first columns of the row of every id of some features to its place, where each example has one id of a feature.

        That is what :meth:`peek` of unique keys leads to, and faster where few ids are alike.

        Args:
            ids: int64[F·B], feature by feature.
            features, tables, places: int64[P], int32[P], int64[P], contiguous: which features, the table of each, and its place in ``out``.
            out: float32[B, P, D], written. tail: float32[B, P, E], written: the columns behind; None leaves them out.
        """
        size, width = max(_TOGETHER, len(features)), self.spec.dim
        mapped.copy_each(
            self._described, self._layout, sealed(ids), len(out), features, tables, places, np.empty(size, np.uint64),
            np.empty(width, np.uint16), np.empty((size, width), np.float32), np.empty(size, np.int64), out.ctypes.data,
            out.shape[2], 0 if tail is None else tail.ctypes.data, 0 if tail is None else tail.shape[2],
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, which processes that map them share."""
        return sum(file.index.nbytes + file.rows.nbytes for file in self.files)


def described(files: Sequence[MappedFile]) -> Longs:
    """The files as kernels take them, int64[S, 3]; they must live as long as it is used."""
    columns = [[file.index.ctypes.data, len(file.index), file.rows.ctypes.data] for file in files]
    return np.array(columns, np.int64).reshape(len(files), mapped.FILE_COLUMNS)


def unknown(files: Longs, ids: Longs, tables: Ints) -> Bools:
    """Which keys, int64[K] and int32[K], none of these files knows, bool[K]."""
    found = np.ones(len(ids), np.uint8)
    mapped.find_unknown(files, sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), found)
    return found.view(np.bool_)
