"""The state of a run, for ``girih status``, from its status files and the system, and the screen that shows it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypedDict

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from girih.errors import UserError
from girih.files.sealed import open_file
from girih.report.record import expect_run, parse_json
from girih.report.text import DASH, count, duration, fraction, is_number, percent, short, size
from girih.runs.directory import read_summary
from girih.telemetry.peer_status import BOTTLENECK, SILENT_S, cores_used, is_full
from girih.telemetry.stats import STALENESS
from girih.telemetry.status_file import LIVE, ProcessStatus, num_cores, read_all, state_of


class RunStatus(TypedDict):
    """The state of a run; see :func:`status_of`."""

    run: str
    state: str
    processes: list[dict[str, object]]
    totals: dict[str, object]
    bottleneck: dict[str, object] | None
    cores: dict[str, object]
    record: dict[str, object] | None
    summary: dict[str, Any] | None


def status_of(run: Path) -> RunStatus:
    """The state of a run, as plain values for JSON.

    Returns:
        A mapping with these keys:

        - ``run``: the run directory.
        - ``state``: "running"; "silent" if processes exist but none reports; "killed" if all are gone without a
          summary; "ended"; or "stopped" if there are no processes and no summary.
        - ``processes``: the result of :func:`_process` for each.
        - ``totals``: sums over the processes.
        - ``bottleneck``: role, index and busy share of the busiest process; None if all shares are below
          :data:`BOTTLENECK`.
        - ``cores``: of this host: how many are ``used`` and ``there``, and whether it is ``full``.
        - ``record``: the last training line of ``metrics.jsonl``.
        - ``summary``: the summary, or None.

    Raises:
        RunDirectoryError: not a run directory, or its summary is damaged.
    """
    expect_run(run, LIVE)
    shown, processes, now = [], [], time.time()
    for each in read_all(run):
        with contextlib.suppress(TypeError, ValueError, AttributeError):  # damaged numbers
            processes.append(_process(each, now))
            shown.append(each)
    summary = read_summary(run)
    used = cores_used(each for each, told in zip(shown, processes, strict=True) if told["state"] == "running")
    return {
        "run": str(run),
        "state": _state(processes, summary),
        "processes": processes,
        "totals": _totals(processes),
        "bottleneck": _bottleneck(processes),
        "cores": {"used": used, "there": num_cores(), "full": is_full(used)},
        "record": _last_record(run / "metrics.jsonl"),
        "summary": summary,
    }


def _process(shown: ProcessStatus, now: float) -> dict[str, object]:
    """Returns one process as plain values. Unknown values are None. So are the rates of a process that does not run."""
    state, rows = _state_of(shown, now), shown.live("rows")
    runs = state == "running"
    staleness = {
        int(value): times for value, times in shown.now["stats"]["histograms"].get(STALENESS, {}).items()
    }
    batches = sum(staleness.values())
    queues: Mapping[str, int] = shown.live("queues", {})
    return {
        "role": shown.role,
        "index": shown.index,
        "pid": shown.pid,
        "host": shown.host,
        "incarnation": shown.incarnation,
        "state": state,
        "up_s": shown.now["at_s"] - shown.begun_s,
        "silent_s": max(0.0, now - shown.now["at_s"]),
        "metrics": shown.endpoint or None,
        "steps": shown.live("steps"),
        "samples_per_s": shown.per_second("examples") if runs else None,
        "staleness_mean": sum(value * times for value, times in staleness.items()) / batches
        if batches
        else None,
        "staleness_max": max(staleness, default=None),
        "queues": dict(queues),
        "rows": None if rows is None else sum(rows.values()),
        "rss_bytes": shown.now["rss_bytes"],
        "cpu_cores": shown.cpu_cores if runs else None,
        "busy": shown.busy if runs else None,
        "lost_updates": shown.counter("lost_updates"),
        "lost_calls": shown.live("lost_calls", 0),
        "retries": shown.live("retries", 0),
    }


def _state_of(shown: ProcessStatus, now: float) -> str:
    """Returns "running", "silent" if it reports nothing (for example, if it is stopped), or "gone"."""
    if shown.host == socket.gethostname():
        state = state_of(shown.pid, shown.start)
        if state != "running":
            return "silent" if state == "stopped" else "gone"
    return "running" if now - shown.now["at_s"] < SILENT_S else "silent"


def _state(processes: list[dict[str, object]], summary: Mapping[str, object] | None) -> str:
    states = {process["state"] for process in processes}
    if "running" in states:
        return "running"
    if "silent" in states:
        return "silent"
    if summary is not None:
        return "ended"
    return "killed" if processes else "stopped"


def _totals(processes: list[dict[str, object]]) -> dict[str, object]:
    """Sums over processes. None if no process reports the value."""
    totals: dict[str, object] = {}
    for name in ("samples_per_s", "rows", "rss_bytes", "cpu_cores", "lost_updates", "incarnation"):
        there = [value for p in processes if is_number(value := p[name]) and p["state"] != "gone"]
        totals["restarts" if name == "incarnation" else name] = sum(there) if there else None
    return totals


def _bottleneck(processes: list[dict[str, object]]) -> dict[str, object] | None:
    """The process with the largest busy share, while the run trains. None if all processes wait much of the time."""
    if not any(process["samples_per_s"] for process in processes):
        return None
    shares = [busy if is_number(busy := process["busy"]) else 0.0 for process in processes]
    if max(shares) < BOTTLENECK:
        return None
    busiest = processes[shares.index(max(shares))]
    return {name: busiest[name] for name in ("role", "index", "busy")}


def _last_record(file: Path) -> dict[str, object] | None:
    """Finds the last training line near the end of the file."""
    try:
        with open_file(file) as lines:
            lines.seek(max(0, file.stat().st_size - (1 << 16)))
            tail = lines.read().decode(errors="replace").splitlines()
    except (OSError, UserError):
        return None
    for line in reversed(tail):
        record = parse_json(line)  # the first line may be incomplete
        if isinstance(record, dict) and "split" not in record:
            return record
    return None


SAID = {
    "running": "running",
    "silent": "silent: its processes exist, but report nothing",
    "killed": "killed: all its processes are gone",
    "ended": "ended",
    "stopped": "stopped before its end",
}


def status_screen(status: RunStatus, width: int) -> RenderableType:
    """Makes the screen for a result of :func:`girih.report.status.status_of`, with the columns that fit ``width``."""
    lines = []
    if (busiest := status["bottleneck"]) is not None:
        name = f"{busiest['role']} {busiest['index']}"
        lines.append(f"bottleneck: {name}, which works {percent(busiest['busy'])} of the time")
    elif status["totals"]["samples_per_s"]:
        lines.append(f"bottleneck: none; no process works {percent(BOTTLENECK)} of the time")
    if status["cores"]["full"] and status["totals"]["samples_per_s"]:
        there = count(status["cores"]["there"])
        lines.append(f"all cores of this host ({there}) are in use: more processes would have to share them")
    for process in () if status["state"] == "killed" else status["processes"]:
        if process["state"] != "running":
            why = f"silent for {duration(process['silent_s'])}" if process["state"] == "silent" else "gone"
            lines.append(f"{process['role']} {process['index']} (process {process['pid']}) is {why}")
    if status["state"] in ("killed", "stopped"):
        lines.append(_way_on(status["run"]))
    table = [_table(status, width)] if status["processes"] else []
    return Group(_line(f"{status['run']}: {_headline(status)}"), *table, *map(_line, lines))


def _way_on(run: str) -> str:
    from girih.checkpoint import find  # loads numba

    try:
        find(run)
    except UserError:
        return "there is no checkpoint to go on from: train again, in another directory"
    if not Path(run, "config.toml").exists():
        return f"go on with: a program that calls trainer.load({run!r}) before fit"
    return f"go on with: girih train {run}/config.toml --run {run} --resume"


def _line(text: str) -> Text:
    """A line that users can copy as a whole."""
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
    totals = {**status["totals"], "incarnation": count(status["totals"]["restarts"])}
    names = [name for name in COLUMNS if name not in left_out]
    table = Table(show_footer=True)
    for name in names:
        is_text = name in ("role", "state")
        total = COLUMNS[name](totals) if name in SUMMED else ""
        table.add_column(name, total, justify="left" if is_text else "right", no_wrap=True)
    for process in status["processes"]:
        style = "" if process["state"] == "running" else "bold red"
        table.add_row(*(COLUMNS[name](process) for name in names), style=style)
    return table


def _staleness(process: Mapping[str, object]) -> str:
    if process["staleness_max"] is None:
        return DASH
    return f"{process['staleness_mean']:.1f} ≤ {process['staleness_max']}"


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
    "cores": lambda process: f"{cores:.2f}" if is_number(cores := process["cpu_cores"]) else DASH,
    "busy": lambda process: percent(process["busy"]),
    "lost": lambda process: count(process["lost_updates"]),
}
SUMMED = ("life", "samples/s", "rows", "memory", "cores", "lost")
"""Columns with a sum below them."""
LEAST = ("cores", "up", "steps", "life", "queue", "rows", "lost", "staleness", "busy")
"""Columns to drop first on a narrow screen. The columns role, pid, state, samples/s and memory always stay."""
_WIDE = Console(width=1000)
