"""Charts of the page: Vega-Lite specs with their data, made by Altair. The timeline shows a few steps in lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np

from girih.report.record import RunRecord, TimelineSpan
from girih.report.text import DASH, count, is_number, percent

MAX_POINTS = 240
MAX_DOTS = 40

Spec = dict[str, object]
Records = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a chart.

    Attributes:
        field: the name of its values in the records.
        title: the quantity.
        show: d3's format of the value in the tooltip.
        from_zero: whether the axis includes 0.
        unit: the divisor of all values.
    """

    field: str
    title: str
    show: str = ".5f"
    from_zero: bool = False
    unit: float = 1.0


def line_chart(x: Axis, y: Axis, series: Mapping[str, Records], *, diagonal: bool = False) -> Spec | None:
    """Lines with tooltips. If the lines are thinned out, a band shows the extremes.

    Args:
        series: records by ascending x, by name. A record is left out if its x or y is not a number.
        diagonal: adds a dashed line of y = x.

    Returns:
        The spec; None if there is nothing to draw.
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
    """Bars in lanes, one lane per phase, the first on top. A row holds phase, from_ms, to_ms, ms and thread."""
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
    del spec["$schema"], spec["config"]  # the page sets the schema's address and the config for all charts
    return spec


def _axis(axis: Axis, rows: Records) -> tuple[alt.Axis, alt.Scale]:
    """Returns the ticks and the scale of an axis. If all values are equal, the only tick is this value.

    Vega would round it to 1 or 0.
    """
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
    """Returns one row per record.

    If there are many records, returns one row per bucket: mean, smallest and largest value.
    """
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


NUM_STEPS = 6
MAX_SPANS = 3000


def timeline(run: RunRecord) -> dict[str, object] | None:
    """Returns a few steps and the time by phase, for the template. None if nothing was timed."""
    events = run.events
    if not events or _end(events) <= events[0].start_us:
        return None
    start_us, end_us, told = window(events)
    inside = [e for e in events if e.start_us < end_us and e.start_us + e.duration_us > start_us]
    longest = sorted(inside, key=lambda event: -event.duration_us)[:MAX_SPANS]
    drawn = sorted(longest, key=lambda event: event.start_us)
    if len(drawn) < len(inside):
        told += f" The {count(len(inside) - len(drawn))} shortest spans are left out."
    present = {event.name for event in drawn}
    lanes = [name for name in dict.fromkeys(event.name for event in events) if name in present]
    rows = [_row(event, start_us, end_us) for event in drawn]
    return {"told": told, "chart": timeline_chart(rows, lanes), **_phases(run)}


def window(events: Sequence[TimelineSpan]) -> tuple[float, float, str]:
    """Finds a few typical steps: their start and end in microseconds, and a sentence about them.

    A step begins with the phase named ``step``. If there is none, a step begins with the longest of the phases that
    are about as frequent as the most frequent one. The typical window has the median length, so it contains neither
    the warm-up nor an evaluation.
    """
    first, last = events[0].start_us, _end(events)
    starts: dict[str, list[float]] = defaultdict(list)
    total: dict[str, float] = defaultdict(float)
    own = [event for event in events if ": " not in event.name]  # other processes have a different rhythm
    for event in own or events:
        starts[event.name].append(event.start_us)
        total[event.name] += event.duration_us
    most = max(len(at) for at in starts.values())
    if most <= NUM_STEPS:
        return first, last, f"The whole recording, {(last - first) / 1000:,.4g} ms."
    often = [name for name, at in starts.items() if len(at) > max(NUM_STEPS, 0.8 * most)]
    beat = "step" if len(starts["step"]) > NUM_STEPS else max(often, key=lambda name: total[name])
    windows = sorted((b - a, a, b) for a, b in zip(starts[beat], starts[beat][NUM_STEPS:], strict=False))
    length, start, end = windows[len(windows) // 2]
    what = "steps" if beat == "step" else f"rounds of {beat}"
    told = f"{NUM_STEPS} typical {what}: {length / 1000:,.4g} ms, {(start - first) / 1e6:,.4g} s into a recording"
    return start, end, f"{told} of {(last - first) / 1e6:,.4g} s."


def _row(event: TimelineSpan, start_us: float, end_us: float) -> dict[str, object]:
    begin, end = max(event.start_us, start_us), min(event.start_us + event.duration_us, end_us)
    return {
        "phase": event.name,
        "from_ms": (begin - start_us) / 1000,
        "to_ms": (end - start_us) / 1000,
        "ms": event.duration_us / 1000,
        "thread": event.thread,
    }


def _phases(run: RunRecord) -> dict[str, object]:
    """Returns the cells of the table, longest phase first, and the name of the total that shares refer to."""
    recorded: dict[str, list[float]] = defaultdict(list)
    for event in run.events:
        recorded[event.name].append(event.duration_us / 1000)
    told, totals_s = "recording", {name: sum(spans) / 1000 for name, spans in recorded.items()}
    span_s = (_end(run.events) - run.events[0].start_us) / 1e6
    whole_s = _whole_s(run) if run.totals_s else None
    if whole_s:
        told, span_s, totals_s = "run; mean and longest are of the recording", whole_s, run.totals_s
    phases = []
    for name, total_s in sorted(totals_s.items(), key=lambda item: -item[1]):
        spans = recorded.get(name, [])
        mean, longest = (sum(spans) / len(spans), max(spans)) if spans else (None, None)
        shown = [f"{ms:,.3f} ms" if ms is not None else DASH for ms in (mean, longest)]
        phases.append((name, percent(total_s / span_s), f"{total_s:,.3f} s", count(len(spans)), *shown))
    return {"phases_of": told, "phases": phases}


def _whole_s(run: RunRecord) -> float | None:
    """Returns the seconds of the run without compilation: to its end, or to its latest record. None if unknown."""
    summary = run.summary or {}
    told = summary.get("duration_s")
    if is_number(told) and is_number(summary.get("compile_s")):
        told -= summary["compile_s"]
    if not is_number(told) and run.training:
        told = run.training[-1].get("elapsed_s")
    return float(told) if is_number(told) and told > 0 else None


def _end(events: Sequence[TimelineSpan]) -> float:
    return max(event.start_us + event.duration_us for event in events)
