"""PICASSO's figure of interleaving: samples/s by the number of interleaving groups, and of micro-batches.

The paper's Figure 14 has 1 to 11 interleaving groups; its text calls it Figure 15. Two trainers under ``synchronous``, a
network namespace each (needs root), links of ``--rate``; one of both numbers grows, the other is 1. Tables are packed and
batches prefetched in all arms, and rows are in memory alone.

    girih bench picasso_fig15 [--workloads W&D] [--rate 200mbit] [--quick]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import picasso
from experiments import Run, pictures, show
from picasso import Found
from pictures import Chart, write_picture

WHAT = {"interleaving_groups": "interleaving groups", "micro_batches": "micro-batches"}
QUICK: dict[str, Any] = {"interleaving_groups": [1, 2], "micro_batches": [1, 2]}

Case = tuple[str, str, int | str]
"""Workload, what grows, how many."""


def main() -> None:
    parser = picasso.parser("picasso_fig15", __doc__, batch=512, workloads=list(picasso.WORKLOADS))
    kind: dict[str, Any] = {"type": picasso.number_or_auto, "nargs": "+", "metavar": "N"}
    parser.add_argument("--interleaving-groups", **kind, default=[1, 2, 5, 11, "auto"])
    parser.add_argument("--micro-batches", **kind, default=[1, 2, 4, "auto"])
    options = picasso.parsed(parser, QUICK)
    report = harness.Report("picasso_fig15", options)
    bench = picasso.Bench.of(options, "picasso-fig15")
    reason = bench.missing()
    if reason is None:
        found = bench.measured({case: _run(bench, *case) for case in _cases(options)})
        _show(report, options, found)
        _draw(options, found)
        print(bench.kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def _cases(options: argparse.Namespace) -> list[Case]:
    """One alone stands for both."""
    found: list[Case] = []
    for name in options.workloads:
        found.append((name, "interleaving_groups", 1))
        found += [(name, what, number) for what in WHAT for number in getattr(options, what) if number != 1]
    return found


def _run(bench: picasso.Bench, name: str, what: str, number: int | str) -> Run:
    sections = {"schedule": {**picasso.ALONE, what: number}}
    return bench.case(f"{name}/{what} {number}", bench.workload(picasso.WORKLOADS[name]), sections)


def _show(report: harness.Report, options: argparse.Namespace, found: Mapping[Case, Sequence[Found]]) -> None:
    rows = []
    for (name, what, number), runs in found.items():
        row = {"workload": name, "what": "one of both" if number == 1 else WHAT[what], "number": str(number)}
        row |= picasso.columns(runs) | picasso.planned(runs[0])
        row["of one"] = f"{picasso.beside(runs, found[name, 'interleaving_groups', 1]):.2f}"
        rows.append(row)
    title = f"samples/s by interleaving, links of {options.rate}"
    show(report, title, list(rows[0]), [list(row.values()) for row in rows])


def _draw(options: argparse.Namespace, found: Mapping[Case, Sequence[Found]]) -> None:
    charts = []
    for what, title in WHAT.items():
        series = {}
        for name in options.workloads:
            one = found[name, "interleaving_groups", 1]
            numbers = [n for n in getattr(options, what) if isinstance(n, int)]
            series[name] = [
                (n, 1.0 if n == 1 else picasso.beside(found[name, what, n], one)) for n in sorted(numbers)
            ]
        charts.append(Chart(title, f"number of {title}", "samples/s, of one", series))
    write_picture(pictures(options) / "picasso-fig15.svg", charts)


if __name__ == "__main__":
    main()
