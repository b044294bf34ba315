"""Predicted samples/s of the runs of ``slow_hosts``, from a calibration of this machine. Trains nothing.

    girih calibrate --trainers 2 --out calibration.json        # on a machine that does nothing else
    girih bench slow_predicted --calibration calibration.json --json docs/results/slow-hosts-predicted.json

``docs/scale.md`` shows these values beside the measured ones. Hosts, models and strategies are those of ``slow_hosts``. Each process has
one thread, as on hosts of less than two cores. A pass of the model with one thread is measured once, so that all predictions
use the same. Links have the goodput of TCP and a token bucket, like those of the runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fleet
import harness
import hosts_file
import network
import predicting
import slow_runs
from hosts_file import Kinds
from slow_hosts import HOSTS, IN_PROPORTION

from girih.app.run_config import RunConfig
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost
from girih.planner.simulator.hosts import Hosts
from girih.planner.simulator.result import RUNS, STEPS

BATCHES = 4
"""Batches of data, which the facts of a run count."""
THREADS = 1
COLUMNS = {
    "strategy": "{}", **slow_runs.WHERE, "samples/s": "{:,.0f}", "5 %": "{:,.0f}", "95 %": "{:,.0f}",
    "staleness": "{:.2f}", "staleness, most": "{}", "bounded by": "{}",
}  # fmt: skip
QUICK: dict[str, Any] = {"counts": [2], "cores": [0.1], "batch": 32, "cardinality": 200}


def main() -> None:
    parser = harness.parser("slow_predicted", __doc__)
    parser.add_argument("--quick", action="store_true", help="few hosts and steps: shows that it runs")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of girih calibrate")
    parser.add_argument("--hosts", type=Path, default=HOSTS, metavar="FILE")
    parser.add_argument("--cores", type=float, nargs="+", default=[1.0, 0.5, 0.2, 0.1], help="of proportion")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers of trainers")
    parser.add_argument("--batch", type=int, default=512, help="examples of a trainer")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cardinality", type=int, default=20_000, help="ids that a feature may have")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    report = harness.Report("slow_predicted", options)
    kinds = hosts_file.load(options.hosts)
    with tempfile.TemporaryDirectory() as directory:
        predictor = Predictor(options, Calibration.read(options.calibration), Path(directory))
        tables = (
            ("proportion", _proportion(options, kinds)),
            ("systems by the number of trainers", _all(options, kinds)),
        )
        for title, runs in tables:
            table = report.table(title, COLUMNS)
            for name, hosts in runs:
                table.row(predictor.row(name, hosts))
    report.not_identical(
        "quotas of processor time stall a process for up to 10 ms; simulated hosts have a slow core instead"
    )
    report.finish()


Runs = Iterator[tuple[str, Kinds]]


def _proportion(options: argparse.Namespace, kinds: Kinds) -> Runs:
    for cores in options.cores:
        for name in IN_PROPORTION:
            yield name, hosts_file.at_cores(hosts_file.for_trainers(kinds, 2), cores)


def _all(options: argparse.Namespace, kinds: Kinds) -> Runs:
    for count in options.counts:
        hosts = hosts_file.for_trainers(kinds, count)
        for name in slow_runs.contestants(hosts):
            yield name, hosts


class Predictor:
    """Predicts a strategy on slow hosts."""

    def __init__(self, options: argparse.Namespace, calibration: Calibration, directory: Path) -> None:
        self._options, self._calibration, self._directory = options, calibration, directory
        self._size = {"runs": 1, "steps": 8} if options.quick else {"runs": RUNS, "steps": STEPS}
        self._cost: DenseCost | None = None

    def row(self, name: str, kinds: Kinds) -> dict[str, Any]:
        """What is predicted for a contestant of ``slow_hosts``."""
        settings = self._settings(name, kinds)
        if self._cost is None:  # a share has the same size with any number of trainers
            self._cost = predicting.measured_cost(settings, max(settings.strategy.trainers, fleet.CORES))
        facts = predicting.facts_with(settings, settings.strategy, self._cost, self._calibration, THREADS)
        # runs have no calibration, so nominal speeds place their operators
        net = settings.planned_net()[1] if settings.strategy.places_operators else None
        if net is not None:
            facts = replace(facts, graph=net.facts.graph, tagging=net.facts.tagging, wire=net.facts.wire)
        found = predicting.predicted(settings.strategy, facts, simulated(kinds), **self._size)
        return {
            "strategy": name,
            **slow_runs.where(kinds),
            "samples/s": found["samples_per_s"],
            "5 %": found["samples_per_s_p5"],
            "95 %": found["samples_per_s_p95"],
            "staleness": found["staleness_mean"],
            "staleness, most": found["staleness_max"],
            "bounded by": found["bound"],
        }

    def _settings(self, name: str, kinds: Kinds) -> RunConfig:
        options, strategy = self._options, slow_runs.contestants(kinds)[name]
        batch = options.batch * hosts_file.num_hosts(kinds, hosts_file.TRAINER)
        config = self._directory / str(batch) / "config.toml"
        if not config.exists():
            fleet.write_task(
                config.parent, rows=BATCHES * batch, cardinality=options.cardinality, dim=options.dim, shuffle=False
            )  # fmt: skip
        overrides = (
            fleet.strategy_override(strategy),
            fleet.override("model", slow_runs.MODEL),
            fleet.override("sparse_optimizer", slow_runs.ROW_OPTIMIZER),
            f"data.batch_size = {batch}",
        )
        return RunConfig.load(config, overrides=overrides)


def simulated(kinds: Kinds) -> Hosts:
    """The hosts as the simulator has them: their links carry TCP, through a token bucket. Their memory bounds nothing here."""
    return Hosts(
        tuple(
            replace(
                kind, gbit=predicting.GOODPUT * kind.gbit, burst_kb=network.BURST_BYTES / 1e3, memory_gb=1e3
            )
            for kind in kinds
        )
    )


if __name__ == "__main__":
    main()
