"""Reads the files that a run has written so far. Missing or damaged files become notes, not errors."""

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
        name: the name of the directory.
        config: the text of ``config.toml``, with masked secrets; None if the file is missing.
        settings: the parsed ``config``; empty if it cannot be parsed.
        training: training lines of ``metrics.jsonl``, steps ascending.
        evaluations: evaluation lines by split, steps ascending; if there are none, the metrics of the summary.
        summary: None while the run continues.
        events: the timeline, by start.
        totals_s: seconds by phase over the whole run; the timeline may only hold the beginning of the run.
        services: True if the plan has processes other than trainers. Then updates may be late or lost.
        notes: one sentence for each missing or damaged file.
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
        RunDirectoryError: the directory does not exist, or has neither ``config.toml`` nor ``metrics.jsonl``.
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
    """Checks that a directory has ``config.toml``, ``metrics.jsonl`` or one of ``others``.

    Raises:
        RunDirectoryError: the message describes the path.
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
    """Copies a config value. Masks its secrets in the same way as :attr:`RunRecord.config`."""
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
        # A resumed run repeats the steps after its checkpoint. The later line counts.
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
    titles: dict[Any, str] = {}  # all processes except the first, whose phases represent the run
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
    """The parsed text, or None if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
