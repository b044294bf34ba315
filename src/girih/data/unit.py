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
    """An unusable row: its number in the file, the kind of error, and the message."""

    number: int
    reason: str
    message: str


@dataclass(slots=True)
class Unit:
    """Some rows of one file.

    Attributes:
        table: a ``pyarrow.Table`` of R rows with the requested columns.
        file: its address. suffix: text to append to the place of a row.
        after: the start of the next unit.
        numbers: for each of the R rows, its line, or its number in the file, from 1.
        is_text: rows are lines.
        place: the word for what ``numbers`` count. None stands for lines or rows.
        bad: bad rows that are not in the table.
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
        """Returns the place and the message of a bad row: ``clicks.csv, line 17: …``."""
        place = self.place or ("line" if self.is_text else "row")
        return f"{self.file}, {place} {bad.number}{self.suffix}: {bad.message}"


def never() -> bool:
    """Returns False, because nobody can ask to stop."""
    return False


class Source(ABC):
    """Files of one format whose headers have been read, or a stream.

    The methods of this class are for files, which end by themselves.

    Attributes:
        num_parts: number of row groups or text files; an epoch's order permutes them.
        num_rows: rows of all files, if they are known without reading.
        bounds: the begin and end of a stream, on which several readers must agree; None for files.
        endless: also read future rows.
        identity: changes if positions in these files become invalid.
        stopped: returns whether reading ended on request.
    """

    files: tuple[DataFile, ...]
    num_parts: int
    num_rows: int | None
    identity: str
    endless: bool = False
    bounds: Sequence[Sequence[int]] | None = None

    stopped: Callable[[], bool] = staticmethod(never)

    def within(self, bounds: Sequence[Sequence[int]]) -> Source:
        """Returns the same stream with the bounds of another reader, in the order that all its readers share."""
        return self

    def until(self, stopped: Callable[[], bool]) -> Source:
        """Returns the same rows, but reading ends on request.

        Readers of files ignore this, and check after each batch.
        """
        return self

    def so_far(self) -> Source:
        """Returns the existing rows."""
        return self

    @abstractmethod
    def check(self, plan: ReadPlan) -> None:
        """Refuses files whose columns do not fit the plan."""

    @abstractmethod
    def read(self, plan: ReadPlan, order: I64, start: Cursor) -> Iterator[Unit]:
        """Yields the units of the parts ``order``, from ``start`` on."""
