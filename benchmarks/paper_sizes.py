"""The papers' figures at the papers' own size, as the simulator predicts them, next to published values.

    girih bench paper_sizes --json docs/results/paper-sizes.json --resume

Persia's Figures 8 and 9, DES's Table 5, PICASSO's Figure 15, HT's Figures 8 and 10. Nothing is trained or timed: hosts and models
are those that the papers state, ids follow a law, and the calibration is a file. So the result is the same on every machine.
Some cases change one assumption, to show what decides the shape of a curve. See ``docs/scale.md``.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import harness
import pages
import paper_des
import paper_hierarchical
import paper_persia
import paper_picasso
from paper_cases import Case, Figure
from paper_pages import page_parts

from girih.planner.calibration import Calibration
from girih.planner.simulator.draws import RUN_SPREAD
from girih.planner.simulator.prediction import Prediction, predict

CALIBRATION = harness.ROOT / "docs" / "results" / "prediction" / "calibration.json"
COLUMNS = {
    "setting": "{}", "arm": "{}", "changed": "{}", "x": "{:,.0f}", "samples/s": "{:,.0f}", "5 %": "{:,.0f}", "95 %": "{:,.0f}",
    "of linear": "{:.2f}", "base": "{}", "of base": "{:.2f}", "published samples/s": "{:,.0f}", "published of linear": "{:.2f}",
    "published of base": "{:.2f}", "published shape": "{}", "bottleneck": "{}", "in use": "{:.0%}", "staleness": "{}",
    "pass": "{}", "extrapolated": "{}", "because": "{}",
}  # fmt: skip
FACTOR = math.exp(NormalDist().inv_cdf(0.95) * math.sqrt(math.log1p(RUN_SPREAD**2)))
"""All cores and links of a run are faster or slower by one factor, so samples/s are too. This is its 95th percentile."""
KEYS = ("setting", "arm", "changed", "x")


def main() -> None:
    parser = harness.parser("paper_sizes", __doc__, resumes=True)
    parser.add_argument(
        "--quick", action="store_true", help="few points and small models: shows that it runs"
    )
    parser.add_argument(
        "--calibration", type=Path, default=CALIBRATION, metavar="FILE", help="of girih calibrate"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run for each")
    parser.add_argument(
        "--parts", nargs="+", metavar="FIGURE", help="figures whose names begin so; default: all"
    )
    pages.add_option(parser, page_parts)
    options = parser.parse_args()
    calibration = Calibration.read(options.calibration)
    report = harness.Report("paper_sizes", options)
    report.not_identical(
        "predicted, not measured; the bands are the spread of runs, without the error of assumptions"
    )
    for figure in figures(calibration, quick=options.quick):
        if not options.parts or any(figure.name.startswith(part) for part in options.parts):
            _show(report, figure, options)
    report.finish()


def figures(calibration: Calibration, *, quick: bool = False) -> list[Figure]:
    """All figures."""
    hierarchical = {"calibration": calibration, "quick": quick}
    return [
        paper_persia.Figure8(calibration),
        paper_persia.Figure9(calibration),
        paper_des.Table5(calibration),
        paper_picasso.Figure15(calibration),
        paper_hierarchical.Figure8(**hierarchical),
        paper_hierarchical.Figure10a(**hierarchical),
        paper_hierarchical.Figure10b(**hierarchical),
    ]


def _show(report: harness.Report, figure: Figure, options: Any) -> None:
    table = report.table(figure.name, COLUMNS)
    steps = 6 if options.quick else figure.steps
    for case in figure.cases(quick=options.quick):
        key = dict(zip(KEYS, (case.setting, case.arm, case.change, case.x), strict=True))
        if table.has(key):
            continue
        step = figure.step(case)
        found = [
            predict(step.graph, step.facts, step.hosts, seed=seed, runs=1, steps=steps)
            for seed in options.seeds
        ]
        values = _values([each for each in found if each is not None])
        rate, base = values["samples/s"], figure.base(case)
        relative = {
            "of linear": _of_linear(table, case, rate) if figure.is_linear else None,
            "base": base,
            "of base": _of_base(table, case, base, rate) if base else None,
        }
        published = figure.published(case)
        table.row({
            **key, **values, **relative, "published samples/s": published.samples_per_s, "published of linear": published.of_linear,
            "published of base": published.of_base, "published shape": published.shape, "pass": figure.passes,
        })  # fmt: skip


def _values(found: list[Prediction]) -> dict[str, Any]:
    """The median over seeds, and the band. The bottleneck is that of the first seed."""
    runs = [each.simulated for each in found]
    first, rates = runs[0], [each.samples_per_s for each in runs]
    return {
        "samples/s": median(rates),
        "5 %": min(rates) / FACTOR,
        "95 %": max(rates) * FACTOR,
        "bottleneck": first.bottleneck,
        "in use": max(first.utilization.values()),
        "staleness": f"{first.staleness_p50}, {first.staleness_p99}",
        "extrapolated": bool(first.extrapolated),
        "because": "; ".join(first.extrapolated),
    }


def _of_linear(table: harness.ResultTable, case: Case, rate: float) -> float:
    """Samples/s for a unit of size, relative to the smallest size with the same setting, arm and assumptions."""
    for row in table.rows:
        if (row["setting"], row["arm"], row["changed"]) == (case.setting, case.arm, case.change):
            return float(rate / case.x / (row["samples/s"] / row["x"]))
    return 1.0


def _of_base(table: harness.ResultTable, case: Case, base: str, rate: float) -> float | None:
    """Samples/s relative to the base arm with the same setting and assumptions: of equal size, or of its only size."""
    if case.arm == base:
        return 1.0
    rows = [
        row
        for row in table.rows
        if (row["setting"], row["arm"], row["changed"]) == (case.setting, base, case.change)
    ]
    equal = [row for row in rows if row["x"] == case.x]
    found = equal or (rows if len(rows) == 1 else [])
    return rate / found[0]["samples/s"] if found else None


if __name__ == "__main__":
    main()
