"""Loads matching rows of an earlier run as the first rows of a new run.

The new run's tables may have other columns or optimizers.

Step numbers start again, but rows keep their relative age. Example: a row that was last used 10 steps before the
earlier run's last step counts as used 10 steps before the new run's first step. Rows of tables that count seconds keep
their seconds.

Shapes: K rows of a chunk, W columns of a row that training sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import update
from girih.store.snapshot.columns import Chunk, Column, value_columns
from girih.store.snapshot.restore import (
    RowSource,
    add_bloom,
    load_keys,
    order_lists,
    shrink_to_bounds,
    table_numbers,
)
from girih.store.spec import Description, Floats, Ints
from girih.store.values import LoadedColumn, Values

MOMENTS = ("adam",)
"""Optimizers whose state depends on the number of steps, for bias correction. A new run does not inherit this state."""


class Fit(NamedTuple):
    """The columns of saved rows that rows with another description can use.

    Attributes:
        segments: the names of the segments that match. states: the segments whose optimizer state also matches.
        why_not: why no segment matches, or an empty text if a segment matches.
        why_begins: why a segment's optimizer state starts from its initial values, or an empty text if all matching
            segments keep their state.
    """

    segments: tuple[str, ...]
    states: tuple[str, ...]
    why_not: str
    why_begins: str


def fit_of(theirs: Description, ours: Description) -> Fit:
    """Returns the columns of rows of one description that rows of another description can use."""
    if theirs["dtype"] != ours["dtype"]:
        return Fit((), (), f"dtype {theirs['dtype']} there, {ours['dtype']} here", "")
    known = {segment["name"]: segment for segment in theirs["segments"]}
    segments, states, why_not, why_begins = [], [], "", ""
    for segment in ours["segments"]:
        match = known.get(segment["name"])
        if match is None:
            why_not = why_not or f"no {segment['name']} there"
            continue
        if match["dim"] != segment["dim"]:
            why_not = f"dim {match['dim']} there, {segment['dim']} here"
            continue
        segments.append(segment["name"])
        before, now = match["optimizer"]["name"], segment["optimizer"]["name"]
        if (before, match["state"]) != (now, segment["state"]):
            why_begins = f"{before} there, {now} here"
        elif now in MOMENTS:
            why_begins = f"{now}'s moments belong to a number of steps"
        else:
            states.append(segment["name"])
    return Fit(tuple(segments), tuple(states), "" if segments else why_not, why_begins)


def inherit(values: Values, sources: Sequence[RowSource]) -> None:
    """Replaces the content of a shard by the matching columns of sources; see :meth:`girih.store.Store.inherit`.

    Lists of tables are ordered by last use. Bloom filters are kept if the table's number and the filter's size match.
    Counters start at 0.
    """
    values.clear()
    for source in sources:
        theirs, ours = source.description, values.layout.description
        fit = fit_of(theirs, ours)
        if fit.why_not:
            continue
        numbers = table_numbers(values, source)
        for chunk in source.chunks():
            _load_chunk(values, chunk, numbers, theirs, fit)
        add_bloom(values, source)
    order_lists(values, np.ones(len(values.spec.tables), np.bool_))
    shrink_to_bounds(values)


def _load_chunk(
    values: Values,
    chunk: Chunk,
    numbers: Ints,
    theirs: Description,
    fit: Fit,
) -> None:
    ours = values.layout.description
    kept, tables, rows = load_keys(values, theirs, chunk, numbers, goes_on=False)
    if not len(kept):
        return
    is_whole = set(fit.segments) == {segment["name"] for segment in ours["segments"]}
    initial = None if is_whole else _initial(values, chunk["ids"][kept], tables)
    weights: list[LoadedColumn] = []
    states: list[LoadedColumn] = []
    first = 0
    for column in value_columns(ours):
        segment, _, part = column.name.partition(".")
        if not part:
            columns = slice(first, first + column.width)
            first += column.width
            if segment in fit.segments:
                weights.append((column.first_byte, chunk[column.name][kept]))
            elif initial is not None:
                weights.append((column.first_byte, _narrowed(initial[:, columns], column)))
        elif segment in fit.states:
            states.append((column.first_byte, chunk[column.name][kept]))
    values.load(rows, weights, begins=True, states=states)


def _initial(values: Values, ids: NDArray[np.int64], tables: Ints) -> Floats:
    """Returns the initial values of keys, float32[K, W]."""
    out = np.empty((len(ids), values.layout.description["dim"]), np.float32)
    update.initial_values(values.layout.kernel, ids, tables, out)
    return out


def _narrowed(values: Floats, column: Column) -> NDArray[Any]:
    """Returns values in the column's dtype, rounded to nearest, ties to even."""
    if column.tag == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if column.tag == "F16" else values
