"""Sources and their units: a row group or a block of lines, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        file: its address. place: ``line`` or ``row``. suffix: what to add to it.
        first: number of the first row, counted from 1. numbers: int64[R], where they do not simply follow.
        after: where the next unit begins.
        is_text: numbers come as strings, and empty strings are nulls.
        bad: rows that never made it into the table.
    """

    table: Any
    file: str
    place: str
    first: int
    after: Cursor
    suffix: str = ""
    numbers: NDArray[np.int64] | None = None
    is_text: bool = False
    bad: list[BadRow] = field(default_factory=list)

    def number(self, row: int) -> int:
        """The row's line, or its number in the file, from 1."""
        return self.first + row if self.numbers is None else int(self.numbers[row])

    def locate(self, bad: BadRow) -> str:
        """As in ``clicks.csv, line 17: …``."""
        return f"{self.file}, {self.place} {bad.number}{self.suffix}: {bad.message}"


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


class Findings:
    """The bad rows of one unit, found while it was decoded."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._found: list[tuple[NDArray[np.int64], str, Callable[[int], str]]] = []

    def add(self, mask: NDArray[np.bool_] | None, column: str, expected: str) -> None:
        """Notes the rows where ``mask`` is set; ``expected`` says what their ``column`` should have held."""
        if mask is not None and mask.any():
            self._found.append(
                (np.flatnonzero(mask), f"column {column!r}: expected {expected}", self._shown(column))
            )

    def _shown(self, column: str) -> Callable[[int], str]:
        def show(row: int) -> str:
            value = self._unit.table.column(column)[row].as_py()
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            if value is None or (value == "" and self._unit.is_text):
                return "is missing"
            text = repr(value)
            return f"= {text if len(text) <= 60 else text[:57] + '...'}"

        return show

    def bad_rows(self) -> tuple[NDArray[np.bool_] | None, list[BadRow]]:
        """bool[R] of the rows to drop, or None, and every bad row once, those before the table included."""
        if not self._found:
            return None, self._unit.bad
        drop = np.zeros(self._unit.table.num_rows, dtype=np.bool_)
        bad = list(self._unit.bad)
        for rows, reason, show in self._found:
            column, _, expected = reason.partition(": ")
            for row in rows[~drop[rows]]:
                bad.append(BadRow(self._unit.number(row), reason, f"{column} {show(row)}: {expected}"))
            drop[rows] = True
        return drop, bad
