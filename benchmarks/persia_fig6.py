"""Persia's Figure 6: seconds of training until an AUC on validation data is reached, over slow links.

KuaiRand and the network of the case kuairand/dnn of ``strategy_quality``, one epoch; updates are of equally many examples under
every strategy. Rates are those that ``strategy_quality`` has chosen for each (its results are read; the recipe's where
there are none). "hybrid, τ = 0" is Persia's fully synchronous mode. Every process has a host of its own, as in
``persia_wire``; needs root. Evaluations are left out of the time, as are starts of processes. Writes persia-fig6.svg to
``--docs``; what is kept in ``--results`` is not run again.

    GIRIH_DATA=... girih bench persia_fig6
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import fleet
import harness
import network
import tomli_w
from experiments import (
    RESULTS,
    RUNNING_PARTS,
    Results,
    Run,
    add_options,
    best_valid,
    find_data,
    pictures,
    results,
    spread,
)
from pictures import Chart, write_picture
from strategy_quality import CASES, NUM_TRAIN, Arm

CASE, TRAINERS, SEEDS = "kuairand/dnn", 4, (2, 3, 4)
TCP = {"transport": "tcp", "trainers": TRAINERS}
ARMS = {
    "synchronous": Arm({"name": "synchronous", "trainers": TRAINERS}),
    "hybrid, τ = 0": Arm({"name": "hybrid", "staleness": 0, **TCP}),
    "hybrid, τ = 4": Arm({"name": "hybrid", "staleness": 4, **TCP}),
    "asynchronous, τ = 4": Arm({"name": "asynchronous", "staleness": 4, **TCP}, per_step=TRAINERS),
}
TUNED_AS = {"synchronous": "one process", "hybrid, τ = 0": "one process"}
"""Arms that take the rate of another one; see ``Case.same``."""
BASE = "hybrid, τ = 0"

Found = Mapping[str, Any]


def main() -> None:
    parser = harness.parser("persia_fig6", __doc__)
    add_options(parser)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--auc", type=float, nargs="+", default=[0.72, 0.73], help="to be reached")
    parser.add_argument("--evaluations", type=int, default=12)
    options = parser.parse_args()
    report = harness.Report("persia_fig6", options)
    reason = network.missing()
    if reason is not None:
        report.skip("all", reason)
        report.finish()
        return
    find_data(parser)
    kept = results(options, "persia-fig6", parts=RUNNING_PARTS)
    factors = {arm: chosen_factor(arm) for arm in options.arms}
    found: dict[tuple[str, str], list[Found]] = {}
    for seed in SEEDS[: 1 if options.quick else None]:
        for rate in options.rates:
            for arm in options.arms:
                run = _run(options, kept, rate, arm, factors[arm], seed)
                found.setdefault((rate, arm), []).append(run)
    _show(report, options, found, factors)
    charts = [
        Chart(
            f"links of {rate}",
            "seconds of training",
            "AUC on validation data",
            {arm: mean_curve(found[rate, arm]) for arm in options.arms},
        )
        for rate in options.rates
    ]
    write_picture(pictures(options) / "persia-fig6.svg", charts)
    print(kept.told())
    report.finish()


def chosen_factor(arm: str) -> float:
    """The factor of learning rates that ``strategy_quality`` found best for an arm; 1 where it has not looked."""
    name = TUNED_AS.get(arm, arm)
    folder = Results(RESULTS / "strategy-quality").file(Run(f"{CASE}/{name}/factor", {}, {})).parent
    tried = {
        float(file.parent.name.removeprefix("x")): best_valid(json.loads(file.read_text()))
        for file in folder.glob("x*/1.json")
    }
    return max(tried, key=lambda factor: tried[factor]) if tried else 1.0


def _run(options: argparse.Namespace, kept: Results, rate: str, name: str, factor: float, seed: int) -> Found:
    arm, case = ARMS[name], CASES[CASE]
    config = case.config(arm, factor, seed, quick=False)
    del config["data"]["test"], config["train"]["early_stopping"]
    steps = NUM_TRAIN[case.data] // case.update // arm.per_step
    every, windows = max(1, steps // options.evaluations), options.evaluations
    if options.quick:
        every, windows = 12 // arm.per_step, 2
    config["train"] |= {"epochs": 1, "evaluate_every_steps": every}
    conditions = {"rate": rate, "every": every, "windows": windows}
    run = Run(f"{rate}/{name}/x{factor:g}/{seed}", config, arm.strategy, conditions)
    return kept.measure(run, lambda run: _measured(run, 1 if options.quick else fleet.TRIES))


def _measured(run: Run, tries: int) -> dict[str, Any]:
    others = 0 if run.strategy["name"] == "synchronous" else 1
    names = network.names_apart(dict.fromkeys(network.ROLES, others) | {"trainer": TRAINERS})
    with (
        tempfile.TemporaryDirectory() as directory,
        network.network(names, run.conditions["rate"]) as hosts,
    ):
        file = Path(directory, "config.toml")
        file.write_text(tomli_w.dumps(run.config))
        plan = fleet.Plan(
            str(file),
            (fleet.strategy_override(run.strategy),),
            warmup=0,
            steps=run.conditions["every"],
            windows=run.conditions["windows"],
            hosts=network.apart(hosts),
        )
        found = fleet.measure(plan, timeout_s=900.0, tries=tries)
    windows_kept = ("step_s", "cpu_s", "machine_cpu_s")
    return {
        "tries": found["tries"],
        "curve": found["curve"],
        "windows": [{key: window[key] for key in windows_kept} for window in found["windows"]],
        "staleness_mean": found["summary"]["staleness_mean"],
        "dense_staleness_max": found["summary"]["dense_staleness_max"],
    }


def _show(
    report: harness.Report,
    options: argparse.Namespace,
    found: Mapping[tuple[str, str], Sequence[Found]],
    factors: Mapping[str, float],
) -> None:
    goals = {f"s to {auc:g}": auc for auc in options.auc}
    table = report.table(
        "seconds of training until an AUC on validation data is reached, mean of seeds",
        {"link": "{}", "strategy": "{}", "rates ×": "{:g}", **dict.fromkeys(goals, "{:.1f}"),
         **{f"{goal}, of τ = 0": "{:.2f}×" for goal in goals}, "reached by": "{}", "best AUC": "{}",
         "ms an update": "{:.1f}", "staleness": "{:.2f}", **fleet.DISTURBED},
    )  # fmt: skip
    for (rate, arm), runs in found.items():
        row = {"link": rate, "strategy": arm, "rates ×": factors[arm], **fleet.disturbance(*runs)}
        for goal, auc in goals.items():
            own, base = mean_time(runs, auc), mean_time(found.get((rate, BASE), ()), auc)
            row |= {goal: own, f"{goal}, of τ = 0": base / own if base and own else None}
        reached = [sum(seconds_to(run["curve"], auc) is not None for run in runs) for auc in goals.values()]
        last = [run["curve"][-1] for run in runs]
        table.row(
            row
            | {
                "reached by": " ".join(f"{number} of {len(runs)}" for number in reached),
                "best AUC": spread([max(auc for *_, auc in run["curve"]) for run in runs]),
                "ms an update": 1e3 * mean(s / steps for steps, s, _ in last) / ARMS[arm].per_step,
                "staleness": mean(run["staleness_mean"] for run in runs),
            }
        )


def mean_time(runs: Sequence[Found], auc: float) -> float | None:
    """Seconds until an AUC, the mean of seeds; None unless all reach it."""
    times = [seconds_to(run["curve"], auc) for run in runs]
    reached = [time for time in times if time is not None]
    return mean(reached) if reached and len(reached) == len(times) else None


def seconds_to(curve: Sequence[Sequence[float]], auc: float) -> float | None:
    """When a curve first reaches an AUC, on the line between two evaluations; None where it does not.

    Args:
        curve: (steps, seconds, AUC) of each evaluation.
    """
    before: Sequence[float] | None = None
    for point in curve:
        if point[2] >= auc:
            if before is None:
                return point[1]
            share = (auc - before[2]) / (point[2] - before[2])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def mean_curve(runs: Sequence[Found]) -> list[tuple[float, float]]:
    """(seconds, AUC), means of seeds."""
    columns = zip(*(run["curve"] for run in runs), strict=True)
    return [(mean(point[1] for point in points), mean(point[2] for point in points)) for points in columns]


if __name__ == "__main__":
    main()
