"""Sources and their units: a row group or a block of lines, as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from girih.data.paths import DataFile
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
        place: the word for what numbers count; None: lines or rows.
        bad: rows that never made it into the table.
    """

    table: Any
    file: str
    after: Cursor
    numbers: range | NDArray[np.int64]
    suffix: str = ""
    is_text: bool = False
    place: str | None = None
    bad: list[BadRow] = field(default_factory=list)

    def locate(self, bad: BadRow) -> str:
        """As in ``clicks.csv, line 17: …``."""
        place = self.place or ("line" if self.is_text else "row")
        return f"{self.file}, {place} {bad.number}{self.suffix}: {bad.message}"


class FileSource:
    """The part of a source that files have in common: they end by themselves."""

    endless = False
    bounds = None

    @staticmethod
    def stopped() -> bool:
        """Nobody stops a file."""
        return False

    def within(self, bounds: object) -> Self:
        """Itself."""
        return self

    def until(self, stopped: Callable[[], bool]) -> Self:
        """Itself: what reads on checks after each batch."""
        return self

    def so_far(self) -> Self:
        """Itself: all rows."""
        return self


class Source(Protocol):
    """Files of one format, opened as far as their headers.

    Attributes:
        num_parts: row groups, or text files: an epoch's order permutes them.
        num_rows: rows of all files, where that is known without reading them.
        bounds: of a stream, where it begins and ends, on which several readers have to agree; None for files.
        endless: whether rows to come are read too.
        identity: changes when positions in these files would lose their meaning.
    """

    @property
    def files(self) -> tuple[DataFile, ...]: ...

    @property
    def num_parts(self) -> int: ...

    @property
    def num_rows(self) -> int | None: ...

    @property
    def identity(self) -> str: ...

    @property
    def endless(self) -> bool: ...

    @property
    def bounds(self) -> Sequence[Sequence[int]] | None: ...

    @property
    def stopped(self) -> Callable[[], bool]:
        """Tells whether reading ended because somebody asked for it."""
        ...

    def within(self, bounds: Sequence[Sequence[int]]) -> Source:
        """The same stream with the bounds of another reader, read as all its readers read it."""
        ...

    def until(self, stopped: Callable[[], bool]) -> Source:
        """The same rows, which end when asked to."""
        ...

    def so_far(self) -> Source:
        """The rows that are there already."""
        ...

    def check(self, plan: ReadPlan) -> None:
        """Refuses files whose columns do not serve the plan."""

    def read(self, plan: ReadPlan, order: NDArray[np.int64], start: Cursor) -> Iterator[Unit]:
        """Yields the units of the parts ``order``, beginning at ``start``."""
