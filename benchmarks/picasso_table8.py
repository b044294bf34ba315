"""PICASSO's Table VIII: CAN with 1 to 8 times the feature fields: are samples/s ever worse than proportional?

As in the paper the features stand side by side once more, each copy with units of its own, and what these give goes into one
network. One process; "proportional" is the samples/s of one copy over the number of copies. The model's own time
(forward, backward, update of the network) stands beside that of the sparse half. "none" has an operation a table, as a
system has that does not pack.

    girih bench picasso_table8 [--copies 1 2] [--quick]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import harness
import picasso
from experiments import show
from picasso import Found

PAPER = {
    "all": {1: 12.20, 2: 6.14, 3: 4.13, 4: 3.13, 5: 2.50, 6: 2.09, 7: 1.82, 8: 1.61},
    "none": {1: 2.40, 2: 1.18, 3: 0.75, 4: 0.56, 5: 0.42, 6: 0.36, 7: 0.31, 8: 0.25},
}
"""Copies → thousand samples/s of PICASSO, and of XDL."""
SPARSE = ("pull", "wait for rows", "push")
DENSE = ("forward", "backward", "apply")
ARMS = ("all", "none")
MOST_UNPACKED = 4
"""Copies: 2,912 tables of their own need more mappings than Linux allows a process (``vm.max_map_count``)."""


def main() -> None:
    parser = picasso.parser("picasso_table8", __doc__, batch=256, gpu=True)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    for name, default in picasso.ALONE.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=picasso.number_or_auto, default=default, metavar="N"
        )
    options = picasso.parsed(parser, {"copies": [1, 2]})
    report = harness.Report("picasso_table8", options)
    bench, arms = picasso.Bench.of(options, "picasso-table8", trainers=1), picasso.arms(options)
    base = bench.workload(picasso.CAN)
    cases = {
        (arm, copies): bench.case(
            f"{arm}/{copies}",
            replace(base, copies=copies),
            {section: asked for section, asked in arms[arm].items() if asked},
        )
        for copies in options.copies
        for arm in options.arms
        if arm == "all" or copies <= MOST_UNPACKED
    }
    if "none" in options.arms and max(options.copies) > MOST_UNPACKED:
        report.skip(
            f"none, more than {MOST_UNPACKED} copies",
            "so many tables need more mappings than a process may have",
        )
    found = bench.measured(cases)
    _show(report, found, base.num_features)
    print(bench.kept.told())
    report.finish()


def _show(report: harness.Report, found: Mapping[tuple[str, int], Sequence[Found]], features: int) -> None:
    rows = []
    for (arm, copies), runs in sorted(found.items()):
        (first_copies, first), *_ = sorted((each, of) for (name, each), of in found.items() if name == arm)
        times, paper = copies / first_copies, PAPER[arm]
        row = {"arm": arm, "features": f"{features * copies:,}", **picasso.columns(runs)}
        row["of proportional"] = f"{times * picasso.beside(runs, first):.3f}"
        row["paper"] = f"{copies * paper[copies] / paper[1]:.3f}" if copies in paper else ""
        for name, phases in (("sparse half", SPARSE), ("model", DENSE)):
            spent, of_first = (1e3 * _spent(each, phases) for each in (runs, first))
            row[f"{name}, ms a step"] = f"{spent:.1f}"
            row[f"{name}, of proportional"] = f"{spent / of_first / times:.3f}"
        rows.append(row)
    title = "samples/s of proportional (more is better), and time of the halves (less is better)"
    show(report, title, list(rows[0]), [list(row.values()) for row in rows])


def _spent(runs: Sequence[Found], phases: Sequence[str]) -> float:
    return picasso.middle(runs, lambda window: sum(window["phases_s"].get(phase, 0.0) for phase in phases))


if __name__ == "__main__":
    main()
