"""Charts of the page: Vega-Lite specs made by Altair, with their numbers in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from girih.report.text import is_number

MAX_POINTS = 240
MAX_DOTS = 40

Spec = dict[str, object]
Records = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a chart.

    Attributes:
        field: the name of its values in the records.
        title: what it measures.
        show: d3's format of a value under the pointer.
        from_zero: whether 0 belongs on it.
        unit: by how much values are divided before they are drawn.
    """

    field: str
    title: str
    show: str = ".5f"
    from_zero: bool = False
    unit: float = 1.0


def line_chart(x: Axis, y: Axis, series: Mapping[str, Records], *, diagonal: bool = False) -> Spec | None:
    """Lines whose values show under the pointer, with a band of extremes where they were thinned out.

    Args:
        series: records by ascending x, by name. A record whose x or y is no number is not drawn.
        diagonal: adds a dashed line on which x is y.

    Returns:
        The spec; None where there is nothing to draw.
    """
    rows = [row for name, records in series.items() for row in _thin(name, x, y, records)]
    if not rows:
        return None
    several, banded = len(series) > 1, any("least" in row for row in rows)
    ticks, scale = _axis(x, rows)
    across = alt.X(f"{x.field}:Q", title=x.title, axis=ticks, scale=scale)
    ticks, scale = _axis(y, rows)
    up = alt.Y(f"{y.field}:Q", title=None, axis=ticks, scale=scale)
    told = [alt.Tooltip("series:N", title=" ")] if several else []
    told += [alt.Tooltip(f"{axis.field}:Q", title=axis.title, format=axis.show) for axis in (x, y)]
    if banded:
        told += [alt.Tooltip(f"{end}:Q", format=y.show) for end in ("least", "greatest")]
    near = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", empty=False)
    seen = alt.value(1) if len(rows) <= MAX_DOTS else alt.condition(near, alt.value(1), alt.value(0))
    colour = alt.Color("series:N", sort=list(series), legend=alt.Legend() if several else None)
    base = alt.Chart().encode(x=across, y=up, color=colour)
    layers = [base.mark_line(), base.mark_circle(size=45).encode(opacity=seen, tooltip=told).add_params(near)]
    if banded:
        layers.insert(0, base.mark_area(opacity=0.18).encode(y=alt.Y("least:Q"), y2="greatest:Q"))
    if diagonal:
        most = max(value for axis in (x, y) for value in _numbers(axis, rows))
        ends = alt.Chart(alt.InlineData(values=[{x.field: at, y.field: at} for at in (0.0, most)]))
        layers.insert(0, ends.mark_line(strokeDash=[5, 4], color="var(--soft)").encode(x=across, y=up))
    return _spec(alt.layer(*layers, data=alt.InlineData(values=rows), height=190, width="container"))


def timeline_chart(rows: Records, lanes: Sequence[str]) -> Spec:
    """Bars in lanes, one lane per phase, the first on top; a row holds phase, from_ms, to_ms, ms and thread."""
    colour: dict[str, Any] = {"sort": list(lanes), "legend": None}
    chart = alt.Chart(alt.InlineData(values=list(rows)), height=26 * len(lanes), width="container")
    bars = chart.mark_bar(strokeWidth=1, fillOpacity=0.8).encode(
        x=alt.X("from_ms:Q", title="ms", scale=alt.Scale(nice=False), axis=alt.Axis(grid=True)),
        x2="to_ms:Q",
        y=alt.Y("phase:N", title=None, sort=list(lanes)),
        color=alt.Color("phase:N", **colour),
        stroke=alt.Stroke("phase:N", **colour),  # so that the shortest span is a pixel wide
        tooltip=[
            "phase:N",
            alt.Tooltip("ms:Q", format=".4~r"),
            alt.Tooltip("from_ms:Q", format=".6~r"),
            "thread:N",
        ],
    )
    return _spec(bars)


def _spec(chart: alt.SchemaBase) -> Spec:
    spec = chart.to_dict()
    del spec["$schema"], spec["config"]  # an address, and what the page sets for all charts at once
    return spec


def _axis(axis: Axis, rows: Records) -> tuple[alt.Axis, alt.Scale]:
    """Ticks and scale of an axis. If all values are equal, the one tick shows the value: Vega would round it to 1 or 0."""
    values = set(_numbers(axis, rows))
    if len(values) == 1 and not axis.from_zero:
        (value,) = values
        margin = max(0.01, abs(value) / 20)
        ticks = alt.Axis(values=[value], format=axis.show)
        return ticks, alt.Scale(domain=[value - margin, value + margin], zero=False, nice=False)
    ticks = alt.Axis(format="~s") if axis.show == ",.0f" else alt.Axis()
    nice = axis.field not in ("step", "examples")
    return ticks, alt.Scale(zero=axis.from_zero, nice=nice)


def _numbers(axis: Axis, rows: Records) -> Iterator[float]:
    return (value for row in rows if is_number(value := row[axis.field]))


def _thin(name: str, x: Axis, y: Axis, records: Records) -> list[dict[str, object]]:
    """One row for each record; of many records, means of buckets and the least and greatest in them."""
    pairs = [(record.get(x.field), record.get(y.field)) for record in records]
    numbers = np.array([pair for pair in pairs if is_number(pair[0]) and is_number(pair[1])], np.float64)
    xs, ys = numbers.reshape(-1, 2).T / np.array([[x.unit], [y.unit]])
    if len(xs) <= MAX_POINTS:
        return [
            {"series": name, x.field: a, y.field: b} for a, b in zip(xs.tolist(), ys.tolist(), strict=True)
        ]
    starts = np.linspace(0, len(xs), MAX_POINTS + 1).astype(np.int64)[:-1]
    counts = np.diff(starts, append=len(xs))
    columns = {
        x.field: np.add.reduceat(xs, starts) / counts,
        y.field: np.add.reduceat(ys, starts) / counts,
        "least": np.minimum.reduceat(ys, starts),
        "greatest": np.maximum.reduceat(ys, starts),
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [{"series": name, **dict(zip(columns, row, strict=True))} for row in values]
