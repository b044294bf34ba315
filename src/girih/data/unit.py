"""Sources and their units: a row group or a block of lines, as columns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from girih.data.paths import DataFile
from girih.data.position import Cursor
from girih.data.read_plan import ReadPlan
from girih.kernels.cpu.arrays import I64


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
        place: the word for what numbers count; None: lines or rows.
        bad: rows that never made it into the table.
    """

    table: Any
    file: str
    after: Cursor
    numbers: range | I64
    suffix: str = ""
    is_text: bool = False
    place: str | None = None
    bad: list[BadRow] = field(default_factory=list)

    def locate(self, bad: BadRow) -> str:
        """As in ``clicks.csv, line 17: …``."""
        place = self.place or ("line" if self.is_text else "row")
        return f"{self.file}, {place} {bad.number}{self.suffix}: {bad.message}"


def never() -> bool:
    """Says that nobody asked to stop."""
    return False


class Source(ABC):
    """Files of one format, opened as far as their headers, or a stream. What is here holds for files, which end by themselves.

    Attributes:
        num_parts: row groups, or text files: an epoch's order permutes them.
        num_rows: rows of all files, where that is known without reading them.
        bounds: of a stream, where it begins and ends, on which several readers have to agree; None for files.
        endless: whether rows to come are read too.
        identity: changes when positions in these files would lose their meaning.
        stopped: tells whether reading ended because somebody asked for it.
    """

    files: tuple[DataFile, ...]
    num_parts: int
    num_rows: int | None
    identity: str
    endless: bool = False
    bounds: Sequence[Sequence[int]] | None = None

    stopped: Callable[[], bool] = staticmethod(never)

    def within(self, bounds: Sequence[Sequence[int]]) -> Source:
        """The same stream with the bounds of another reader, read as all its readers read it."""
        return self

    def until(self, stopped: Callable[[], bool]) -> Source:
        """The same rows, which end when asked to. Who reads files checks after each batch."""
        return self

    def so_far(self) -> Source:
        """The rows that are there already."""
        return self

    @abstractmethod
    def check(self, plan: ReadPlan) -> None:
        """Refuses files whose columns do not serve the plan."""

    @abstractmethod
    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields the units of the parts ``order``, beginning at ``start``."""
