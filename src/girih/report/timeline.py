"""The timeline of a run: a few steps as a strip of lanes, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from girih.report import charts
from girih.report.record import RunRecord, TimelineSpan
from girih.report.text import DASH, count, is_number, percent

NUM_STEPS = 6
MAX_SPANS = 3000


def timeline(run: RunRecord) -> dict[str, object] | None:
    """A few steps and the time by phase, for the template; None where nothing was timed."""
    events = run.events
    if not events or _end(events) <= events[0].start_us:
        return None
    start_us, end_us, told = window(events)
    inside = [e for e in events if e.start_us < end_us and e.start_us + e.duration_us > start_us]
    longest = sorted(inside, key=lambda event: -event.duration_us)[:MAX_SPANS]
    drawn = sorted(longest, key=lambda event: event.start_us)
    if len(drawn) < len(inside):
        told += f" {count(len(inside) - len(drawn))} of the shortest spans are left out."
    present = {event.name for event in drawn}
    lanes = [name for name in dict.fromkeys(event.name for event in events) if name in present]
    rows = [_row(event, start_us, end_us) for event in drawn]
    return {"told": told, "chart": charts.timeline_chart(rows, lanes), **_phases(run)}


def window(events: Sequence[TimelineSpan]) -> tuple[float, float, str]:
    """A few typical steps: their start and end in microseconds, and a sentence about them.

    A step begins with the phase named ``step``, or else with the longest of those that come about as often
    as any. Typical is the window of median length: neither the warm-up nor an evaluation is in it.
    """
    first, last = events[0].start_us, _end(events)
    starts: dict[str, list[float]] = defaultdict(list)
    total: dict[str, float] = defaultdict(float)
    own = [event for event in events if ": " not in event.name]  # other processes have a beat of their own
    for event in own or events:
        starts[event.name].append(event.start_us)
        total[event.name] += event.duration_us
    most = max(len(at) for at in starts.values())
    if most <= NUM_STEPS:
        return first, last, f"The whole recording, {(last - first) / 1000:,.4g} ms."
    often = [name for name, at in starts.items() if len(at) > max(NUM_STEPS, 0.8 * most)]
    beat = "step" if len(starts["step"]) > NUM_STEPS else max(often, key=lambda name: total[name])
    windows = sorted((b - a, a, b) for a, b in zip(starts[beat], starts[beat][NUM_STEPS:], strict=False))
    length, start, end = windows[len(windows) // 2]
    what = "steps" if beat == "step" else f"rounds of {beat}"
    told = f"{NUM_STEPS} typical {what}: {length / 1000:,.4g} ms, {(start - first) / 1e6:,.4g} s into a recording"
    return start, end, f"{told} of {(last - first) / 1e6:,.4g} s."


def _row(event: TimelineSpan, start_us: float, end_us: float) -> dict[str, object]:
    begin, end = max(event.start_us, start_us), min(event.start_us + event.duration_us, end_us)
    return {
        "phase": event.name,
        "from_ms": (begin - start_us) / 1000,
        "to_ms": (end - start_us) / 1000,
        "ms": event.duration_us / 1000,
        "thread": event.thread,
    }


def _phases(run: RunRecord) -> dict[str, object]:
    """The cells of the table, longest phase first, and the name of the whole that shares refer to."""
    recorded: dict[str, list[float]] = defaultdict(list)
    for event in run.events:
        recorded[event.name].append(event.duration_us / 1000)
    told, totals_s = "recording", {name: sum(spans) / 1000 for name, spans in recorded.items()}
    span_s = (_end(run.events) - run.events[0].start_us) / 1e6
    whole_s = _whole_s(run) if run.totals_s else None
    if whole_s:
        told, span_s, totals_s = "run; mean and longest are of the recording", whole_s, run.totals_s
    phases = []
    for name, total_s in sorted(totals_s.items(), key=lambda item: -item[1]):
        spans = recorded.get(name, [])
        mean, longest = (sum(spans) / len(spans), max(spans)) if spans else (None, None)
        shown = [f"{ms:,.3f} ms" if ms is not None else DASH for ms in (mean, longest)]
        phases.append((name, percent(total_s / span_s), f"{total_s:,.3f} s", count(len(spans)), *shown))
    return {"phases_of": told, "phases": phases}


def _whole_s(run: RunRecord) -> float | None:
    """Seconds from the run's start to its end, without those of compiling, or to its latest record; None where nothing
    tells.
    """
    summary = run.summary or {}
    told = summary.get("duration_s")
    if is_number(told) and is_number(summary.get("compile_s")):
        told -= summary["compile_s"]
    if not is_number(told) and run.training:
        told = run.training[-1].get("elapsed_s")
    return float(told) if is_number(told) and told > 0 else None


def _end(events: Sequence[TimelineSpan]) -> float:
    return max(event.start_us + event.duration_us for event in events)
