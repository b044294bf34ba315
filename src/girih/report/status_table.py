"""``girih status`` as one screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from girih.report.text import DASH, count, duration, fraction, percent, short, size

SAID = {
    "running": "running",
    "silent": "silent: its processes are there, and say nothing",
    "killed": "killed: all its processes are gone",
    "ended": "ended",
    "stopped": "stopped before its end",
}


def screen(status: Mapping[str, Any]) -> RenderableType:
    """The screen for a status of :func:`girih.report.status.status_of`."""
    shown: list[RenderableType] = [Text(f"{status['run']}: {_headline(status)}")]
    if status["processes"]:
        shown.append(_table(status))
    if (busiest := status["bottleneck"]) is not None:
        name = f"{busiest['role']} {busiest['index']}"
        shown.append(Text(f"bottleneck: {name}, which works {percent(busiest['busy'])} of the time"))
    missing = [p for p in status["processes"] if p["state"] != "running"]
    for process in missing if status["state"] != "killed" else ():
        why = f"silent for {duration(process['silent_s'])}" if process["state"] == "silent" else "gone"
        shown.append(Text(f"{process['role']} {process['index']} (process {process['pid']}) is {why}"))
    if status["state"] in ("killed", "stopped"):
        run = status["run"]
        shown.append(Text(f"go on with: girih train {run}/config.toml --run {run} --resume"))
    return Group(*shown)


def _headline(status: Mapping[str, Any]) -> str:
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


def _table(status: Mapping[str, Any]) -> Table:
    table, totals = Table(show_footer=True), status["totals"]
    columns = (
        ("role", ""), ("pid", ""), ("life", count(totals["restarts"])), ("up", ""), ("state", ""), ("steps", ""),
        ("samples/s", short(totals["samples_per_s"])), ("staleness", ""), ("queue", ""), ("rows", short(totals["rows"])),
        ("memory", size(totals["rss_bytes"])), ("cores", _cores(totals["cpu_cores"])), ("busy", ""),
        ("lost", count(totals["lost_updates"])),
    )  # fmt: skip
    for name, total in columns:
        is_text = name in ("role", "state")
        table.add_column(name, total, justify="left" if is_text else "right", no_wrap=True)
    for process in status["processes"]:
        table.add_row(
            f"{process['role']} {process['index']}",
            str(process["pid"]),
            str(process["incarnation"]),
            duration(process["up_s"]),
            Text(process["state"], style="" if process["state"] == "running" else "bold red"),
            count(process["steps"]),
            short(process["samples_per_s"]),
            _staleness(process),
            " ".join(f"{depth} {name}" for name, depth in process["queues"].items()) or DASH,
            short(process["rows"]),
            size(process["rss_bytes"]),
            _cores(process["cpu_cores"]),
            percent(process["busy"]),
            count(process["lost_updates"]),
        )
    return table


def _staleness(process: Mapping[str, Any]) -> str:
    if process["staleness_max"] is None:
        return DASH
    return f"{process['staleness_mean']:.1f} ≤ {process['staleness_max']}"


def _cores(cores: float | None) -> str:
    return DASH if cores is None else f"{cores:.2f}"
