"""The timeline of a run: a few steps as a strip of lanes, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from girih.report.record import Event, RunRecord
from girih.report.svg import NUM_COLOURS, strip
from girih.report.text import DASH, count, is_number, percent

NUM_STEPS = 6
MAX_SPANS = 3000


def timeline_section(run: RunRecord) -> str:
    """A strip and a table; nothing where nothing was timed."""
    events = run.events
    colours = {name: 1 + at % NUM_COLOURS for at, name in enumerate(dict.fromkeys(e.name for e in events))}
    if not events or _end(events) <= events[0].start_us:
        return ""
    start_us, end_us, told = window(events)
    inside = [e for e in events if e.start_us < end_us and e.start_us + e.duration_us > start_us]
    inside.sort(key=lambda event: event.duration_us, reverse=True)
    order = {name: at for at, name in enumerate(colours)}
    drawn = sorted(inside[:MAX_SPANS], key=lambda event: (order[event.name], event.start_us))
    left_out = len(inside) - len(drawn)
    more = f" {count(left_out)} of the shortest spans are left out." if left_out else ""
    return (
        f"<h2>Timeline</h2><p>{escape(told)}{more}</p>"
        f'<div class="card">{strip(drawn, start_us, end_us, colours)}</div>' + _phases(run, colours)
    )


def window(events: Sequence[Event]) -> tuple[float, float, str]:
    """From when to when a few typical steps last, and what to call them.

    A step begins with the phase named ``step``, or else with the longest of those that come about as often
    as any. Typical is the window of median length: neither the warm-up nor an evaluation is in it.
    """
    first, last = events[0].start_us, _end(events)
    starts: dict[str, list[float]] = defaultdict(list)
    total: dict[str, float] = defaultdict(float)
    own = [
        event for event in events if ": " not in event.name
    ] or events  # other processes have a beat of their own
    for event in own:
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
    told = f"{NUM_STEPS} typical {what}: {length / 1000:,.4g} ms"
    return (
        start,
        end,
        f"{told}, {(start - first) / 1e6:,.4g} s into a recording of {(last - first) / 1e6:,.4g} s.",
    )


def _phases(run: RunRecord, colours: dict[str, int]) -> str:
    recorded: dict[str, list[float]] = defaultdict(list)
    for event in run.events:
        recorded[event.name].append(event.duration_us)
    span_s = (_end(run.events) - run.events[0].start_us) / 1e6
    whole_s = _whole_s(run) if run.totals_s else None
    told, totals_s = "recording", {name: sum(spans) / 1e6 for name, spans in recorded.items()}
    if whole_s:
        told, span_s, totals_s = "run; mean and longest are of the recording", whole_s, run.totals_s
    titles = ("Phase", "Share of time", "Total", "Recorded", "Mean", "Longest")
    rows = []
    for name, total_s in sorted(totals_s.items(), key=lambda item: -item[1]):
        spans, share = recorded.get(name, []), total_s / span_s
        bar = f'<i class="c{colours.get(name, 1)}" style="width:{min(100 * share, 100):.1f}%"></i>'
        mean = f"{sum(spans) / len(spans) / 1000:,.3f} ms" if spans else DASH
        longest = f"{max(spans) / 1000:,.3f} ms" if spans else DASH
        rows.append(
            f'<tr><td>{escape(name)}</td><td>{percent(share)}<span class="bar">{bar}</span></td>'
            f"<td>{total_s:,.3f} s</td><td>{count(len(spans))}</td><td>{mean}</td><td>{longest}</td></tr>"
        )
    head = "".join(f"<th>{title}</th>" for title in titles)
    return (
        f"<h2>Time by phase</h2><p>Over the whole {told}. Phases run side by side and inside one another, so "
        'shares need not add up to 100 %.</p><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _whole_s(run: RunRecord) -> float | None:
    """How long the run took, or has taken so far; None where nothing tells."""
    told = (run.summary or {}).get("duration_s")
    if not is_number(told) and run.training:
        told = run.training[-1].get("elapsed_s")
    return float(told) if is_number(told) and told > 0 else None


def _end(events: Sequence[Event]) -> float:
    return max(event.start_us + event.duration_us for event in events)
