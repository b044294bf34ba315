"""Parquet files. A unit is a row group, and only the needed columns are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from girih.data.decode.columns import is_string, kind_of
from girih.data.formats.text import look_at
from girih.data.paths import DataFile, Partitions, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import Source, Unit
from girih.errors import DataError, UserError
from girih.files.sealed import digest
from girih.kernels.cpu.arrays import I64

OPEN_FILES = 16
DICTIONARY_BYTES = 8.0  # with fewer bytes per value, values repeat often enough to keep the dictionary


class _RowGroup(NamedTuple):
    file: int
    group: int
    first_row: int
    num_rows: int


class ParquetSource(Source):
    """The row groups of Parquet files. The constructor reads all footers.

    Raises:
        DataError: not Parquet, damaged, without rows, or files that disagree on a column.
    """

    def __init__(self, files: tuple[DataFile, ...]) -> None:
        self.files = files
        self.partitions = Partitions(files)
        self._footers: list[pq.FileMetaData] = []
        self._schemas: list[pa.Schema] = []
        self._groups: list[_RowGroup] = []
        for number, file in enumerate(files):
            footer = _footer(file)
            with _prefix_errors(f"{file.address}: its schema is not readable"):
                self._schemas.append(footer.schema.to_arrow_schema())
            self._footers.append(footer)
            first = 0
            for group in range(footer.num_row_groups):
                num_rows = footer.row_group(group).num_rows
                if num_rows:
                    self._groups.append(_RowGroup(number, group, first, num_rows))
                first += num_rows
        if not self._groups:
            where = "the file" if len(files) == 1 else f"all {len(files)} files"
            raise DataError(f"{files[0].address}: no rows in {where}; expected at least one")
        self.num_parts = len(self._groups)
        self.num_rows = sum(group.num_rows for group in self._groups)
        counts = ",".join(f"{group.file}:{group.num_rows}" for group in self._groups)
        self.identity = "parquet/" + digest(counts)

    @property
    def column_names(self) -> list[str]:
        """The columns of the first file."""
        return list(self._schemas[0].names)

    def check(self, plan: ReadPlan) -> None:
        """Refuses files that lack a column, have a column of an unusable type, or disagree on a type."""
        kinds: dict[str, tuple[str, str]] = {}
        names, earlier = plan.columns, None
        for number, (file, schema) in enumerate(zip(self.files, self._schemas, strict=True)):
            added = self.partitions.names(number, schema.names)
            if earlier is not None and schema.equals(earlier[0]) and added == earlier[1]:
                continue
            earlier = schema, added
            plan.check_names([*schema.names, *added], file.address)
            own = {name: self.partitions.types[name] for name in added}
            own |= dict(zip(schema.names, schema.types, strict=True))
            types = {name: own[name] for name in names}
            plan.check_types(types, file.address)
            for name in names:
                kind = str(types[name]) if name in plan.keep else kind_of(types[name])
                if kind == "nulls":
                    continue
                first, where = kinds.setdefault(name, (kind, file.address))
                if kind != first:
                    raise DataError(
                        f"{file.address}: column {name!r} has {kind}, but {first} in {where}; cast one"
                    )

    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields the row groups in the given order, from ``start.part`` on."""
        names = list(plan.columns)
        with closing(
            _Readers(self.files, self._footers, self._schemas, plan)
        ) as readers:  # the readers of this pass only
            for part in range(start.part, len(order)):
                group = self._groups[order[part]]
                file = self.files[group.file]
                with _prefix_errors(f"{file.address}: row group {group.group + 1} cannot be read"):
                    table = readers.of(group).read_row_group(group.group, columns=names)
                table = self.partitions.added(table, group.file, names)
                suffix = f" (row group {group.group + 1})"
                numbers = range(group.first_row + 1, group.first_row + group.num_rows + 1)
                yield Unit(table, file.address, Cursor(part + 1), numbers, suffix)


class _Readers:
    """Arrow's readers of some files. Closes the least recently used reader if too many are open.

    Args:
        footers, schemas: one per file.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        footers: Sequence[pq.FileMetaData],
        schemas: Sequence[pa.Schema],
        plan: ReadPlan,
    ) -> None:
        self._files, self._footers, self._schemas = files, footers, schemas
        self._wanted = {f.source for f in plan.schema.sparse if not f.is_split} - set(plan.keep)
        self._strings: dict[int, list[tuple[int, str]]] = {}
        self._opened: OrderedDict[tuple[int, tuple[str, ...]], pq.ParquetFile] = OrderedDict()

    def of(self, group: _RowGroup) -> pq.ParquetFile:
        """Returns the reader of a row group's file."""
        key = (group.file, self._dictionaries(group))
        if key not in self._opened:
            while len(self._opened) >= OPEN_FILES:
                self._opened.popitem(last=False)[1].close(force=True)
            self._opened[key] = pq.ParquetFile(
                self._files[group.file].open(in_arrow=True),
                metadata=self._footers[group.file],
                read_dictionary=list(key[1]),
                pre_buffer=True,
            )
        self._opened.move_to_end(key)
        return self._opened[key]

    def close(self) -> None:
        """Closes all readers."""
        for reader in self._opened.values():
            reader.close(force=True)

    def _dictionaries(self, group: _RowGroup) -> tuple[str, ...]:
        """Returns the string columns to read as dictionaries: few distinct values, each hashed once."""
        if group.file not in self._strings:
            self._strings[group.file] = self._strings_of(group.file)
        footer = self._footers[group.file].row_group(group.group)
        chunks = ((name, footer.column(number)) for number, name in self._strings[group.file])
        return tuple(
            name
            for name, chunk in chunks
            if chunk.has_dictionary_page
            and chunk.total_uncompressed_size < DICTIONARY_BYTES * chunk.num_values
        )

    def _strings_of(self, file: int) -> list[tuple[int, str]]:
        """Returns the number and the name of each string column that a file holds for a feature."""
        schema, leaves = self._schemas[file], self._footers[file].schema
        names = self._wanted.intersection(
            name for name, kind in zip(schema.names, schema.types, strict=True) if is_string(kind)
        )
        paths = (leaves.column(number).path for number in range(len(leaves) if names else 0))
        return [(number, path) for number, path in enumerate(paths) if path in names]


def _footer(file: DataFile) -> pq.FileMetaData:
    if file.size == 0:
        raise DataError(f"{file.address}: the file is empty; expected Parquet")
    told = f"{file.address}: not a readable Parquet file"
    with _prefix_errors(told), file.open() as opened:
        try:
            return pq.read_metadata(opened)
        except pa.ArrowInvalid:
            look = look_at(file)
            if look is None or look.name == "Parquet":
                raise
            raise DataError(f"{told}: it looks like {look.name}; {look.mend}") from None


@contextmanager
def _prefix_errors(context: str) -> Iterator[None]:
    """Turns errors of Arrow into a DataError that begins with ``context``."""
    try:
        yield
    except UserError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{context}: {one_line(error)}") from None
