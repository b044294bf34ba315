"""A file of rows for mapping: a safetensors file whose tensors all begin at a cache line.

    index: I64 [C, 2]   open addressing; two words a slot: an id, and table << 40 | row + 1, or 0 if the slot is free
                        (``girih.kernels.cpu.mapped``); the row of a buried key is 2⁴⁰ - 2
    rows:  F32 [n, W]   the columns that predictions read, one after the other: embedding, first-order weight

Table numbers are the numbers of the group. The header's ``girih`` is JSON: ``version``, ``group``, ``tables`` (names
by number), ``segments`` (``[[name, dim], …]``, whose dims sum to W), ``num_buried``. The file does not contain
checksums. The object that refers to the file keeps them.

Shapes: C slots, a multiple of 256; n rows, W columns of a row, K rows of a chunk.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError
from girih.files.sealed import open_file, refusing
from girih.kernels.cpu import mapped
from girih.kernels.cpu.arrays import sealed
from girih.store.keys import Keys
from girih.store.rows.record import row_layout
from girih.store.snapshot.tensorfile import Described, TensorFile, any_nan
from girih.store.spec import Bools, Floats, GroupSpec, Ints, Longs

KIND = "girih mapped rows"
VERSION = 1
INDEX, ROWS = "index", "rows"
_PIECE = 64 << 20
_SLOTS_AT_ONCE = 1 << 18
_FIX = "export the model again"


@dataclass(frozen=True, slots=True)
class MappedFileFacts:
    """Facts that identify a file, as plain values for JSON.

    Attributes:
        bytes: the size of the file. crc32: the checksum of the whole file. rows, buried: the number of keys with and
            without a row.
    """

    bytes: int
    crc32: int
    rows: int
    buried: int

    def to_dict(self) -> dict[str, int]:
        """Returns the facts for JSON. ``MappedFileFacts(**facts)`` is the inverse."""
        return asdict(self)


def description_of(spec: GroupSpec, num_buried: int) -> dict[str, object]:
    """Returns the description that a file contains and a reader expects."""
    return {
        "version": VERSION,
        "group": spec.name,
        "tables": [table.name for table in spec.tables],
        "segments": [[segment.name, segment.dim] for segment in spec.segments],
        "num_buried": num_buried,
    }


class MappedFile:
    """An immutable, mapped file of rows. Processes that map the same file share its memory.

    Args:
        path: a file of :class:`~girih.store.mapped.writer.MappedWriter`. It may be deleted while this object lives.
        facts: the size and checksum that the file must have. This check reads the whole file. None skips the check,
            for example if another process of the machine has just checked the file. The format is checked in any case,
            but the index entries are not.

    Attributes:
        path: the file. index: int64[C, 2], read-only. rows: float32[n, W], read-only. description: see the module.

    Raises:
        MissingFileError: the file does not exist. CheckpointError: the file is damaged, or is not a file of this kind.
    """

    def __init__(
        self, path: str | os.PathLike[str], facts: MappedFileFacts | Mapping[str, int] | None = None
    ) -> None:
        self.path = Path(path)
        with open_file(self.path, self.path.parent, "export the model again") as file:
            tensors = TensorFile(file, str(path))
        with refusing(self.path, _FIX):
            described = Described.of(tensors.header, KIND, VERSION)
        self.description = asdict(described) | {"segments": [list(segment) for segment in described.segments]}
        self.index, self.rows = (self._tensor(tensors, name) for name in (INDEX, ROWS))
        width = sum(dim for _, dim in self.description["segments"])
        if self.index.shape[1:] != (2,) or len(self.index) % mapped.BLOCK or not len(self.index):
            raise self._damaged(
                f"an index of {list(self.index.shape)}, expected [C, 2], C a multiple of {mapped.BLOCK}"
            )
        if self.rows.shape[1:] != (width,):
            raise self._damaged(f"rows of {list(self.rows.shape)}, expected [n, {width}]")
        if facts is not None:
            with refusing(self.path, _FIX):
                self._verify(
                    tensors.memory, facts if isinstance(facts, MappedFileFacts) else MappedFileFacts(**facts)
                )

    @property
    def num_rows(self) -> int:
        """The number of keys with a row, n."""
        return len(self.rows)

    @property
    def num_buried(self) -> int:
        """The number of keys that have no row any more."""
        return int(self.description["num_buried"])

    def expect(self, spec: GroupSpec) -> None:
        """Checks that the file has the tables and columns of an embedding group.

        Raises:
            CheckpointError: a table or a column differs. The message names the difference.
        """
        expected = description_of(spec, self.num_buried)
        for field, value in expected.items():
            if field != "group" and self.description[field] != value:
                raise CheckpointError(
                    f"{self.path}: its {field} are {self.description[field]}, the model's are {value}; export the model again"
                )

    def chunks(self) -> Iterator[tuple[Longs, Ints, Floats]]:
        """Yields all keys with rows in the order of slots, some keys at a time.

        Each item has ids int64[K], tables int32[K] and rows float32[K, W].
        """
        for ids, tables, rows in self._keys():
            kept = rows != mapped.BURIED
            yield ids[kept], tables[kept], self.rows[rows[kept]]

    def buried(self) -> Iterator[tuple[Longs, Ints]]:
        """Yields all buried keys, some keys at a time: ids int64[K], tables int32[K]."""
        for ids, tables, rows in self._keys():
            buried = rows == mapped.BURIED
            yield ids[buried], tables[buried]

    def _keys(self) -> Iterator[tuple[Longs, Ints, Longs]]:
        for start in range(0, len(self.index), _SLOTS_AT_ONCE):
            slots = self.index[start : start + _SLOTS_AT_ONCE]
            slots = slots[slots[:, 1] != 0]
            tables = (slots[:, 1] >> mapped.ROW_BITS).astype(np.int32)
            yield slots[:, 0], tables, (slots[:, 1] & mapped.ROW_MASK) - 1

    def _verify(self, memory: mmap.mmap, facts: MappedFileFacts) -> None:
        if len(memory) != facts.bytes:
            raise self._damaged(f"{len(memory):,} bytes, expected {facts.bytes:,}")
        checksum = 0
        with memoryview(memory) as data:
            for start in range(0, len(data), _PIECE):
                checksum = zlib.crc32(data[start : start + _PIECE], checksum)
        if checksum != facts.crc32:
            raise self._damaged(f"its checksum is {checksum}, expected {facts.crc32}")
        if (self.num_rows, self.num_buried) != (facts.rows, facts.buried):
            raise self._damaged(
                f"{self.num_rows} rows and {self.num_buried} buried keys, expected {facts.rows} and {facts.buried}"
            )
        unsound = mapped.first_unsound(
            sealed(self.index), self.num_rows, self.num_buried, len(self.description["tables"])
        )
        if unsound >= 0:
            raise self._damaged(f"its index is wrong at slot {unsound:,}: no such row, or a duplicate key")
        if any_nan(self.rows, "F32"):
            raise self._damaged("a row holds NaN")

    def _tensor(self, tensors: TensorFile, name: str) -> NDArray[Any]:
        expected = {INDEX: "I64", ROWS: "F32"}[name]
        for tensor in tensors.header.tensors:
            if tensor.name == name and tensor.dtype == expected and len(tensor.shape) == 2:
                return sealed(tensors.arrays[name])
        raise self._damaged(f"no tensor {name!r} of {expected}[·, ·]; it has {sorted(tensors.arrays)}")

    def _damaged(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged: {fault}; export the model again")


_TOGETHER = 512  # ids that are processed together, so that their rows stay in L2


class Stack:
    """Mapped files of one group, newest first.

    A lookup searches the files in this order and stops at the first file that has the key, with a row or buried. A key
    that no file has, or that is buried, has its initial value, the same as in the store. A stack never changes, and
    any number of threads may read it. ``Stack(spec, [newer, *stack.files])`` returns another stack with a file on top.

    Args:
        spec: the group: its tables, segments, initializers, dtype and seed.

    Attributes:
        files: the files, newest first. shard, num_shards: always 0 and 1. Embedding groups read these attributes.

    Raises:
        CheckpointError: a file has other tables or columns.
    """

    shard, num_shards = 0, 1

    def __init__(self, spec: GroupSpec, files: Sequence[MappedFile]) -> None:
        for file in files:
            file.expect(spec)
        self.spec, self.files = spec, tuple(files)
        self._described = described(self.files)
        self._layout = row_layout(spec, 0, 1).kernel

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows, or initial values for keys without a row, like :meth:`girih.store.Store.peek`.

        Does not check its arguments.

        Args:
            keys: contiguous arrays.
            out: float32[U, W], output: initial values, and without ``addresses`` also rows.
            addresses: int64[U], output: the address of each key's float32[W], in a file or in ``out``.

        Returns:
            int32[U]: the number of the file that has the row, -1 for an unknown key, -2 for a buried key.
        """
        size = len(keys.ids)
        file_of_key = np.empty(size, np.int32)
        mapped.read_stack(
            self._described, self._layout, keys.ids, keys.tables, np.empty(size, np.uint64), np.empty(self.spec.dim, np.uint16),
            addresses is not None, file_of_key, out, np.empty(size, np.int64) if addresses is None else addresses,
        )  # fmt: skip
        return file_of_key

    def copy_each(
        self,
        ids: Longs,
        features: Longs,
        tables: Ints,
        places: Longs,
        out: Floats,
        tail: Floats | None,
    ) -> None:
        """Copies the first columns of the rows of some features, for features with one id per example.

        The result is the same as from :meth:`peek` of the unique keys. This method is faster if few ids are equal.

        Args:
            ids: int64[F·B], feature by feature.
            features, tables, places: int64[P], int32[P], int64[P], contiguous: the features, the table of each, and
                its position in ``out``.
            out: float32[B, P, D], output. tail: float32[B, P, E], output: the remaining columns, or None to skip them.
        """
        size, width = max(_TOGETHER, len(features)), self.spec.dim
        mapped.copy_each(
            self._described, self._layout, sealed(ids), len(out), features, tables, places, np.empty(size, np.uint64),
            np.empty(width, np.uint16), np.empty((size, width), np.float32), np.empty(size, np.int64), out.ctypes.data,
            out.shape[2], 0 if tail is None else tail.ctypes.data, 0 if tail is None else tail.shape[2],
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes. Processes that map them share this memory."""
        return sum(file.index.nbytes + file.rows.nbytes for file in self.files)


def described(files: Sequence[MappedFile]) -> Longs:
    """Returns the files as an argument of kernels, int64[S, 3]. The files must live as long as the result is used."""
    columns = [[file.index.ctypes.data, len(file.index), file.rows.ctypes.data] for file in files]
    return np.array(columns, np.int64).reshape(len(files), mapped.FILE_COLUMNS)


def unknown(files: Longs, ids: Longs, tables: Ints) -> Bools:
    """Returns for each key, int64[K] and int32[K], whether no file has the key, bool[K]."""
    flags = np.ones(len(ids), np.uint8)
    mapped.find_unknown(files, sealed(np.ascontiguousarray(ids)), sealed(np.ascontiguousarray(tables)), flags)
    return flags.view(np.bool_)
