"""``girih status`` as one screen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from girih.report.status import RunStatus
from girih.report.text import DASH, count, duration, fraction, is_number, percent, short, size
from girih.telemetry.peer_status import BOTTLENECK

SAID = {
    "running": "running",
    "silent": "silent: its processes are there, and say nothing",
    "killed": "killed: all its processes are gone",
    "ended": "ended",
    "stopped": "stopped before its end",
}


def status_screen(status: RunStatus, width: int) -> RenderableType:
    """The screen for a status of :func:`girih.report.status.status_of`, with the columns that ``width`` has room for."""
    shown: list[RenderableType] = [_line(f"{status['run']}: {_headline(status)}")]
    if status["processes"]:
        shown.append(_table(status, width))
    if (busiest := status["bottleneck"]) is not None:
        name = f"{busiest['role']} {busiest['index']}"
        shown.append(_line(f"bottleneck: {name}, which works {percent(busiest['busy'])} of the time"))
    elif status["totals"]["samples_per_s"]:
        shown.append(_line(f"bottleneck: none; no process works {percent(BOTTLENECK)} of the time"))
    if status["cores"]["full"] and status["totals"]["samples_per_s"]:
        there = count(status["cores"]["there"])
        shown.append(
            _line(f"all cores of this host ({there}) are in use: more processes would have to share them")
        )
    missing = [p for p in status["processes"] if p["state"] != "running"]
    for process in missing if status["state"] != "killed" else ():
        why = f"silent for {duration(process['silent_s'])}" if process["state"] == "silent" else "gone"
        shown.append(_line(f"{process['role']} {process['index']} (process {process['pid']}) is {why}"))
    if status["state"] in ("killed", "stopped"):
        run = status["run"]
        again = f"girih train {run}/config.toml --run {run} --resume"
        if not Path(run, "config.toml").exists():
            again = f"a program that calls trainer.load({run!r}) before fit"
        shown.append(_line(f"go on with: {again}"))
    return Group(*shown)


def _line(text: str) -> Text:
    """A line that can be copied whole."""
    return Text(text, no_wrap=True, overflow="ignore")


def _headline(status: RunStatus) -> str:
    parts, record, summary = [SAID[status["state"]]], status["record"], status["summary"]
    if status["state"] == "ended" and summary is not None:
        parts += [
            f"{count(summary['steps'])} steps",
            f"{count(summary['num_examples'])} examples",
            f"{short(summary['samples_per_s'])} samples/s",
            f"AUC {fraction(summary['auc'])}",
            f"logloss {fraction(summary['logloss'])}",
            f"{count(summary['num_rows'])} rows",
            f"{count(summary['lost_updates'])} lost updates",
        ]
    elif record is not None:
        parts += [f"step {count(record['step'])}", f"loss {fraction(record['loss'])}"]
    return ", ".join(parts)


def _table(status: RunStatus, width: int) -> Table:
    left_out: list[str] = []
    for name in ("", *LEAST):
        left_out.append(name)
        table = _table_without(status, left_out)
        if Measurement.get(_WIDE, _WIDE.options, table).maximum <= width:
            break
    return table


def _table_without(status: RunStatus, left_out: Collection[str]) -> Table:
    totals = {name: _total(status["totals"], name) for name in COLUMNS}
    names = [name for name in COLUMNS if name not in left_out]
    table = Table(show_footer=True)
    for name in names:
        is_text = name in ("role", "state")
        table.add_column(name, totals[name], justify="left" if is_text else "right", no_wrap=True)
    for process in status["processes"]:
        style = "" if process["state"] == "running" else "bold red"
        table.add_row(*(COLUMNS[name](process) for name in names), style=style)
    return table


def _total(totals: Mapping[str, object], name: str) -> str:
    """The sum below a column, where it has one."""
    shown: dict[str, Callable[[], str]] = {
        "life": lambda: count(totals["restarts"]),
        "samples/s": lambda: short(totals["samples_per_s"]),
        "rows": lambda: short(totals["rows"]),
        "memory": lambda: size(totals["rss_bytes"]),
        "cores": lambda: _cores(totals["cpu_cores"]),
        "lost": lambda: count(totals["lost_updates"]),
    }
    return shown[name]() if name in shown else ""


def _staleness(process: Mapping[str, object]) -> str:
    if process["staleness_max"] is None:
        return DASH
    return f"{process['staleness_mean']:.1f} ≤ {process['staleness_max']}"


def _cores(cores: object) -> str:
    return f"{cores:.2f}" if is_number(cores) else DASH


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "role": lambda process: f"{process['role']} {process['index']}",
    "pid": lambda process: str(process["pid"]),
    "life": lambda process: str(process["incarnation"]),
    "up": lambda process: duration(process["up_s"]),
    "state": lambda process: str(process["state"]),
    "steps": lambda process: count(process["steps"]),
    "samples/s": lambda process: short(process["samples_per_s"]),
    "staleness": _staleness,
    "queue": lambda process: " ".join(f"{name} {n}" for name, n in process["queues"].items()) or DASH,
    "rows": lambda process: short(process["rows"]),
    "memory": lambda process: size(process["rss_bytes"]),
    "cores": lambda process: _cores(process["cpu_cores"]),
    "busy": lambda process: percent(process["busy"]),
    "lost": lambda process: count(process["lost_updates"]),
}
LEAST = ("cores", "up", "steps", "life", "queue", "rows", "lost", "staleness", "busy")
"""Columns that go first where there is no room; role, pid, state, samples/s and memory stay."""
_WIDE = Console(width=1000)
