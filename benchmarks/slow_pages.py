"""The parts of ``docs/scale.md`` that ``slow_hosts`` writes: measured values, with predicted and published ones next to them.

Predictions come from ``docs/results/slow-hosts-predicted.json``: tables of the same titles, whose rows have ``strategy``, ``trainers``
and ``samples/s``. ``girih bench slow_predicted`` writes it. Without that file, their columns have dashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pages
import slow_peers
from experiments import RESULTS
from prediction_tables import JUDGED, judged

Found = Mapping[str, Any]
APART = "slow_hosts_apart"
"""The hosts file whose results have a table of their own."""
ALLOWED = 0.10
"""Largest deviation from samples/s in proportion to cores."""
PREDICTED = RESULTS / "slow-hosts-predicted.json"
PUBLISHED = {"hybrid, τ = 4": "2.6 to 3.8 (Persia)", "asynchronous, τ = 4": "1.2 of hybrid (Persia)"}
"""Published samples/s, as multiples of fully synchronous training unless the cell says otherwise."""
ROLES = ("trainer", "embedding-worker", "embedding-server", "loader", "group-server", "dense-server")
KINDS = ("ids", "embeddings", "gradients", "partials", "dense", "activations")


def page_parts(results: Found) -> dict[str, str | None]:
    """Name of a part → its text."""
    if Path(results["options"].get("hosts", "")).stem == APART:
        others = dict.fromkeys(("proportion", "strategies", "validation", "use", "opponents"))
        return {**others, "apart": _strategies(results, "apart")}
    return {
        "apart": None,
        "proportion": _proportion(results),
        "strategies": _strategies(results),
        "validation": _validation(results),
        "use": _use(results),
        "opponents": _opponents(results),
    }


def _proportion(results: Found) -> str | None:
    lines, worst = [], 0.0
    found = pages.rows(results, "proportion")
    rates = {
        (case["strategy"], case["cores"]): median(row["samples/s"] for row in those)
        for case, those in pages.grouped(found, "strategy", "cores")
    }
    for (strategy, cores), rate in rates.items():
        most = max(of for name, of in rates if name == strategy)
        expected = rates[strategy, most] * cores / most
        worst = max(worst, abs(rate / expected - 1))
        rows = [row for row in found if row["strategy"] == strategy and row["cores"] == cores]
        lines.append([
            strategy, f"{cores:g}", f"{1e3 * rows[0]['gbit']:g}", f"{rates[strategy, most]:,.0f} × {cores / most:g}", f"{rate:,.0f}",
            f"{rate / expected:.2f}", _predicted("proportion", strategy=strategy, cores=cores), pages.span((row["samples/s"] for row in rows), "{:,.0f}"),
            pages.span((row["others, of the cores"] for row in rows), "{:.0%}"),
        ])  # fmt: skip
    header = (
        "strategy",
        "cores of a host",
        "link, Mbit/s",
        "in proportion",
        "measured",
        "ratio",
        "predicted",
        "rounds",
        "other use of the machine's cores",
    )
    verdict = (
        f"{pages.measured(results)}. The largest deviation is {worst:.0%}; the bound is {ALLOWED:.0%}:"
        f" {'it holds' if worst <= ALLOWED else 'it does not hold'}."
    )
    return pages.paragraphs(verdict if lines else None, pages.table(header, lines))


def _strategies(results: Found, predicted: str = "systems") -> str | None:
    found = _of_girih(results)
    rates = {(row["contestant"], row["trainers"]): row["samples/s"] for row in found}
    fewest = min((size for _, size in rates), default=0)
    lines = []
    for row in found:
        name, size = row["contestant"], row["trainers"]
        few = rates.get((name, fewest))
        base = rates.get(("synchronous", size))
        lines.append([
            f"{size}", name, f"{row['samples/s']:,.0f}", f"{row['lowest']:,.0f} to {row['highest']:,.0f}",
            _predicted(predicted, strategy=name, trainers=size), pages.shown(base and row["samples/s"] / base, "{:.2f}"),
            PUBLISHED.get(name, "–"), pages.shown(few and row["samples/s"] / few / size * fewest, "{:.0%}"),
            pages.shown(row["staleness"], "{:.2f}"), pages.shown(row["staleness, most"]), f"{row['bytes an example']:,.0f}",
        ])  # fmt: skip
    header = (
        "trainers",
        "strategy",
        "samples/s",
        "windows",
        "predicted",
        "× synchronous",
        "published",
        "of linear",
        "staleness",
        "at most",
        "bytes an example",
    )
    return pages.table(header, lines)


def _validation(results: Found) -> str | None:
    """How right predictions are. A case is one number of trainers."""
    rows = []
    for row in _of_girih(results):
        found = pages.row(_predictions(), "systems", strategy=row["contestant"], trainers=row["trainers"])
        if found:
            ends = {"low": found["5 %"], "high": found["95 %"]}
            rows.append(
                {
                    "case": row["trainers"], "strategy": row["contestant"], "measured": row["samples/s"],
                    "predicted": found["samples/s"], **ends,
                }
            )  # fmt: skip
    parts = {"all": rows, **{of["strategy"]: those for of, those in pages.grouped(rows, "strategy")}}
    lines = [
        [pages.shown({"of": name, **judged(those)}[column], form) for column, form in JUDGED.items()]
        for name, those in parts.items()
    ]
    return pages.table(list(JUDGED), lines) if rows else None


def _use(results: Found) -> str | None:
    found = _of_girih(results)
    roles = [role for role in ROLES if any(row.get(f"CPU of a {role}") is not None for row in found)]
    kinds = [kind for kind in KINDS if any(row.get(f"{kind}, bytes") for row in found)]
    lines = [
        [
            f"{row['trainers']}", row["contestant"], *(pages.shown(row[f"CPU of a {role}"], "{:.0%}") for role in roles),
            f"{row['CPU of a host']:.0%}, {row['CPU of the busiest']:.0%}", f"{row['use of a link']:.0%}, {row['of the busiest']:.0%}",
            *(pages.shown(row[f"{kind}, bytes"], "{:,.0f}") for kind in kinds),
        ]
        for row in found
    ]  # fmt: skip
    header = (
        "trainers",
        "strategy",
        *roles,
        "host: mean, busiest",
        "link: mean, busiest",
        *(f"{kind}, bytes" for kind in kinds),
    )
    return pages.table(header, lines)


def _opponents(results: Found) -> str | None:
    lines, sentences = [], []
    for case, rows in pages.grouped(_systems(results), "trainers"):
        ours = [row for row in rows if row["system"] == "girih"]
        theirs = [row for row in rows if row["system"] != "girih"]
        sharded = [row for row in theirs if row["contestant"] in slow_peers.SHARDINGS]
        if ours:
            sentences += _verdicts(
                case["trainers"], ours, (sharded, [row for row in theirs if row not in sharded])
            )
        base = max((row["samples/s"] for row in ours), default=None)
        lines += [
            [
                f"{row['trainers']}", f"girih: {row['contestant']}" if row["system"] == "girih" else row["contestant"], f"{row['samples/s']:,.0f}", pages.shown(base and row["samples/s"] / base, "{:.2f}"),
                f"{row['bytes an example']:,.0f}", f"{row['CPU of a host']:.0%}", f"{row['use of a link']:.0%}",
            ]
            for row in rows
        ]  # fmt: skip
    header = (
        "trainers",
        "contestant",
        "samples/s",
        "× girih's fastest",
        "bytes an example",
        "CPU of a host",
        "link",
    )
    return pages.paragraphs(pages.sentences(*sentences) or None, pages.table(header, lines))


def _verdicts(trainers: int, ours: Sequence[Found], peers: Iterable[Sequence[Found]]) -> list[str]:
    """A sentence about girih's fastest strategy in step and the fastest of each group of peers."""
    in_step = [row for row in ours if not row["staleness"]]
    best = max(in_step or ours, key=lambda row: row["samples/s"])
    sentences = []
    for rows in (rows for rows in peers if rows):
        peer = max(rows, key=lambda row: row["samples/s"])
        ratio = best["samples/s"] / peer["samples/s"]
        result = f"{ratio:.2f} times as fast as" if ratio >= 1 else f"slower than, {ratio:.2f} of,"
        sentences.append(
            f"With {trainers} trainers, girih ({best['contestant']}) is {result} {peer['contestant']}."
        )
    return sentences


def _systems(results: Found) -> list[Found]:
    """Rows of all systems by the number of trainers, with the columns of their tables of rates and of use."""
    tables = (pages.rows(results, title) for title in ("systems", "use, systems"))
    joined = [{**rates, **use} for rates, use in zip(*tables, strict=True)]
    return sorted(joined, key=lambda row: (row["trainers"], row["system"] != "girih"))


def _of_girih(results: Found) -> list[Found]:
    return [row for row in _systems(results) if row["system"] == "girih"]


def _predicted(title: str, **values: Any) -> str:
    row = pages.row(_predictions(), title, **values)
    return pages.shown(row.get("samples/s"), "{:,.0f}")


@cache
def _predictions() -> Found:
    found: Found = (
        json.loads(PREDICTED.read_text(encoding="utf-8")) if PREDICTED.is_file() else {"tables": []}
    )
    return found
