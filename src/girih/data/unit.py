"""Sources and their units: a row group or a block of lines, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.data.paths import File
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan


class BadRow(NamedTuple):
    """A row that cannot be used: its number in the file, the kind of trouble, and the message about it."""

    number: int
    reason: str
    message: str


@dataclass(slots=True)
class Unit:
    """Some rows of one file.

    Attributes:
        table: a ``pyarrow.Table`` of R rows with the columns asked for.
        file: its address. suffix: what to add to a row's place in it.
        after: where the next unit begins.
        numbers: of each of the R rows, its line, or its number in the file, from 1.
        is_text: rows are lines.
        bad: rows that never made it into the table.
    """

    table: Any
    file: str
    after: Cursor
    numbers: range | NDArray[np.int64]
    suffix: str = ""
    is_text: bool = False
    bad: list[BadRow] = field(default_factory=list)

    def locate(self, bad: BadRow) -> str:
        """As in ``clicks.csv, line 17: …``."""
        place = "line" if self.is_text else "row"
        return f"{self.file}, {place} {bad.number}{self.suffix}: {bad.message}"


class Source(Protocol):
    """Files of one format, opened as far as their headers.

    Attributes:
        num_parts: row groups, or text files: an epoch's order permutes them.
        num_rows: rows of all files, where that is known without reading them.
        identity: changes when positions in these files would lose their meaning.
    """

    files: tuple[File, ...]
    num_parts: int
    num_rows: int | None
    identity: str

    def check(self, plan: ReadPlan) -> None:
        """Refuses files whose columns do not serve the plan."""

    def read(self, plan: ReadPlan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields the units of the parts ``order``, beginning at ``start``."""
