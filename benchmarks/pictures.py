"""Line charts side by side as one SVG file that a page can show, in its reader's light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import vl_convert

LIGHT = ("#0f766e", "#b45309", "#1d4ed8", "#be123c", "#7c3aed", "#4d7c0f")
DARK = ("#2dd4bf", "#f5a742", "#7aa8ff", "#fb7185", "#b79bff", "#a3d94a")
GROUND, INK, HAIR = ("#ffffff", "#101615"), ("#5b6865", "#9aa8a4"), ("#dfe5e3", "#2b3634")


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines of (x, y) by name, under a title."""

    title: str
    x_title: str
    y_title: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def write_picture(file: Path, charts: Sequence[Chart]) -> None:
    """Draws charts side by side."""
    spec = alt.hconcat(*map(_drawn, charts)).resolve_scale(color="independent").configure(
        background=GROUND[0],
        font="system-ui, sans-serif",
        padding=16,
        view=alt.ViewConfig(stroke=None),
        axis=alt.AxisConfig(labelColor=INK[0], titleColor=INK[0], domainColor=INK[0], gridColor=HAIR[0]),
        legend=alt.LegendConfig(orient="top", direction="vertical", labelColor=INK[0], labelLimit=400, title=None),
        title=alt.TitleConfig(anchor="start", color=INK[0]),
    )  # fmt: skip
    svg = vl_convert.vegalite_to_svg(spec.to_dict())
    pairs = [GROUND, INK, HAIR, *zip(LIGHT, DARK, strict=True)]
    rules = "".join(f'[fill="{a}"]{{fill:{b}}}[stroke="{a}"]{{stroke:{b}}}' for a, b in pairs)
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    head, end, body = svg.partition(">")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(head + end + style + body + "\n")


def _drawn(chart: Chart) -> alt.Chart:
    rows = [{"x": x, "y": y, "series": name} for name, points in chart.series.items() for x, y in points]
    if not rows:
        raise ValueError(f"{chart.title}: there is nothing to draw")
    names = list(chart.series)
    colours = alt.Scale(domain=names, range=[LIGHT[at % len(LIGHT)] for at in range(len(names))])
    drawn = alt.Chart(alt.InlineData(values=rows), width=386, height=216).mark_line(point=True)
    return drawn.encode(
        x=alt.X("x:Q", title=chart.x_title, scale=alt.Scale(zero=False), axis=alt.Axis(grid=False)),
        y=alt.Y("y:Q", title=None, scale=alt.Scale(zero=False)),
        color=alt.Color("series:N", scale=colours),
    ).properties(title=f"{chart.title}: {chart.y_title}")
