"""The figures column of docs/claims.md. A figure names the number of a result that a claim quotes.

A figure is ``docs/results/FILE::TITLE::COLUMN=VALUE; COLUMN=VALUE::COLUMN``:

- FILE is a JSON file with tables, or a folder of ``kept_results.REDRAWN``.
- TITLE is the beginning of a table's title.
- The conditions choose its rows. ``A or B`` is either value.
- The last column has the number.

``min``, ``max`` and ``geometric mean`` before a figure take one number from several rows. ``FIGURE ÷ FIGURE`` is a ratio.
"""

import re
from statistics import geometric_mean

from kept_results import table
from page_tables import NUMBER, Number, numbers, rounds_to, scaled, unsigned

REDUCERS = {"min": min, "max": max, "geometric mean": geometric_mean}
UNITS = {"k": 1e-3, "million": 1e-6, "%": 100.0}
"""Units after a number of a claim, and the factor from a result to this number."""
SIZE = re.compile(r"(?<![.\d])\d+(?:,\d{3})*(?:\.\d+)?")
"""Numbers of titles and conditions."""


def quoted(claim):
    """(number, scale of its unit) of each number of a claim."""
    plain = claim.replace("−", "-").replace("*", "")
    pairs = []
    for match, number in zip(NUMBER.finditer(plain), numbers(claim), strict=True):
        unit = re.match(r" ?(k\b|million\b|%)", plain[match.end() :])
        pairs.append((number, UNITS[unit.group(1)] if unit else 1.0))
    return pairs


def value(figure):
    """The numbers that a figure names, without signs: one of a ratio, or all numbers of a cell.

    Raises:
        AssertionError: it names no row, or several.
    """
    over, divided, under = figure.partition(" ÷ ")
    if divided:
        return [_plain(value(over)[0]) / _plain(value(under)[0])]
    reducer = next((name for name in REDUCERS if figure.startswith(f"{name} docs/")), None)
    source, title, conditions, column = figure.removeprefix(reducer or "").strip().split("::")
    wanted = [condition.split("=", 1) for condition in conditions.split("; ") if condition]
    rows = [row for row in table(source.removeprefix("docs/results/"), title) if _has(row, wanted)]
    cells = [_cell(row[column]) for row in rows]
    if reducer is not None:
        return [REDUCERS[reducer]([_plain(cell[0]) for cell in cells])]
    assert len(cells) == 1, f"{figure}: {len(cells)} rows"
    return cells[0]


def _has(row, wanted):
    return all(str(row[name]) in values.split(" or ") for name, values in wanted)


def _cell(cell):
    values = numbers(cell) if isinstance(cell, str) else [float(cell)]
    return [unsigned(value) if isinstance(value, Number) else abs(value) for value in values]


def _plain(cell):
    return cell.value if isinstance(cell, Number) else cell


def faults(claim, figures):
    """A line for each number of a claim without a figure, and for each figure that the claim does not quote.

    A claim may also quote numbers of titles and conditions, such as a size.
    """
    values = {figure: value(figure) for figure in figures}
    sizes = [float(digits.replace(",", "")) for figure in figures for digits in SIZE.findall(figure)]
    lines, unused = [], set(figures)
    for number, scale in quoted(claim):
        equal = {
            figure for figure, kept in values.items() if any(_equal(each, number, scale) for each in kept)
        }
        unused -= equal
        if not equal and not any(_equal(size, number, scale) for size in sizes):
            lines.append(f"{number.value:g} of {claim!r} is none of {values}")
    return [*lines, *(f"{figure} is {values[figure]}, which {claim!r} does not quote" for figure in unused)]


def _equal(kept, number, scale):
    return any(rounds_to(scaled(kept, by), unsigned(number)) for by in {1.0, scale})
