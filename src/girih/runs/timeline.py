"""``timeline.json``: spans of every process of a run in Chrome's trace format, which Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from girih.comm.group import TrainerGroup
from girih.runs.files import write_whole
from girih.runs.stats import Stats

Events = Sequence[tuple[str, float, float]]
"""Spans: name, start (``time.perf_counter``) and length, both in seconds."""

BESIDE = frozenset(
    {
        "allreduce",
        "average",
        *(f"part {verb}" for verb in ("forward", "backward", "apply")),
        *(f"exchange {kind}" for kind in ("ids", "embeddings", "gradients", "vote")),
    }
)
"""Names of spans that overlap others of their process, themselves included, and so need separate tracks."""


def timelines(ranks: TrainerGroup, own: Stats, processes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The spans of all processes by title, on rank 0; of this trainer alone on the others. All call it, together.

    Args:
        processes: title of a process → its ``Stats.snapshot``, of those that this trainer asks.
    """
    mine = {f"trainer {ranks.rank}": own.spans.events()}
    others = {title: snapshot["spans"] for title, snapshot in processes.items()}
    gathered = ranks.gather({**mine, **others})
    return {title: events for each in gathered or [mine] for title, events in each.items()}


def write_timeline(path: Path, processes: Mapping[str, Events], totals_s: Mapping[str, float]) -> None:
    """Writes the spans of processes.

    Args:
        processes: spans by the title of their process; the first is the one whose phases stand for the run.
        totals_s: seconds of each phase of the first process, over the whole run.
    """
    origin = min((start for events in processes.values() for _, start, _ in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for number, (title, events) in enumerate(processes.items()):
        trace.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": title}})
        free_us: list[int] = []  # when each separate track becomes free
        for name, start, seconds in events:
            begin, end = round((start - origin) * 1e6), round((start - origin + seconds) * 1e6)
            track = _free_track(free_us, begin, end) if name in BESIDE else 0
            trace.append(
                {"name": name, "ph": "X", "pid": number, "tid": track, "ts": begin, "dur": end - begin}
            )
    totals = {name: round(seconds, 6) for name, seconds in totals_s.items()}
    write_whole(path, json.dumps({"traceEvents": trace, "totals_s": totals}))


def _free_track(free_us: list[int], begin: int, end: int) -> int:
    """Takes the first separate track that is free at ``begin``; returns its number, from 1."""
    track = next((number for number, free in enumerate(free_us) if free <= begin), len(free_us))
    free_us[track : track + 1] = [end]
    return 1 + track
