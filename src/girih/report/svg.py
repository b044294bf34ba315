"""Plots as inline SVG: a line chart with axes, and a strip of lanes. Text in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from girih.report.record import Event
from girih.report.text import is_number

Scale = Literal["plain", "thousands", "bytes"]

# Of the view box. A card is drawn 330 to 520 pixels wide, so text keeps to 10 to 15 pixels.
WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BASE = 60, 14, 12, 228
MAX_POINTS = 240
MAX_MARKS = 40
NUM_COLOURS = 6
_SUFFIXES: dict[Scale, Sequence[tuple[float, str]]] = {
    "plain": (),
    "thousands": ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")),
    "bytes": ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB")),
}


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: points by ascending x; what is not a number on either axis is not drawn.

    Attributes:
        name: in the legend and the read-out.
        points: (x, y).
        colour: 1 to 6, as the page's style names them.
        dashed: a reference, without marks, read-out or share in the legend's count.
    """

    name: str
    points: Sequence[tuple[Any, Any]]
    colour: int = 1
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """How one direction is drawn.

    Attributes:
        title: what it measures, with the unit.
        scale: which suffixes its numbers take.
        from_zero: whether 0 belongs on it.
        show: a value in the read-out.
    """

    title: str
    scale: Scale = "plain"
    from_zero: bool = False
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class _Line:
    """A series thinned out: means of buckets, and between which values they lie."""

    series: Series
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]

    @property
    def spread(self) -> bool:
        """Whether the spread within buckets is wide enough to be seen."""
        widest = max(high - low for low, high in zip(self.low, self.high, strict=True))
        return widest > 0.02 * (max(self.high) - min(self.low))


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where values lie in the view box."""

    x_ticks: list[float]
    x_low: float
    x_high: float
    y_ticks: list[float]
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return BASE - (value - self.y_low) / (self.y_high - self.y_low) * (BASE - TOP)


def line_chart(title: str, x_axis: Axis, y_axis: Axis, series: Sequence[Series]) -> str:
    """A card with a title, a legend where there is more than one series, axes, lines and a read-out."""
    lines = [line for one in series if (line := _thin(one)).x]
    solid = [line for line in lines if not line.series.dashed]
    if not solid:
        return _card(title, y_axis.title, "", '<p class="empty">Nothing recorded.</p>')
    frame = _Frame(
        *_range([value for line in lines for value in line.x], x_axis),
        *_range([value for line in lines for value in (*line.low, *line.high)], y_axis),
    )
    marks = _axes(frame, x_axis, y_axis)
    for line in lines:
        marks.extend(_draw(line, frame))
    marks.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{BASE}"/>')
    readings = [[line.series.name, _readings(line, frame, x_axis, y_axis)] for line in solid]
    data = escape(json.dumps([x_axis.title, readings], separators=(",", ":")))
    label = escape(f"{title}: {y_axis.title} by {x_axis.title}")
    drawing = (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
        f'data-points="{data}">{"".join(marks)}</svg><p class="readout" aria-hidden="true"></p>'
    )
    return _card(title, y_axis.title, _legend(lines), drawing)


def strip(events: Sequence[Event], start_us: float, end_us: float, colours: dict[str, int]) -> str:
    """Lanes by name over a window of time; positions are shares of the width, so text keeps its size."""
    span = end_us - start_us
    names = list(dict.fromkeys(event.name for event in events))
    lane, head = 38, 4
    base = head + lane * len(names)
    ticks = [value for value in _ticks(0.0, span / 1000, 7) if value * 1000 <= span]
    marks = []
    for value, label in zip(ticks, tick_labels(ticks, "plain"), strict=True):
        x = value * 1000 / span * 100
        anchor = "start" if x < 3 else "end" if x > 95 else "middle"
        marks.append(f'<line class="rule" x1="{x:.3f}%" x2="{x:.3f}%" y1="{head}" y2="{base + 4}"/>')
        marks.append(f'<text class="tick {anchor}" x="{x:.3f}%" y="{base + 18}">{escape(label)} ms</text>')
    for position, name in enumerate(names):
        marks.append(f'<text class="lane" x="0" y="{head + position * lane + 14}">{escape(name)}</text>')
    for event in events:
        left = max(event.start_us, start_us)
        right = min(event.start_us + event.duration_us, end_us)
        x, width = (left - start_us) / span * 100, max((right - left) / span * 100, 0.08)
        y = head + names.index(event.name) * lane + 19
        at_ms = (event.start_us - start_us) / 1000
        thread = f", thread {event.thread}" if event.thread else ""
        told = escape(f"{event.name}: {event.duration_us / 1000:.3g} ms, from {at_ms:.4g} ms{thread}")
        place = f'x="{x:.3f}%" y="{y}" width="{width:.3f}%" height="15"'
        marks.append(f'<rect class="c{colours.get(event.name, 1)}" {place}><title>{told}</title></rect>')
    label = escape(f"Timeline of {len(names)} phases over {span / 1000:.4g} ms")
    return (
        f'<svg class="strip" width="100%" height="{base + 24}" role="img" aria-label="{label}">'
        f"{''.join(marks)}</svg>"
    )


def tick_labels(ticks: Sequence[float], scale: Scale) -> list[str]:
    """Numbers of one axis: one suffix and equally many decimals for all, no suffix at 0."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    unit, suffix = next(
        ((unit, name) for unit, name in _SUFFIXES[scale] if largest >= unit * 0.9999), (1.0, "")
    )
    if scale == "thousands" and largest < 1e4:
        unit, suffix = 1.0, ""
    step = min((abs(b - a) for a, b in pairwise(ticks)), default=1.0) / unit
    decimals = next((places for places in range(9) if abs(round(step, places) - step) < step * 1e-6), None)
    if decimals is None:
        return [f"{tick:.4g}" for tick in ticks]
    return ["0" if abs(tick) < unit * 1e-12 else f"{tick / unit:,.{decimals}f}{suffix}" for tick in ticks]


