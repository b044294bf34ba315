"""Arrow data: tables in memory, and pyarrow datasets.

A unit of a table is a slice. A unit of a dataset is a row group or a file. Any other Arrow C stream allows one pass,
and training needs several. So girih reads the stream once, and keeps it as a table. pandas and Polars share their own
buffers, so this makes no copy.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from girih.data.decode.columns import without_views
from girih.data.from_memory import REFUSED, table_of_stream
from girih.data.paths import DataFile, one_line
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.data.unit import Source, Unit
from girih.errors import ConfigError, DataError
from girih.files.sealed import digest
from girih.kernels.cpu.arrays import I64

if TYPE_CHECKING:
    import pyarrow.dataset as pads

PART_ROWS = 1 << 20
"""Rows of a unit, the same number as in pyarrow's row groups of Parquet."""
LOADED_BYTES = 256 << 20
"""Size of the largest table that girih sends to a loader, which is another process."""
_SAMPLED_ROWS = 16
_TABLE = "the Arrow table"


def arrow_source(data: object) -> Source:
    """Returns the source of any object that holds Arrow data; see :func:`girih.read_arrow`.

    Raises:
        ConfigError: an object without Arrow data, or one that cannot be read twice.
        DataError: no rows.
    """
    import pyarrow.dataset as pads  # imports pandas if it is installed

    if isinstance(data, pads.Dataset) and not isinstance(data, pads.InMemoryDataset):
        return FragmentSource(data)
    return TableSource(_table_of(data))


class TableSource(Source):
    """A ``pyarrow.Table`` in memory, in parts of :data:`PART_ROWS`.

    Args:
        where: name of the table in errors.

    Raises:
        DataError: no rows.
    """

    def __init__(self, table: pa.Table, where: str = _TABLE) -> None:
        if not table.num_rows:
            raise DataError(f"{where}: no rows; expected at least one")
        self._table, self._where = table.replace_schema_metadata(None), where
        self.files = (DataFile(None, "", where, _num_bytes(table)),)
        self.num_rows = table.num_rows
        self.num_parts = -(-table.num_rows // PART_ROWS)
        self.identity = f"arrow/{table.num_rows}/{PART_ROWS}/{_digest(self._table)}"

    def check(self, plan: ReadPlan) -> None:
        """Refuses a table that lacks a column, or has a column of an unusable type."""
        plan.check_names(self._table.column_names, self._where)
        plan.check_types({name: self._table.schema.field(name).type for name in plan.columns}, self._where)

    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields slices of the table in the given order, from ``start.part`` on. Copies nothing."""
        columns = self._table.select(list(plan.columns))
        for part in range(start.part, len(order)):
            first = int(order[part]) * PART_ROWS
            rows = _decoded(columns.slice(first, PART_ROWS))
            numbers = range(first + 1, first + rows.num_rows + 1)
            yield Unit(rows, self._where, Cursor(part + 1), numbers)

    def __reduce__(self) -> tuple[Callable[[bytes], TableSource], tuple[bytes]]:
        """Sends a small table to another process as an Arrow stream. Refuses a large table."""
        if _num_bytes(self._table) > LOADED_BYTES:
            raise ConfigError(
                f"read_arrow: a table of {_num_bytes(self._table) >> 20:,} MiB cannot go to a loader, which is another process and takes"
                f" at most {LOADED_BYTES >> 20} MiB; give a pyarrow dataset or read_parquet, or use a strategy without loaders"
            )
        stream = io.BytesIO()
        with pa.ipc.new_stream(stream, self._table.schema) as writer:
            writer.write_table(self._table)
        return _from_stream, (stream.getvalue(),)


def _num_bytes(table: pa.Table) -> int:
    try:
        return int(table.nbytes)
    except pa.ArrowTypeError:  # string views before pyarrow 24: a slice counts the buffers of all rows
        return int(table.get_total_buffer_size())


class FragmentSource(Source):
    """A pyarrow dataset of files. Row groups of Parquet are read one by one, and other files whole.

    Raises:
        ConfigError: the dataset is filtered.
        DataError: there are no rows, or a file cannot be read.
    """

    def __init__(self, data: pads.Dataset) -> None:
        self._schema = data.schema
        try:
            files = list(data.get_fragments())
        except ValueError as error:
            raise ConfigError(
                f"read_arrow: {one_line(error).rstrip('.')}; give the whole dataset, or read_arrow(data.to_table(), ...)"
            ) from None
        self._fragments: list[tuple[pads.Fragment, int]] = []  # with the number of its first row in its file
        counts: list[int] = []
        for file in files:
            first = 0
            for fragment in _row_groups(file):
                num_rows = _num_rows(fragment)
                if num_rows != 0:
                    self._fragments.append((fragment, first))
                    counts.append(-1 if num_rows is None else num_rows)
                first += num_rows or 0
        self.files = tuple(DataFile(None, _path(file), _path(file), 0) for file in files)
        if not self._fragments:
            where = self.files[0].address if self.files else "the pyarrow dataset"
            raise DataError(f"{where}: no rows; expected at least one")
        self.num_parts = len(self._fragments)
        self.num_rows = None if -1 in counts else sum(counts)
        paths = [
            _path(fragment) if count < 0 else count
            for (fragment, _), count in zip(self._fragments, counts, strict=True)
        ]
        self.identity = "arrow-dataset/" + digest(repr(paths))

    def check(self, plan: ReadPlan) -> None:
        """Refuses a dataset that lacks a column, or has a column of an unusable type."""
        where = "the pyarrow dataset"
        plan.check_names(self._schema.names, where)
        plan.check_types({name: self._schema.field(name).type for name in plan.columns}, where)

    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields the fragments in the given order, from ``start.part`` on."""
        for part in range(start.part, len(order)):
            fragment, first = self._fragments[order[part]]
            path = _path(fragment)
            try:
                rows = fragment.to_table(schema=self._schema, columns=list(plan.columns))
            except (OSError, *REFUSED) as error:
                raise DataError(f"{path}: cannot be read: {one_line(error)}") from None
            rows = _decoded(rows.replace_schema_metadata(None))
            yield Unit(rows, path, Cursor(part + 1), range(first + 1, first + rows.num_rows + 1))


def _table_of(data: object) -> pa.Table:
    """Returns the rows of a container or a stream as one table."""
    import pyarrow.dataset as pads

    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, pads.InMemoryDataset):
            return data.to_table()
        if isinstance(data, pa.RecordBatchReader):
            return data.read_all()
        if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
            return table_of_stream(data)
        if isinstance(data, Sequence) and data and all(hasattr(each, "schema") for each in data):
            return pa.concat_tables(pa.table(each) for each in data)
        if (
            hasattr(type(data), "with_format")
            and hasattr(type(data), "__len__")
            and not isinstance(data, Mapping)
        ):
            rows: Any = data  # Hugging Face; without a selection, these rows are the table that it maps
            return rows.with_format("arrow")[:]
    except REFUSED as error:
        raise ConfigError(f"data: {_name(data)} is not a table of columns: {one_line(error)}") from None
    raise ConfigError(
        f"data: {_name(data)}: expected columns of Arrow data: a pyarrow table, record batches, a reader of them or a dataset,"
        f" a pandas or Polars DataFrame, a DuckDB relation, a Hugging Face dataset{_mend(data)}"
    )


