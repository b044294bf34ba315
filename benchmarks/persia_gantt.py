"""Persia's Figure 3: Gantt charts of synchronous, asynchronous and hybrid, drawn from real runs.

A lane a process, the same span of time for each strategy. Every trainer is a host of its own, joined by slow links,
where that can be made (see ``persia_wire``); else all processes are on this machine's shared memory.

    girih bench persia_gantt --svg docs/persia-gantt.svg
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import fleet
import harness
import network

STRATEGIES = ("synchronous", "asynchronous", "hybrid")
COLOURS = {
    "wait": "#d9d9d9", "communicate": "#e8913a", "forward": "#5b8def", "backward": "#2f5bb7",
    "optimizer": "#8e6bbf", "rows": "#4ca56b", "ids": "#b8b04a",
}  # fmt: skip
KINDS = {
    "read": "wait", "wait for rows": "wait", "wait for update": "wait", "pull": "communicate", "push": "communicate",
    "allreduce": "communicate", "forward": "forward", "backward": "backward", "apply": "optimizer",
    "lookup": "rows", "update": "rows", "pool": "rows", "scatter": "rows", "dedup": "ids", "unpack": "ids",
    "dispatch": "ids",
}  # fmt: skip
LABELS = {"communicate": "pull, push, all-reduce", "rows": "lookup, update, pool, scatter",
          "ids": "dispatch, dedup", "wait": "waits"}  # fmt: skip
LEFT, WIDTH, LANE, GAP, HEAD = 150, 900, 16, 5, 26
FIRST_STEP = 12


def main() -> None:
    parser = harness.parser("persia_gantt", __doc__)
    parser.add_argument("--svg", type=Path, default=Path("runs", "bench", "persia-gantt.svg"))
    parser.add_argument("--rate", default="1gbit", help="of the links; none: shared memory")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="examples of a trainer")
    parser.add_argument("--steps", type=int, default=3, help="of the slowest strategy that are drawn")
    options = parser.parse_args()
    report = harness.Report("persia_gantt", options)
    slow = options.rate != "none" and network.missing() is None
    timelines, runs = {}, {}
    with tempfile.TemporaryDirectory() as directory:
        config = fleet.write_task(Path(directory, "data"), rows=400_000, cardinality=500_000, zipf=None)
        for name in STRATEGIES:
            keep = Path(directory, name)
            names = ["s", *(f"t{rank}" for rank in range(options.trainers))]
            with network.network(names, options.rate) if slow else network.nowhere() as hosts:
                transport = ', transport = "tcp", staleness = 4' if name != "synchronous" and slow else ""
                strategy = f'strategy = {{name = "{name}", trainers = {options.trainers}{transport}}}'
                runs[name] = fleet.measure(
                    fleet.Plan(
                        str(config),
                        (strategy, f"data.batch_size = {options.batch * options.trainers}"),
                        warmup=16,
                        steps=8,
                        windows=1,
                        hosts=network.trainers_apart(hosts, options.trainers),
                        keep=str(keep),
                    )
                )
            timelines[name] = json.loads((keep / "timeline.json").read_text())["traceEvents"]
    options.svg.parent.mkdir(parents=True, exist_ok=True)
    options.svg.write_text(draw(timelines, options.steps))
    table = report.table("a step of the first trainer", {"strategy": "{}", "ms": "{:.0f}", **fleet.DISTURBED})
    for name, events in timelines.items():
        table.row({"strategy": name, "ms": _step_us(events) / 1e3, **fleet.disturbance(runs[name])})
    report.finish()


def draw(timelines: Mapping[str, Sequence[Mapping[str, Any]]], steps: int) -> str:
    """An SVG: for each strategy its processes' lanes, all over a window of one length, after the warm-up."""
    span_us = steps * max(_step_us(events) for events in timelines.values())
    marks, top = [_legend()], 40
    for name, events in timelines.items():
        titles = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
        begin = _begins(events)[FIRST_STEP]
        per_step = _step_us(events) / 1e3
        marks.append(
            f'<text class="head" x="0" y="{top + 14}">{escape(name)}: {per_step:.0f} ms a step</text>'
        )
        lanes = sorted({(e["pid"], e["tid"]) for e in events if e["ph"] == "X"})
        lanes.sort(key=lambda lane: (not titles[lane[0]].startswith("trainer"), titles[lane[0]], lane[1]))
        for row, (pid, track) in enumerate(lanes):
            y = top + HEAD + row * (LANE + GAP)
            title = titles[pid] if not track else "all-reduce"
            marks.append(f'<text class="lane" x="{LEFT - 8}" y="{y + 12}">{escape(title)}</text>')
            marks.append(f'<rect class="track" x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE}"/>')
            for event in events:
                if event["ph"] == "X" and (event["pid"], event["tid"]) == (pid, track):
                    marks += _bar(event, begin, span_us, y)
        top += HEAD + len(lanes) * (LANE + GAP) + 14
    for tick in range(6):
        x = LEFT + WIDTH * tick / 5
        marks.append(f'<text class="tick" x="{x:.0f}" y="{top + 8}">{span_us / 1e3 * tick / 5:.0f} ms</text>')
    style = (
        "text{font:12px sans-serif;fill:#222}.head{font-weight:bold}.lane{text-anchor:end;font-size:11px}"
        ".tick{text-anchor:middle;font-size:11px;fill:#555}.track{fill:#f5f5f5}"
    )
    size = f"0 0 {LEFT + WIDTH + 30} {top + 18}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" width="{LEFT + WIDTH + 30}" role="img">'
        f"<title>Gantt charts of {', '.join(timelines)}</title><style>{style}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(marks)}</svg>\n'
    )


def _bar(event: Mapping[str, Any], begin: float, span_us: float, y: int) -> list[str]:
    left = max(event["ts"] - begin, 0.0)
    right = min(event["ts"] + event["dur"] - begin, span_us)
    if right <= left:
        return []
    x, width = LEFT + left / span_us * WIDTH, max((right - left) / span_us * WIDTH, 0.4)
    told = f"{event['name']}: {event['dur'] / 1e3:.1f} ms"
    colour = COLOURS[KINDS.get(event["name"], "wait")]
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{colour}"><title>{told}</title></rect>'
    ]


def _legend() -> str:
    marks, x = [], LEFT
    for kind, colour in COLOURS.items():
        label = LABELS.get(kind, kind)
        marks.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        marks.append(f'<text x="{x + 17}" y="20">{escape(label)}</text>')
        x += 36 + 6.4 * len(label)
    return "".join(marks)


def _begins(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the first trainer began each step's forward pass."""
    first = next(e["pid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "trainer 0")
    return [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == first and e["name"] == "forward"]


def _step_us(events: Sequence[Mapping[str, Any]]) -> float:
    begins = _begins(events)[FIRST_STEP:]
    return (begins[-1] - begins[0]) / (len(begins) - 1)


if __name__ == "__main__":
    main()
