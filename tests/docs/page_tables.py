"""Tables of the pages. Each of their columns must be a column of a result, rounded."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"(?<![\w.])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\w)|(?<=x)\d+(?:\.\d+)?")
SCALES = (1.0, 1e-3, 1e3, 1e-6, 100.0, 0.01)
"""A page may have milliseconds, thousands, millions or per cent of what a result has."""


@dataclass(frozen=True)
class Number:
    """A printed number: its value, and one unit of its last digit."""

    value: float
    unit: float


def numbers(text):
    """The numbers of a text, in their order."""
    plain = text.replace("−", "-").replace("**", "").replace("*", "")
    values = []
    for match in NUMBER.finditer(plain):
        digits = match.group().replace(",", "")
        unit = 10.0 ** -len(digits.partition(".")[2])
        values.append(Number(float(digits), unit))
    return values


def unsigned(number):
    return Number(abs(number.value), number.unit)


def rounds_to(value, number):
    """True if a result is the page's number when it is rounded. A result is a float, or a number that a benchmark prints."""
    if isinstance(value, Number):
        slack = 0.0 if value.unit >= number.unit else value.unit / 2
        return abs(value.value - number.value) <= (number.unit / 2 + slack) * (1 + 1e-9)
    return abs(value - number.value) <= number.unit / 2 * (1 + 1e-9)


@dataclass(frozen=True)
class PageTable:
    """A table of a page: the section that it is in, its header, and the cells of its rows.

    Attributes:
        benchmark: whose page part it is, as ``benchmarks/pages.py`` writes it. Empty for a table that people write.
    """

    page: str
    section: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    benchmark: str = ""

    def __str__(self):
        return f"{self.page}, {self.section}: {' | '.join(self.header[:4])}"


def cells(line):
    return tuple(cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|"))


@cache
def tables_of(page):
    """All tables of a page, in their order."""
    page_tables, section, block, in_code, benchmark = [], "", [], False, ""
    for line in [*(ROOT / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
            continue
        if len(block) > 2:
            rows = tuple(map(cells, block[2:]))
            page_tables.append(PageTable(page, section, cells(block[0]), rows, benchmark))
        block = []
        if mark := re.match(r"<!-- (?:(\w+): [\w ]+|end) -->", line):
            benchmark = mark[1] or ""
        if line.startswith("```"):
            in_code = not in_code
        elif line.startswith("#") and not in_code:
            section = line.lstrip("# ")
    return page_tables


def columns_of(rows):
    """(column, place in its cell) → the numbers of each row; rows are dictionaries of a result."""
    columns = {}
    for place, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, str):
                values = numbers(value)
            else:
                listed = value if isinstance(value, list) else [value]
                values = [item for item in listed if item is not None]
            for position, number in enumerate(values):
                columns.setdefault((name, position), [None] * len(rows))[place] = number
    return columns


def scaled(value, scale):
    if isinstance(value, Number):
        return Number(value.value * scale, value.unit * scale)
    return value * scale


def fits(value, number):
    """The scales at which a result is a page's number."""
    if value is None:
        return set()
    return {scale for scale in SCALES if rounds_to(scaled(value, scale), number)}


@dataclass(frozen=True)
class Comparison:
    """The number of page numbers that agree, and a line for each that does not."""

    agreeing: int
    faults: tuple[str, ...]


def compare(table, rows, *, apart=(), digits=None):
    """Compare a table with the rows of a result.

    Each row of the page is paired with the row of the result that has most of its numbers. Then each column of
    the page must be one column of the result in all rows.

    Args:
        apart: headers of columns that no result has, such as the paper's figures.
        digits: the page rounds whole numbers to this many significant digits.
    """
    page = columns_of([dict(zip(_unique(table.header), row, strict=False)) for row in table.rows])
    page = {key: column for key, column in page.items() if _bare(key[0]) not in apart}
    if digits is not None:
        page = {key: [_coarse(number, digits) for number in column] for key, column in page.items()}
    result = columns_of(rows)
    pairs = _paired(page, result, len(table.rows), len(rows))
    agreeing, faults = 0, []
    for key, column in page.items():
        places = [place for place, number in enumerate(column) if number is not None]
        best = max(
            (_agreement(column, other, pairs, places) for other in result.values()), key=len, default=[]
        )
        agreeing += len(best)
        for place in sorted(set(places) - set(best)):
            faults.append(
                f"{table}: row {' | '.join(table.rows[place][:4])}: {_bare(key[0])!r}, number {key[1] + 1}: {column[place].value:g}"
            )
    return Comparison(agreeing, tuple(faults))


def _coarse(number, digits):
    """The number with only its first digits significant, if it is whole."""
    if number is None or number.unit < 1:
        return number
    return Number(number.value, 10.0 ** max(0, len(f"{abs(number.value):.0f}") - digits))


def _unique(header):
    """Names of columns. Header cells may repeat."""
    return [f"{name}\0{header[:place].count(name)}" for place, name in enumerate(header)]


def _bare(name):
    return name.partition("\0")[0]


def _paired(page, result, num_rows, num_kept):
    """The row of the result for each row of the page."""
    scores = np.zeros((num_rows, num_kept))
    for column in page.values():
        for row, number in enumerate(column):
            if number is None:
                continue
            for kept in range(num_kept):
                scores[row, kept] += any(fits(other[kept], number) for other in result.values())
    return dict(zip(*linear_sum_assignment(-scores), strict=True))


def _agreement(column, other, pairs, places):
    """The rows in which a page's column is a result's column, at the scale that fits most rows."""
    by_scale = {scale: [] for scale in SCALES}
    for place in places:
        if place in pairs:
            for scale in fits(other[pairs[place]], column[place]):
                by_scale[scale].append(place)
    return max(by_scale.values(), key=len)
