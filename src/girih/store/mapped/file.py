"""A file of rows to be mapped: a safetensors file, of which every tensor begins with a cache line.

    index: I64 [C, 2]   open addressing; two words a slot: an id, and table << 40 | row + 1, 0 where the slot is free
                        (``girih.kernels.cpu.mapped``); the row of a buried key is 2⁴⁰ - 2
    rows:  F32 [n, W]   the columns that predictions read, one after the other: embedding, first-order weight

Table numbers are those of the group. The header's ``girih`` is JSON: ``version``, ``group``, ``tables`` (names by number), ``segments``
(``[[name, dim], …]``, whose dims sum to W), ``num_buried``. Checksums are not in the file but with whoever refers to it.

Shapes: C slots, a multiple of 256; n rows, W columns of a row, K rows of a chunk.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from girih.errors import CheckpointError
from girih.kernels.cpu import mapped
from girih.kernels.cpu.arrays import sealed
from girih.runs.sealed import open_file, refusing
from girih.store.arrays import Floats, Ints, Longs
from girih.store.snapshot.tensorfile import Described, TensorFile, any_nan
from girih.store.spec import GroupSpec

KIND = "girih mapped rows"
VERSION = 1
INDEX, ROWS = "index", "rows"
_PIECE = 64 << 20
_SLOTS_AT_ONCE = 1 << 18
_FIX = "export the model again"


@dataclass(frozen=True, slots=True)
class MappedFileFacts:
    """The facts by which a file is known again, as plain values for JSON.

    Attributes:
        bytes: its size. crc32: of all of it. rows, buried: keys with a row, and without one.
    """

    bytes: int
    crc32: int
    rows: int
    buried: int

    def to_dict(self) -> dict[str, int]:
        """For JSON; ``Written(**facts)`` is the inverse."""
        return asdict(self)


def description_of(spec: GroupSpec, num_buried: int) -> dict[str, Any]:
    """The description that a file has of itself, and a reader expects."""
    return {
        "version": VERSION,
        "group": spec.name,
        "tables": [table.name for table in spec.tables],
        "segments": [[segment.name, segment.dim] for segment in spec.segments],
        "num_buried": num_buried,
    }


class MappedFile:
    """An immutable file of rows, mapped; processes that map the same file share its memory.

    Args:
        path: what :class:`~girih.store.mapped.writer.MappedWriter` wrote. It may be deleted while this lives.
        facts: its size and checksum, which are compared: that reads the whole file. None leaves both out, where another process
            of the machine has just done it; the form is checked, but an index that leads elsewhere is believed.

    Attributes:
        path: of the file. index: int64[C, 2]. rows: float32[n, W]; both read only. description: see the module.

    Raises:
        MissingFileError: it is gone. CheckpointError: damaged, or not such a file.
    """

    def __init__(
        self, path: str | os.PathLike[str], facts: MappedFileFacts | Mapping[str, int] | None = None
    ) -> None:
        self.path = Path(path)
        with open_file(self.path, self.path.parent, "export the model again") as file:
            found = TensorFile(file, str(path))
        with refusing(self.path, _FIX):
            described = Described.of(found.header, KIND, VERSION)
        self.description = asdict(described) | {"segments": [list(each) for each in described.segments]}
        self.index, self.rows = (self._tensor(found, name) for name in (INDEX, ROWS))
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
                    found.memory, facts if isinstance(facts, MappedFileFacts) else MappedFileFacts(**facts)
                )

    @property
    def num_rows(self) -> int:
        """Keys with a row, n."""
        return len(self.rows)

    @property
    def num_buried(self) -> int:
        """Keys that have no row any more."""
        return int(self.description["num_buried"])

    def expect(self, spec: GroupSpec) -> None:
        """Refuses rows of other tables or columns than a group's.

        Raises:
            CheckpointError: says what differs.
        """
        expected = description_of(spec, self.num_buried)
        for what, theirs in expected.items():
            if what != "group" and self.description[what] != theirs:
                raise CheckpointError(
                    f"{self.path}: its {what} are {self.description[what]}, the model's are {theirs}; export the model again"
                )

    def chunks(self) -> Iterator[tuple[Longs, Ints, Floats]]:
        """All keys with rows, some at a time: ids int64[K], tables int32[K], rows float32[K, W]; in the order of slots."""
        for ids, tables, rows in self._keys():
            own = rows != mapped.BURIED
            yield ids[own], tables[own], self.rows[rows[own]]

    def buried(self) -> Iterator[tuple[Longs, Ints]]:
        """All keys that have no row any more, some at a time: ids int64[K], tables int32[K]."""
        for ids, tables, rows in self._keys():
            own = rows == mapped.BURIED
            yield ids[own], tables[own]

    def _keys(self) -> Iterator[tuple[Longs, Ints, Longs]]:
        for start in range(0, len(self.index), _SLOTS_AT_ONCE):
            slots = self.index[start : start + _SLOTS_AT_ONCE]
            slots = slots[slots[:, 1] != 0]
            tables = (slots[:, 1] >> mapped.ROW_BITS).astype(np.int32)
            yield slots[:, 0], tables, (slots[:, 1] & mapped.ROW_MASK) - 1

    def _verify(self, memory: mmap.mmap, facts: MappedFileFacts) -> None:
        if len(memory) != facts.bytes:
            raise self._damaged(f"{len(memory):,} bytes, expected {facts.bytes:,}")
        found = 0
        with memoryview(memory) as data:
            for start in range(0, len(data), _PIECE):
                found = zlib.crc32(data[start : start + _PIECE], found)
        if found != facts.crc32:
            raise self._damaged(f"its checksum is {found}, expected {facts.crc32}")
        if (self.num_rows, self.num_buried) != (facts.rows, facts.buried):
            raise self._damaged(
                f"{self.num_rows} rows and {self.num_buried} buried keys, expected {facts.rows} and {facts.buried}"
            )
        unsound = mapped.first_unsound(
            sealed(self.index), self.num_rows, self.num_buried, len(self.description["tables"])
        )
        if unsound >= 0:
            raise self._damaged(f"slot {unsound:,} of its index leads nowhere, or its key is there twice")
        if any_nan(self.rows, "F32"):
            raise self._damaged("a row holds NaN")

    def _tensor(self, found: TensorFile, name: str) -> Any:
        expected = {INDEX: "I64", ROWS: "F32"}[name]
        for tensor in found.header.tensors:
            if tensor.name == name and tensor.dtype == expected and len(tensor.shape) == 2:
                return sealed(found.arrays[name])
        raise self._damaged(f"no tensor {name!r} of {expected}[·, ·]; it has {sorted(found.arrays)}")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged: {what}; export the model again")
