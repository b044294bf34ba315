"""Judges predictions, and shows which part of a step they have wrong. Also the tables of ``docs/planning.md``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import fleet
import harness
import pages

APART = 1.1
"""Measured speeds beyond this ratio are a pair whose order counts."""
REGRET = 0.05
"""Regret up to which a case counts as well picked."""
IN_TRAINER = "parameter-server"
"""A role in the process of a trainer."""
SMALL = 0.01
"""Parts below this fraction of a step are not compared."""
Found = Mapping[str, Any]

JUDGED = {
    "of": "{}", "runs": "{}", "median error": "{:.1%}", "worst error": "{:.0%}", "in the band": "{:.0%}", "cases": "{}",
    "fastest picked": "{:.0%}", "regret ≤ 5 %": "{:.0%}", "worst regret": "{:.0%}", "pairs": "{}", "rightly ordered": "{:.0%}",
}  # fmt: skip
PHASES = {
    "phase": "{}",
    "runs": "{}",
    "median error": "{:.0%}",
    "worst error": "{:.0%}",
    "predicted / measured": "{:.2f}",
}
REGRETS = {"model": "{}", "size": "{}", "link": "{}", "picked": "{}", "fastest": "{}", "regret": "{:.0%}"}
FORTH, BACK = (
    "the first window picks and the last one judges",
    "the last window picks and the first one judges",
)
STALENESS = {
    "source": "{}", "task": "{}", "link": "{}", "strategy": "{}", "predicted: mean": "{:.2f}", "p99": "{}", "most": "{}",
    "measured: mean": "{:.2f}", "measured: most": "{}",
}  # fmt: skip


def judged(rows: Sequence[Found]) -> dict[str, Any]:
    """The errors, the share of pairs in the right order, and the cases whose fastest strategy is predicted.

    Args:
        rows: each with its ``case`` (model, size and link), ``strategy``, ``predicted`` and ``measured``. Only rows with ``contest``
            are held against each other, if it is there.
    """
    distributed = [row for row in rows if row["strategy"] != "local" and row.get("contest", True)]
    pairs = [
        (one, other)
        for one, other in combinations(distributed, 2)
        if one["case"] == other["case"] and _ratio(one["measured"], other["measured"]) > APART
    ]
    right = sum(
        (one["predicted"] > other["predicted"]) == (one["measured"] > other["measured"])
        for one, other in pairs
    )
    cases = [
        [row for row in distributed if row["case"] == case] for case in {row["case"] for row in distributed}
    ]
    contests = [case for case in cases if len(case) > 1]
    picked = sum(_fastest(case, "predicted") == _fastest(case, "measured") for case in contests)
    regrets = [regret(case) for case in contests]
    banded = [row["low"] <= row["measured"] <= row["high"] for row in rows if "low" in row]
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    return {
        "runs": len(rows),
        "median error": statistics.median(errors) if errors else None,
        "worst error": max(errors, default=None),
        "pairs": len(pairs),
        "rightly ordered": right / len(pairs) if pairs else None,
        "cases": len(contests),
        "fastest picked": picked / len(contests) if contests else None,
        "regret ≤ 5 %": sum(each <= REGRET for each in regrets) / len(regrets) if regrets else None,
        "worst regret": max(regrets, default=None),
        "in the band": statistics.mean(banded) if banded else None,
    }


def regret(rows: Sequence[Found], by: str = "predicted", judge: str = "measured") -> float:
    """How much slower the strategy of a case that ``by`` picks is than the fastest one, by the speeds of ``judge``."""
    picked = max(rows, key=lambda row: row[by])
    return 1 - float(picked[judge] / max(row[judge] for row in rows))


def _fastest(rows: Sequence[Found], speed: str) -> str:
    return str(max(rows, key=lambda row: row[speed])["strategy"])


def _ratio(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


def phases(row: Found) -> Iterator[tuple[str, float, float]]:
    """Yields parts of a step that are known of a run: what each is, as predicted and as measured, in ms or in bytes.

    Processor time is of all processes of a role. The cores wait for the rest of a step.
    """
    found, speed = row["found"], row["found"]["speed"]
    step_s = fleet.median(found, "step_s")
    cores = dict(speed["core_s"])
    cores["trainer"] = cores.get("trainer", 0.0) + cores.pop(IN_TRAINER, 0.0)
    for role, seconds in cores.items():
        spent = statistics.median(
            sum(s for title, s in window["cpu_s_each"].items() if title.rpartition(" ")[0] == role)
            for window in found["windows"]
        )
        if spent > SMALL * step_s:
            yield f"processor time: {role}", 1e3 * seconds, 1e3 * spent
    waits = (
        speed["examples"] / row["predicted"] - sum(cores.values()) / fleet.CORES,
        step_s - fleet.median(found, "cpu_s") / fleet.CORES,
    )
    if waits[1] > 0.1 * step_s:
        yield "waits of the cores", 1e3 * max(0.0, waits[0]), 1e3 * waits[1]
    summary = found.get("summary", {})
    for kind, size in speed["wire_bytes"].items():
        sent = summary.get("wire_bytes", {}).get(kind, 0) / summary["num_shares"] if summary else 0
        if sent:
            yield f"bytes: {kind}", size, sent


def show(report: harness.Report, rows: Sequence[Found]) -> None:
    """Fills the tables of a report."""
    table = report.table(
        "samples/s, predicted and measured",
        {"model": "{}", "size": "{}", "link": "{}", "strategy": "{}", "predicted": "{:,.0f}", "measured": "{:,.0f}",
         "error": "{:+.0%}", "5 %": "{:,.0f}", "95 %": "{:,.0f}", "bounded by": "{}", **fleet.DISTURBED},
    )  # fmt: skip
    for row in rows:
        names = dict(zip(("model", "size", "link"), row["case"], strict=True))
        error = row["predicted"] / row["measured"] - 1
        shown = {name: row[name] for name in ("strategy", "predicted", "measured")}
        table.row(
            {**names, **shown, "error": error, "5 %": row["low"], "95 %": row["high"], "bounded by": row["bound"],
             **fleet.disturbance(row["found"])}
        )  # fmt: skip
    judgement = report.table(
        f"all runs; pairs are of distributed strategies whose measured speeds differ by more than {APART - 1:.0%}",
        JUDGED,
    )
    judgement.row({"of": "all", **judged(rows)})
    for source in dict.fromkeys(row["source"] for row in rows):
        judgement.row({"of": source, **judged([row for row in rows if row["source"] == source])})
    for strategy in dict.fromkeys(row["strategy"] for row in rows if row["contest"]):
        chosen = [row for row in rows if row["strategy"] == strategy and row["contest"]]
        judgement.row({"of": strategy, **judged(chosen)})
    _show_regrets(report, [row for row in rows if row["contest"] and row["strategy"] != "local"])
    parts: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, one, other in phases(row):
            parts.setdefault(name, []).append((one, other))
    by_phase = report.table("errors by phase: of core-seconds, waits and bytes of a step", PHASES)
    for name, pairs in sorted(parts.items()):
        errors = [abs(one / other - 1) for one, other in pairs]
        by_phase.row(
            {"phase": name, "runs": len(pairs), "median error": statistics.median(errors), "worst error": max(errors),
             "predicted / measured": statistics.median(one / other for one, other in pairs)}
        )  # fmt: skip
    stale = report.table("staleness, predicted and measured", STALENESS)
    for row in rows:
        summary, speed = row["found"].get("summary", {}), row["found"]["speed"]
        if summary.get("staleness_max"):
            names = dict(zip(("source", "task", "link"), row["case"], strict=True))
            stale.row(
                {**names, "strategy": row["strategy"], "predicted: mean": speed["staleness_mean"],
                 "p99": speed["staleness_p99"], "most": speed["staleness_max"],
                 "measured: mean": summary["staleness_mean"], "measured: most": summary["staleness_max"]}
            )  # fmt: skip
    report.not_identical("links are of network namespaces of one machine, whose processes share its cores")


def _show_regrets(report: harness.Report, rows: Sequence[Found]) -> None:
    """Fills the table of regrets. Two columns have the regret if one window of each run picks, and another one judges."""
    ends = dict.fromkeys((FORTH, BACK), "{:.0%}")
    table = report.table("regret of the picked distributed strategy", {**REGRETS, **ends})
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        names = dict(zip(("model", "size", "link"), case, strict=True))
        picked, fastest = (_fastest(of_case, speed) for speed in ("predicted", "measured"))
        windows = {FORTH: regret(of_case, "first", "last"), BACK: regret(of_case, "last", "first")}
        table.row({**names, "picked": picked, "fastest": fastest, "regret": regret(of_case), **windows})


def page_parts(results: Found) -> dict[str, str | None]:
    """Name of a part of ``docs/planning.md`` → its text. The grid with windows of seconds has parts of its own."""
    regrets = pages.rows(results, "regret")
    made = {
        "judgement": _table(results, "all runs", JUDGED),
        "regret": _table([row for row in regrets if row["regret"] > REGRET], "regret", REGRETS),
        "phases": _table(results, "errors by phase", PHASES),
        "windows": " ".join(_by_windows(regrets, name) for name in (FORTH, BACK)).strip() or None,
    }
    long = {f"long {name}": part for name, part in made.items()}
    if results["options"].get("small_steps") is not None:
        return {**dict.fromkeys([*made, "staleness"]), **long}
    return {**made, **dict.fromkeys(long), "staleness": _table(results, "staleness", STALENESS)}


def _by_windows(rows: Sequence[Found], name: str) -> str:
    regrets = [row[name] for row in rows if name in row]
    if not regrets:
        return ""
    good = sum(each <= REGRET for each in regrets) / len(regrets)
    return f"If {name}, the regret is at most 5 % in {good:.0%} of cases, and at most {max(regrets):.0%}."


def _table(found: Found | Sequence[Found], title: str, columns: Mapping[str, str]) -> str | None:
    rows = found if isinstance(found, list) else pages.rows(found, title)  # type: ignore[arg-type]
    lines = [[pages.shown(row[name], form) for name, form in columns.items()] for row in rows]
    return pages.table(list(columns), lines)
