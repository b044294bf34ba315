"""Reads what a run has written so far; what is missing or damaged becomes a note, not an error."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from girih.config import parse_toml
from girih.errors import RunDirectoryError, UserError
from girih.files.sealed import open_file
from girih.report.text import is_number

_SECRETS = "(?:secret|password|token|access_key|api_key)"
_SECRET_VALUE = re.compile(rf"""(?i)({_SECRETS}["']?\s*=\s*)("[^"\n]*"|'[^'\n]*')""")
_SECRET_NAME = re.compile(rf"(?i){_SECRETS}$")
_SECRET_IN_ADDRESS = re.compile(r"(://[^/\s:@\"']*:)[^@\s/\"']+@")


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A span of the timeline."""

    name: str
    thread: str
    start_us: float
    duration_us: float


@dataclass(slots=True)
class RunRecord:
    """The content of a run directory.

    Attributes:
        name: the directory's.
        config: the text of ``config.toml``, secrets masked; None where there is none.
        settings: the same, parsed; empty where it cannot be.
        training: training lines of ``metrics.jsonl``, steps ascending.
        evaluations: evaluation lines by split, steps ascending; if there are none, the metrics of the summary.
        summary: None while the run goes on.
        events: the timeline, by start.
        totals_s: seconds by phase over the whole run, of which the timeline may hold only the beginning.
        services: whether the plan has processes beside trainers, which is when updates may be late or lost.
        notes: what is missing or damaged, one sentence each.
    """

    name: str
    config: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    training: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    summary: dict[str, Any] | None = None
    events: list[TimelineSpan] = field(default_factory=list)
    totals_s: dict[str, float] = field(default_factory=dict)
    services: bool = False
    notes: list[str] = field(default_factory=list)


def read_run(directory: Path) -> RunRecord:
    """Reads a run directory, of a finished or a running run.

    Raises:
        RunDirectoryError: no such directory, or neither ``config.toml`` nor ``metrics.jsonl`` in it.
    """
    expect_run(directory)
    run = RunRecord(name=directory.resolve().name)
    names = ("config.toml", "metrics.jsonl", "summary.json", "timeline.json", "plan.json")
    settings, metrics, summary, timeline, plan_text = (_text_of(directory / name) for name in names)
    _read_config(run, settings)
    _read_metrics(run, metrics or "")
    _read_summary(run, summary)
    if not run.evaluations:
        run.notes.append("Nothing was evaluated yet: no curves of metrics.")
    _read_timeline(run, timeline)
    plan = parse_json(plan_text or "")
    roles = plan.get("roles") if isinstance(plan, dict) else None
    run.services = isinstance(roles, dict) and bool(set(roles) - {"trainer"})
    return run


def expect_run(directory: Path, *others: str) -> None:
    """Refuses what is no run directory: it has neither ``config.toml`` nor ``metrics.jsonl``, nor other names.

    Raises:
        RunDirectoryError: says what there is.
    """
    if not directory.is_dir():
        fault = "is a file" if directory.exists() else "does not exist"
        raise RunDirectoryError(
            f"{directory}: {fault}; give a run directory, as `girih train --run` makes it"
        )
    if not any((directory / name).exists() for name in ("config.toml", "metrics.jsonl", *others)):
        fault = "not a run directory (no config.toml or metrics.jsonl in it)"
        raise RunDirectoryError(f"{directory}: {fault}; give one that `girih train --run` made")


def masked(value: object, key: str = "") -> object:
    """A copy of a value of a config, its secrets masked as in :attr:`RunRecord.config`."""
    if isinstance(value, dict):
        return {name: masked(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [masked(item, key) for item in value]
    if not isinstance(value, str):
        return value
    return "***" if _SECRET_NAME.search(key) else _SECRET_IN_ADDRESS.sub(r"\1***@", value)


def _read_config(run: RunRecord, text: str | None) -> None:
    if text is None:
        run.notes.append("There is no config.toml: the run was started from Python.")
        return
    run.config = _SECRET_IN_ADDRESS.sub(r"\1***@", _SECRET_VALUE.sub(r'\1"***"', text))
    try:
        run.settings = parse_toml(text)
    except (RecursionError, ValueError) as error:
        run.notes.append(f"config.toml is not valid TOML ({error or 'too deep'}).")


def _read_metrics(run: RunRecord, text: str) -> None:
    num_damaged = 0
    for line in filter(str.strip, text.splitlines()):
        record = parse_json(line)
        if not isinstance(record, dict) or not is_number(record.get("step")):
            num_damaged += 1
            continue
        split = record.get("split")
        lines = run.training if split is None else run.evaluations.setdefault(str(split), [])
        # A resumed run repeats the steps after its checkpoint; the later line is the one that counts.
        while lines and lines[-1]["step"] >= record["step"]:
            lines.pop()
        lines.append(record)
    if num_damaged:
        lines_are = "line is" if num_damaged == 1 else "lines are"
        run.notes.append(f"{num_damaged} {lines_are} damaged in metrics.jsonl and left out.")
    if not run.training:
        run.notes.append("There is no training record yet in metrics.jsonl: no curves.")


def _read_summary(run: RunRecord, text: str | None) -> None:
    if text is None:
        run.notes.append("There is no summary.json: the run goes on, or was stopped. Numbers are its latest.")
    elif isinstance(summary := parse_json(text), dict):
        run.summary = summary
        labels, split, step = (summary.get(key) for key in ("by_label", "evaluated_on", "steps"))
        first = next(iter(labels.values()), None) if isinstance(labels, dict) else None
        if not run.evaluations and isinstance(first, dict) and isinstance(split, str) and is_number(step):
            run.evaluations[split] = [{**first, "step": step, "examples": summary.get("num_examples")}]
    else:
        run.notes.append("summary.json is damaged and left out.")


def _read_timeline(run: RunRecord, text: str | None) -> None:
    if text is None:
        run.notes.append("There is no timeline.json: no timeline.")
        return
    trace = parse_json(text)
    if isinstance(trace, dict):
        totals = trace.get("totals_s")
        if isinstance(totals, dict):
            run.totals_s = {name: float(total) for name, total in totals.items() if is_number(total)}
        trace = trace.get("traceEvents")
    if not isinstance(trace, list):
        run.notes.append("timeline.json is damaged and left out.")
        return
    titles: dict[Any, str] = {}  # of all processes but the first, whose phases stand for the run's
    for event in trace:
        if not isinstance(event, dict):
            continue
        if event.get("name") == "process_name" and event.get("pid"):
            titles[event["pid"]] = f"{(event.get('args') or {}).get('name', '?')}: "
        start, length = event.get("ts"), event.get("dur")
        if event.get("ph") == "X" and is_number(start) and is_number(length):
            name = titles.get(event.get("pid"), "") + str(event.get("name", ""))
            run.events.append(TimelineSpan(name, str(event.get("tid", "")), start, length))
    run.events.sort(key=lambda event: (event.start_us, -event.duration_us))
    if not run.events:
        run.notes.append("timeline.json holds no spans: no timeline.")


def _text_of(path: Path) -> str | None:
    try:
        with open_file(path) as file:
            return file.read().decode(errors="replace")
    except (MemoryError, UserError):
        return None


def parse_json(text: str) -> object:
    """The parsed text; None where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
