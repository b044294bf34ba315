"""Columns that stand in the names of directories, as Hive writes them: ``year=2024/country=NL/part-0.parquet``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from girih.data.paths import DataFile

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")


class Partitions:
    """The partition columns of some files.

    Attributes:
        types: by column; int64 where each value spells an integer, else string.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._values = [partitions_in(file.path) for file in files]
        names = dict.fromkeys(name for values in self._values for name in values)
        self.types: dict[str, Any] = {name: self._type(name) for name in names}

    def names(self, file: int, own: Sequence[str]) -> list[str]:
        """The partition columns of a file that has not a column of that name itself."""
        return [name for name in self._values[file] if name not in own]

    def added(self, table: Any, file: int, wanted: Sequence[str], *, as_text: bool = False) -> Any:
        """A file's rows with the partition columns among ``wanted`` that they lack, in the order of ``wanted``.

        Args:
            as_text: as cells of a text file.
        """
        values = self._values[file]
        missing = [name for name in wanted if name in values and name not in table.column_names]
        for name in missing:
            kind, value = (pa.binary() if as_text else self.types[name]), values[name]
            read = int(value) if value is not None and kind == pa.int64() else value
            table = table.append_column(name, pa.repeat(pa.scalar(read, kind), table.num_rows))
        return table.select(list(wanted)) if missing else table

    def _type(self, name: str) -> Any:
        texts = [values[name] for values in self._values if values.get(name) is not None]
        return pa.int64() if texts and all(_INTEGER.fullmatch(text or "") for text in texts) else pa.string()


def partitions_in(path: str) -> dict[str, str | None]:
    """The columns in a path and their values, as text; None is Hive's name for null."""
    pairs = (part.split("=", 1) for part in path.split("/")[:-1] if "=" in part.strip("="))
    found = {unquote(name): unquote(value) for name, value in pairs if name}
    return {name: None if value == _NULL else value for name, value in found.items()}
