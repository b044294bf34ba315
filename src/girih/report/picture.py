"""Draws a tagged operator graph: a lane for each device, operators from top to bottom in execution order.

The file is SVG, written here: boxes and curves. Each box has a title with the reason for its placement.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from girih.planner.operators import OperatorGraph
from girih.planner.tagging.tag import Tagged
from girih.report.text import size

BOX, HEIGHT, GAP, ROW, HEAD, MARGIN = 132, 34, 14, 62, 74, 16
FILLS = ("#e8eef7", "#fbe9d7", "#e3f1e3", "#f3e3f1", "#f7f2d9", "#e0f1f3", "#f6e2e2", "#ececec")
LEAST = 2
"""The minimum width of a lane, in boxes: its heading needs this space."""
_LETTERS = 20


def picture(graph: OperatorGraph, tagged: Tagged) -> str:
    """Returns the SVG of a tagged graph."""
    levels = _levels(graph)
    cells: dict[tuple[str, int], list[str]] = {}
    for operator in graph.operators:
        cells.setdefault((tagged.tagging[operator.name], levels[operator.name]), []).append(operator.name)
    lanes, begins, left = list(tagged.utilization), dict[str, int](), MARGIN
    widths = {}
    for lane in lanes:
        most = max((len(names) for (device, _), names in cells.items() if device == lane), default=1)
        most = max(most, LEAST)
        begins[lane], widths[lane] = left, most * (BOX + GAP) + GAP
        left += widths[lane] + MARGIN
    height = HEAD + (1 + max(levels.values(), default=0)) * ROW + MARGIN
    places = {
        name: (begins[device] + GAP + number * (BOX + GAP), HEAD + level * ROW)
        for (device, level), names in cells.items()
        for number, name in enumerate(names)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left} {height}" width="{left}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{left}" height="{height}" fill="white"/>',
    ]
    for number, lane in enumerate(lanes):
        parts += _lane(lane, begins[lane], widths[lane], height, FILLS[number % len(FILLS)], tagged)
    for edge in graph.edges:
        crosses = tagged.tagging[edge.producer] != tagged.tagging[edge.consumer]
        parts.append(_edge(places[edge.producer], places[edge.consumer], edge.bytes_per_example, crosses))
    for operator in graph.operators:
        told = f"{operator.name} ({operator.kind}) on {tagged.tagging[operator.name]}: {tagged.reasons[operator.name]}"
        parameters = f"; {size(operator.parameter_bytes)} of parameters" if operator.parameter_bytes else ""
        parts += _box(operator.name, operator.kind, told + parameters, *places[operator.name])
    return "\n".join([*parts, "</svg>", ""])


def _levels(graph: OperatorGraph) -> dict[str, int]:
    """Maps each operator to the number of operators before it on the longest path to it."""
    levels = {operator.name: 0 for operator in graph.operators}
    readers: Mapping[str, list[str]] = {name: [] for name in levels}
    for edge in graph.edges:
        readers[edge.producer].append(edge.consumer)
    for name in levels:  # the operators are in topological order
        for reader in readers[name]:
            levels[reader] = max(levels[reader], levels[name] + 1)
    return levels


def _lane(lane: str, x: int, width: int, height: int, fill: str, tagged: Tagged) -> list[str]:
    used = tagged.utilization[lane]
    memory = f", memory {used.memory:.0%}" if used.memory else ""
    return [
        f'<rect x="{x}" y="{MARGIN}" width="{width}" height="{height - 2 * MARGIN}" rx="6" fill="{fill}"/>',
        f'<text x="{x + GAP}" y="{MARGIN + 20}" font-size="14" font-weight="bold">{escape(lane)}</text>',
        f'<text x="{x + GAP}" y="{MARGIN + 38}" fill="#444">CPU {used.cpu:.0%}, network {used.network:.0%}{memory}</text>',
    ]


def _edge(start: tuple[int, int], end: tuple[int, int], num_bytes: float, crosses: bool) -> str:
    (x1, y1), (x2, y2) = (start[0] + BOX // 2, start[1] + HEIGHT), (end[0] + BOX // 2, end[1])
    bend = (y2 - y1) / 2
    stroke = 'stroke="#c0392b" stroke-width="1.6"' if crosses else 'stroke="#888"'
    return (
        f'<path d="M {x1} {y1} C {x1} {y1 + bend:.0f}, {x2} {y2 - bend:.0f}, {x2} {y2}" fill="none" {stroke}>'
        f"<title>{size(num_bytes)} per example</title></path>"
    )


def _box(name: str, kind: str, tooltip: str, x: int, y: int) -> list[str]:
    return [
        f'<g><title>{escape(tooltip)}</title><rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="4" fill="white"'
        ' stroke="#555"/>',
        f'<text x="{x + BOX // 2}" y="{y + 14}" text-anchor="middle">{escape(_short(name))}</text>',
        f'<text x="{x + BOX // 2}" y="{y + 27}" text-anchor="middle" fill="#666" font-size="9.5">{escape(_short(kind))}</text></g>',
    ]


def _short(text: str) -> str:
    """The last letters of a name that is longer than a box."""
    return text if len(text) <= _LETTERS else f"…{text[1 - _LETTERS :]}"
