"""Charts of :mod:`girih.report.svg` as one SVG file that a page can show: titles, legends and colours inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from girih.report.svg import HEIGHT, WIDTH, Axis, Series, line_chart

HEAD, LEGEND_LINE, GAP = 30, 16, 16
STYLE = """
svg { --ground: #ffffff; --ink: #1b2422; --soft: #5b6865; --hair: #dfe5e3;
  --c1: #0f766e; --c2: #b45309; --c3: #1d4ed8; --c4: #be123c; --c5: #7c3aed; --c6: #4d7c0f; }
@media (prefers-color-scheme: dark) { svg { --ground: #101615; --ink: #e6ecea; --soft: #9aa8a4; --hair: #2b3634;
  --c1: #2dd4bf; --c2: #f5a742; --c3: #7aa8ff; --c4: #fb7185; --c5: #b79bff; --c6: #a3d94a; } }
.ground { fill: var(--ground); }
text { fill: var(--soft); font: 12px system-ui, sans-serif; } .title { fill: var(--ink); font-weight: 600; font-size: 14px; }
.middle { text-anchor: middle; } .end { text-anchor: end; } .rule { stroke: var(--hair); } .axis { stroke: var(--soft); }
.dot { fill: currentColor; } .line { fill: none; stroke: currentColor; stroke-width: 2; }
.band { fill: currentColor; opacity: .18; } .cursor { display: none; }
.reference { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
"""


@dataclass(frozen=True, slots=True)
class Chart:
    """What :func:`girih.report.svg.line_chart` takes."""

    title: str
    x_axis: Axis
    y_axis: Axis
    series: Sequence[Series]


def write_picture(file: Path, charts: Sequence[Chart]) -> None:
    """Draws charts side by side."""
    legend = LEGEND_LINE * max(len(chart.series) for chart in charts)
    width = len(charts) * (WIDTH + GAP) + GAP
    height = HEAD + legend + HEIGHT + GAP
    drawn = [_placed(chart, GAP + place * (WIDTH + GAP), HEAD + legend) for place, chart in enumerate(charts)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{STYLE}</style><rect class="ground" width="{width}" height="{height}"/>{"".join(drawn)}</svg>\n'
    )


def _placed(chart: Chart, x: int, y: int) -> str:
    card = line_chart(chart.title, chart.x_axis, chart.y_axis, chart.series)
    drawing = re.search(r"<svg.*?</svg>", card, re.DOTALL)
    if drawing is None:
        raise ValueError(f"{chart.title}: there is nothing to draw")
    body = re.sub(r' (role|aria-label|data-points)="[^"]*"', "", drawing[0])
    body = body.replace("<svg ", f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    head = f"{chart.title}: {chart.y_axis.title}"
    marks = [f'<text class="title" x="{x}" y="{HEAD - 10}">{escape(head)}</text>']
    for line, series in enumerate(chart.series):
        at = HEAD + LEGEND_LINE * line + 2
        colour = "reference" if series.dashed else f"line c{series.colour}"
        marks.append(f'<line class="{colour}" x1="{x}" x2="{x + 22}" y1="{at}" y2="{at}"/>')
        marks.append(f'<text x="{x + 30}" y="{at + 4}">{escape(series.name)}</text>')
    return "".join(marks) + body
