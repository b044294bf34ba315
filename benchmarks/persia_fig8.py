"""Persia's Figure 8: samples/s of synchronous, hybrid and asynchronous by trainers, on one machine.

DeepFM (400-400-400) over 26 categorical and 13 numeric features, one process a trainer and a role, Parquet to step.
Contestants take turns; each round is a run of its own, whose first steps do not count.

    girih bench persia_fig8
    girih bench persia_fig8 --trainers 1 2 --rounds 1
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fleet
import harness
import numpy as np

STRATEGIES = {
    "synchronous": "",
    "hybrid": ", staleness = 4",
    "asynchronous": ", staleness = 4",
}


def main() -> None:
    parser = harness.parser("persia_fig8", __doc__)
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--batch", type=int, default=4096, help="examples of a trainer")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rows", type=int, default=500_000, help="ids of each feature")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    report = harness.Report("persia_fig8", options)
    report.not_identical(
        f"all processes share {fleet.CORES} cores: what a trainer more adds in work, the others lose in time"
    )
    with tempfile.TemporaryDirectory() as directory:
        config = fleet.write_task(
            Path(directory), rows=800_000, cardinality=options.rows, dim=options.dim, batch=options.batch
        )
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for _ in range(options.rounds):
            for trainers in options.trainers:
                for name in options.strategies:
                    overrides = (
                        f'strategy = {{name = "{name}", trainers = {trainers}{STRATEGIES[name]}}}',
                        f"data.batch_size = {options.batch * trainers}",
                    )
                    run = fleet.measure(fleet.Plan(str(config), overrides))
                    found.setdefault((name, trainers), []).append(run)
    table = report.table(
        "samples/s by trainers",
        {"strategy": "{}", "trainers": "{}", "samples/s": "{:,.0f}", "of one trainer": "{:.2f}×",
         "of synchronous": "{:.2f}×", "ms a step": "{:.0f}", "CPU ms a step": "{:.0f}", "cores busy": "{:.2f}",
         **fleet.DISTURBED},
    )  # fmt: skip

    def middle(name: str, trainers: int, kind: str) -> float:
        return float(np.median([fleet.median(run, kind) for run in found[name, trainers]]))

    for name, trainers in sorted(found, key=lambda key: (options.strategies.index(key[0]), key[1])):
        rate = middle(name, trainers, "samples_per_s")
        one, base = (name, options.trainers[0]), ("synchronous", trainers)
        table.row(
            {
                "strategy": name,
                "trainers": trainers,
                "samples/s": rate,
                "of one trainer": rate / middle(*one, "samples_per_s"),
                "of synchronous": rate / middle(*base, "samples_per_s") if base in found else None,
                "ms a step": 1e3 * middle(name, trainers, "step_s"),
                "CPU ms a step": 1e3 * middle(name, trainers, "cpu_s"),
                "cores busy": middle(name, trainers, "cpu_s") / middle(name, trainers, "step_s"),
                **fleet.disturbance(*found[name, trainers]),
            }
        )
    report.finish()


if __name__ == "__main__":
    main()