def _thin(series: Series) -> _Line:
    pairs = [(x, y) for x, y in series.points if is_number(x) and is_number(y)]
    xs = np.array([x for x, _ in pairs], np.float64)
    ys = np.array([y for _, y in pairs], np.float64)
    if len(pairs) <= MAX_POINTS:
        return _Line(series, xs.tolist(), ys.tolist(), ys.tolist(), ys.tolist())
    starts = np.linspace(0, len(pairs), MAX_POINTS + 1).astype(np.int64)[:-1]
    counts = np.diff(starts, append=len(pairs))
    return _Line(
        series,
        (np.add.reduceat(xs, starts) / counts).tolist(),
        (np.add.reduceat(ys, starts) / counts).tolist(),
        np.minimum.reduceat(ys, starts).tolist(),
        np.maximum.reduceat(ys, starts).tolist(),
    )


def _range(values: Sequence[float], axis: Axis) -> tuple[list[float], float, float]:
    """Ticks, and from where to where the axis goes: a little past the values, never past 0 for no reason."""
    low, high = min(values), max(values)
    if axis.from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    largest = max(abs(high), abs(low))
    if high - low <= max(1e-6 * largest, 1e-12):
        around = 0.02 * largest if largest > 1e-12 else 1.0
        low, high = low - around, high + around
    unit = 1.0
    if axis.scale == "bytes":
        unit = next((unit for unit, _ in _SUFFIXES["bytes"] if high >= unit), 1.0)
    pad = (high - low) * 0.03
    low, high = (low if axis.from_zero and low == 0 else low - pad), high + pad
    ticks = [
        tick * unit for tick in _ticks(low / unit, high / unit, 7, 1.0 if axis.scale == "thousands" else 0.0)
    ]
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    return ticks, low, high


def _ticks(low: float, high: float, about: int, least_step: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high]; at least two, perhaps past the ends."""
    raw = max((high - low) / about, least_step)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last <= first:
        first, last = math.floor(low / step), math.ceil(high / step)
    return [position * step for position in range(first, last + 1)]


def _axes(frame: _Frame, x_axis: Axis, y_axis: Axis) -> list[str]:
    marks = []
    for value, label in zip(frame.y_ticks, tick_labels(frame.y_ticks, y_axis.scale), strict=True):
        y = frame.y(value)
        marks.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 4:.1f}">{escape(label)}</text>')
    marks.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{BASE}" y2="{BASE}"/>')
    for value, label in zip(frame.x_ticks, tick_labels(frame.x_ticks, x_axis.scale), strict=True):
        x = frame.x(value)
        marks.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{BASE}" y2="{BASE + 4}"/>')
        marks.append(f'<text class="tick middle" x="{x:.1f}" y="{BASE + 18}">{escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(f'<text class="tick middle" x="{middle}" y="{HEIGHT - 5}">{escape(x_axis.title)}</text>')
    return marks


def _draw(line: _Line, frame: _Frame) -> list[str]:
    colour = line.series.colour
    xs = [frame.x(x) for x in line.x]
    path = " ".join(f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.y, strict=True))
    if line.series.dashed:
        return [f'<polyline class="reference" points="{path}"/>']
    drawn = []
    if line.spread:
        upper = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.high, strict=True)]
        lower = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.low, strict=True)]
        drawn.append(f'<polygon class="band c{colour}" points="{" ".join(upper + lower[::-1])}"/>')
    drawn.append(f'<polyline class="line c{colour}" points="{path}"/>')
    if len(xs) <= MAX_MARKS:
        for x, y in zip(xs, line.y, strict=True):
            drawn.append(f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{frame.y(y):.1f}" r="3"/>')
    return drawn


def _readings(line: _Line, frame: _Frame, x_axis: Axis, y_axis: Axis) -> list[list[Any]]:
    pairs = zip(line.x, line.y, strict=True)
    return [[round(frame.x(x), 1), x_axis.show(x), y_axis.show(y)] for x, y in pairs]


def _legend(lines: Sequence[_Line]) -> str:
    items = []
    for line in lines:
        if line.series.dashed:
            items.append(f'<span><i class="key dashed"></i>{escape(line.series.name)}</span>')
        elif len(lines) > 1:
            items.append(f'<span><i class="key c{line.series.colour}"></i>{escape(line.series.name)}</span>')
        if line.spread:
            items.append(f'<span><i class="key band c{line.series.colour}"></i>least to greatest</span>')
    return f'<p class="legend">{"".join(items)}</p>' if items else ""


def _card(title: str, unit: str, legend: str, body: str) -> str:
    return (
        f'<figure class="card"><figcaption><b>{escape(title)}</b> <small>{escape(unit)}</small></figcaption>'
        f"{legend}{body}</figure>"
    )
