"""HT's Figures 8 and 10 as the cost model predicts them: examples/s by groups, by nodes per group, and beside EASGD.

    girih bench hierarchical_scale --calibration docs/results/prediction/calibration.json

Each trainer and each group server has a machine like the calibrated one to itself; embedding servers, embedding workers and
loaders, as many of each as trainers, share those machines, as dense servers do, one for each group. The model is that of
``hierarchical_speed``: DLRM over 26 categorical and 13 numeric features, ``--batch`` examples for a net's step. Nothing is trained: the calibration is a file,
and a pass of the model and a step of its optimizer are measured once, so that arms differ by their machines alone. Its data's keys are counted for each.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import fleet
import harness
from hierarchical_speed import MODEL, QUICK_MODEL

from girih.app.run_config import RunConfig
from girih.comm.group import TrainerGroup
from girih.lifecycle import planning
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost
from girih.strategies.strategy import price

COUNTS = (2, 4, 6, 8, 10)
GROUP_SIZE, GROUPS = 6, 8
"""The group of Figure 10a, and the groups of Figure 10b."""
EASGD = (10, 20, 30, 40)
MEASURED_BATCHES = 4
GBIT = 1e9 / 8


def main() -> None:
    parser = harness.parser("hierarchical_scale", __doc__)
    parser.add_argument(
        "--quick", action="store_true", help="few groups and a small model: shows that it runs"
    )
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of girih calibrate")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="Gbit/s of each link")
    parser.add_argument("--batch", type=int, default=512, help="examples of a net's step")
    parser.add_argument("--nets", type=int, default=4, help="batches that a trainer trains on at once")
    parser.add_argument("--cardinality", type=int, default=50_000, help="ids that a feature may have")
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    counts, easgd = (COUNTS, EASGD) if not options.quick else ((2, 4), (2,))
    if options.quick:
        vars(options).update(batch=32, cardinality=500)
    report = harness.Report("hierarchical_scale", options)
    report.not_identical("predicted, not measured: no more than one machine was there")
    report.not_identical("the plan pools the cores of all machines: no machine's own cores bound a trainer")
    calibration = Calibration.read(options.calibration)
    with tempfile.TemporaryDirectory() as directory:
        config = _task(options, max(counts) ** 2, Path(directory))
        settings = _settings(options, config, 1, 1, 0)
        sparse, dense = settings.halves()
        cost = planning.measured_pass(settings.dataset("train"), sparse, dense, TrainerGroup(), 1)
        if cost is None:
            raise SystemExit(f"--batch {options.batch}: too few examples to measure a pass of the model")
        _show_pass(report, options.batch, cost)
        for gbit in options.gbit:
            _show(report, gbit, counts, easgd, Predictor(options, calibration, config, cost, gbit))
    report.finish()


class Predictor:
    """Predicts the speed of one arm on machines that are joined by links of one bandwidth."""

    def __init__(
        self,
        options: argparse.Namespace,
        calibration: Calibration,
        config: Path,
        cost: DenseCost,
        gbit: float,
    ) -> None:
        self._options, self._config, self._cost = options, config, cost
        self._calibration = calibration.over(gbit * GBIT)
        self._known: dict[tuple[int, int, int], dict[str, Any]] = {}

    def speed(self, groups: int, trainers: int, servers: int) -> dict[str, Any]:
        """What is predicted, as ``girih plan`` writes it, with ``machines``."""
        key = groups, trainers, servers
        if key not in self._known:
            self._known[key] = self._predicted(*key)
        return self._known[key]

    def _predicted(self, groups: int, trainers: int, servers: int) -> dict[str, Any]:
        settings = _settings(self._options, self._config, groups, trainers, servers)
        machines = groups * (trainers + servers)
        calibration = self._calibration.spread(machines)
        with mock.patch.object(planning, "measured_pass", return_value=self._cost):  # the same for all arms
            _, net = settings.planned_net(calibration)
            own = price(settings.strategy, settings.facts_by(calibration, net)(settings.strategy))
        if own is None:
            raise SystemExit(f"{settings.strategy}: no speed is predicted")
        return own.to_dict() | {"machines": machines}


def _settings(
    options: argparse.Namespace, config: Path, groups: int, trainers: int, servers: int
) -> RunConfig:
    """The configuration of an arm; all have the same share, and as many threads for each trainer."""
    all_trainers = groups * trainers
    strategy = {
        "name": "hierarchical", "groups": groups, "trainers_per_group": trainers, "servers_per_group": servers,
        "nets": options.nets, "transport": "tcp", "dense_servers": groups,
        "embedding_servers": all_trainers, "embedding_workers": all_trainers, "loaders": all_trainers,
    }  # fmt: skip
    return RunConfig.load(
        config,
        overrides=(
            fleet.strategy_override(strategy),
            fleet.override("model", QUICK_MODEL if options.quick else MODEL),
            f"data.batch_size = {options.batch * all_trainers}",
        ),
    )


def _task(options: argparse.Namespace, most_trainers: int, directory: Path) -> Path:
    rows = MEASURED_BATCHES * options.batch * most_trainers
    fleet.write_task(
        directory, rows=rows, cardinality=options.cardinality, dim=options.dim, shuffle=False
    )  # fmt: skip
    return directory / "config.toml"


def _show_pass(report: harness.Report, batch: int, cost: DenseCost) -> None:
    table = report.table(
        f"measured once: a pass of {batch} examples, and a step of the optimizer",
        {"pass, ms": "{:.2f}", "threads busy": "{:.2f}", "step, ms": "{:.2f}"},
    )
    table.row(
        {
            "pass, ms": 1e3 * cost.seconds(batch),
            "threads busy": cost.busy_threads,
            "step, ms": 1e3 * cost.update_s,
        }
    )


def _show(
    report: harness.Report, gbit: float, counts: tuple[int, ...], easgd: tuple[int, ...], predictor: Predictor
) -> None:
    size, groups = (counts[-1], counts[-1]) if GROUP_SIZE not in counts else (GROUP_SIZE, GROUPS)
    table = report.table(
        f"all groups and sizes, links of {gbit:g} Gbit/s",
        {"(trainers, group servers) of a group": "{}", **{f"{count} groups": "{:,.0f}" for count in counts}},
    )
    for pair in counts:
        speeds = {f"{count} groups": predictor.speed(count, pair, pair)["samples_per_s"] for count in counts}
        table.row({"(trainers, group servers) of a group": f"({pair}, {pair})", **speeds})
    columns = {
        "arm": "{}", "machines": "{}", "samples/s": "{:,.0f}", "of the first": "{:.2f}×", "were it linear": "{:.2f}×",
        "bounded by": "{}",
    }  # fmt: skip
    by_groups = report.table(f"by groups of ({size}, {size}), {gbit:g} Gbit/s (Figure 10a)", columns)
    _rows(by_groups, {f"{each} groups": predictor.speed(each, size, size) for each in counts})
    by_size = report.table(f"by nodes of each of {groups} groups, {gbit:g} Gbit/s (Figure 10b)", columns)
    _rows(by_size, {f"({each}, {each})": predictor.speed(groups, each, each) for each in counts})
    beside = report.table(
        f"groups of ({size}, {size}) beside a copy for each trainer, {gbit:g} Gbit/s (Figure 8)", columns
    )
    copies = {f"EASGD, {each} trainers": predictor.speed(each, 1, 0) for each in reversed(easgd)}
    arms = {f"{each} groups": predictor.speed(each, size, size) for each in counts}
    _rows(beside, copies | arms)


def _rows(table: harness.ResultTable, arms: Mapping[str, Mapping[str, Any]]) -> None:
    first = next(iter(arms.values()))
    for name, found in arms.items():
        table.row(
            {
                "arm": name,
                "machines": found["machines"],
                "samples/s": found["samples_per_s"],
                "of the first": found["samples_per_s"] / first["samples_per_s"],
                "were it linear": found["machines"] / first["machines"],
                "bounded by": found["bound"],
            }
        )


if __name__ == "__main__":
    main()