def _name(data: object) -> str:
    kind = type(data)
    return (
        kind.__name__
        if kind.__module__ == "builtins"
        else f"{kind.__module__.partition('.')[0]} {kind.__name__}"
    )


def _mend(data: object) -> str:
    if isinstance(data, str):
        return "; for files, use read_parquet or another reader"
    if isinstance(data, Mapping) and any(
        isinstance(each, list | tuple | np.ndarray) for each in data.values()
    ):
        return "; pyarrow.table(data) makes a table from a dict of columns"
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return "; pyarrow.Table.from_pylist(data) makes a table from a list of rows"
    if isinstance(data, Mapping):
        return f"; take one of its parts, as data[{next(iter(data), 'train')!r}]"
    if hasattr(data, "collect"):
        return "; collect() it"
    if hasattr(type(data), "with_format"):
        return "; a streamed dataset cannot be read again: load it without streaming"
    if isinstance(data, Iterator):
        return "; training reads data several times, and an iterator allows one pass"
    return ""


def _digest(table: pa.Table) -> str:
    """Returns a digest of all names and some rows.

    If rows change their order, the digest almost certainly changes too.
    """
    places = sorted({place * (table.num_rows - 1) // (_SAMPLED_ROWS - 1) for place in range(_SAMPLED_ROWS)})
    rows = [table.slice(place, 1).to_pylist() for place in places]
    return digest(repr([table.column_names, rows]))


def _decoded(rows: pa.Table) -> pa.Table:
    """Decodes dictionaries that are larger than their columns, such as slices of a table with categories."""
    for place, column in enumerate(rows.columns):
        if pa.types.is_dictionary(column.type) and (
            column.num_chunks > 1 or (column.num_chunks and len(column.chunk(0).dictionary) > len(column))
        ):
            plain = pa.chunked_array([without_views(chunk).dictionary_decode() for chunk in column.chunks])
            rows = rows.set_column(place, rows.column_names[place], plain)
    return rows


def _row_groups(file: pads.Fragment) -> list[pads.Fragment]:
    import pyarrow.dataset as pads

    if not isinstance(file, pads.ParquetFileFragment):
        return [file]
    try:
        return list(file.split_by_row_group())
    except (OSError, *REFUSED) as error:
        raise DataError(f"{_path(file)}: not a readable Parquet file: {one_line(error)}") from None


def _num_rows(fragment: pads.Fragment) -> int | None:
    """Returns the number of rows of a row group. Returns None for other files, whose rows are not counted."""
    import pyarrow.dataset as pads

    if not isinstance(fragment, pads.ParquetFileFragment):
        return None
    return int(sum(group.num_rows for group in fragment.row_groups))


def _path(fragment: pads.Fragment) -> str:
    return str(getattr(fragment, "path", "the pyarrow dataset"))


def _from_stream(content: bytes) -> TableSource:
    return TableSource(pa.ipc.open_stream(content).read_all())
