"""``timeline.json``: what every process of a run did when, in Chrome's trace format; Perfetto opens it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from girih.runs.files import write_whole

Events = Sequence[tuple[str, float, float]]
"""(name, start in seconds of ``time.perf_counter``, seconds)."""

BESIDE = frozenset({"allreduce"})
"""Spans that go on while others of the same process do, each other included, so that they need tracks of their own."""


def write_timeline(path: Path, processes: Mapping[str, Events], totals_s: Mapping[str, float]) -> None:
    """Writes the spans of some processes, by title; those of the first one come first.

    Args:
        totals_s: seconds of each phase of the first process, over the whole run.
    """
    origin = min((start for events in processes.values() for _, start, _ in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for number, (title, events) in enumerate(processes.items()):
        trace.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": title}})
        free_us: list[int] = []  # from when on each track of those beside is
        for name, start, seconds in events:
            begin, end = round((start - origin) * 1e6), round((start - origin + seconds) * 1e6)
            track = _free_track(free_us, begin, end) if name in BESIDE else 0
            trace.append(
                {"name": name, "ph": "X", "pid": number, "tid": track, "ts": begin, "dur": end - begin}
            )
    totals = {name: round(seconds, 6) for name, seconds in totals_s.items()}
    write_whole(path, json.dumps({"traceEvents": trace, "totals_s": totals}))


def _free_track(free_us: list[int], begin: int, end: int) -> int:
    """The first track beside the main one on which nothing goes on any more; it is taken."""
    track = next((number for number, free in enumerate(free_us) if free <= begin), len(free_us))
    free_us[track : track + 1] = [end]
    return 1 + track
