"""``timeline.json``: what every process of a run did when, in Chrome's trace format; Perfetto opens it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from girih.files import write_whole

Events = Sequence[tuple[str, float, float]]
"""(name, start in seconds of ``time.perf_counter``, seconds)."""

BESIDE = frozenset({"allreduce"})
"""Spans that go on while others of the same process do, so that they need a track of their own."""


def write_timeline(path: Path, processes: Mapping[str, Events], totals_s: Mapping[str, float]) -> None:
    """Writes the spans of some processes, by title; those of the first one come first.

    Args:
        totals_s: seconds of each phase of the first process, over the whole run.
    """
    origin = min((events[0][1] for events in processes.values() if events), default=0.0)
    trace: list[dict[str, Any]] = []
    for number, (title, events) in enumerate(processes.items()):
        trace.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": title}})
        for name, start, seconds in events:
            trace.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": number,
                    "tid": int(name in BESIDE),
                    "ts": round((start - origin) * 1e6),
                    "dur": round(seconds * 1e6),
                }
            )
    totals = {name: round(seconds, 6) for name, seconds in totals_s.items()}
    write_whole(path, json.dumps({"traceEvents": trace, "totals_s": totals}))
