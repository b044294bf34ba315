"""AUC of hybrid and asynchronous with 8 and 16 trainers on slow hosts, whose staleness is that of separate machines.

The case and the rules are those of ``strategy_quality``: equally many updates, each of equally many examples; each arm has its own best
learning rate on validation data of seed 1, and seeds 2 to 4 are reported. "One process" makes the same updates without distribution.
What is kept in ``--results`` is not trained again. Needs root.

    GIRIH_DATA=... girih bench slow_hosts_quality
    GIRIH_DATA=... girih bench slow_hosts_quality --case kuairand/dnn --counts 8
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import fleet
import harness
import hosts_file
import network
import pages
import slow_runs
import strategy_quality
import tomli_w
from experiments import (
    KEPT,
    RUNNING_PARTS,
    Results,
    Run,
    add_options,
    best_valid,
    find_data,
    results,
    trained,
    tried,
    tuned,
)
from hosts_file import Kinds
from slow_hosts import HOSTS
from strategy_quality import MOST_FACTORS, NUM_TRAIN, ONE, TUNED, Arm, Case

from girih.strategies.remote import COUNT_OPTIONS

STALENESS = 4
TITLE = "quality: AUC with equally many updates"


def main() -> None:
    parser = harness.parser("slow_hosts_quality", __doc__)
    pages.add_option(parser, page_parts)
    add_options(parser, pictures=False)
    parser.add_argument("--hosts", type=Path, default=HOSTS, metavar="FILE")
    parser.add_argument("--case", default="kuairand/dnn", choices=[*strategy_quality.CASES])
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 16], help="of trainers")
    parser.add_argument("--cores", type=float, default=1.6, help="of all hosts together: fewer are faster")
    parser.add_argument("--evaluations", type=int, default=3, help="on validation data, of a run")
    options = parser.parse_args()
    report = harness.Report("slow_hosts_quality", options)
    kinds = hosts_file.load(options.hosts)
    reason = network.missing(delay=any(kind.delay_ms for kind in kinds), cores=True)
    if reason is not None:
        report.skip("all", reason)
        report.finish()
        return
    if options.case.startswith("generated"):
        strategy_quality.generate()
    else:
        find_data(parser)
    kept = results(options, "slow-hosts-quality", parts=RUNNING_PARTS)
    _show(report, options, kept, kinds)
    print(kept.told())
    report.finish()


def arms(count: int, kinds: Kinds) -> dict[str, Arm]:
    """Name → arm, with so many trainers."""
    served = {"staleness": STALENESS, "trainers": count, **slow_runs.served(kinds)}
    return {
        f"hybrid, τ = {STALENESS}": Arm({"name": "hybrid", **served}),
        f"asynchronous, τ = {STALENESS}": Arm({"name": "asynchronous", **served}, per_step=count),
    }


def _show(report: harness.Report, options: argparse.Namespace, kept: Results, kinds: Kinds) -> None:
    case, name = strategy_quality.CASES[options.case], options.case
    table = report.table(
        TITLE,
        {"case": "{}", "trainers": "{}", "strategy": "{}", "rates ×": "{:g}", "updates": "{:,}", "seeds": "{}", "AUC": "{:.4f}",
         "AUC of each": "{}", "less one process": "{:+.4f}", "logloss": "{:.4f}", "staleness": "{:.2f}", "staleness, most": "{}",
         "dense staleness, most": "{}", "factors tried": "{}"},
    )  # fmt: skip
    reference = _trained(f"{name}/one process", case, ONE, None, kept, options)
    table.row(
        {"case": name, "trainers": 1, "strategy": "one process", **reference[0], "less one process": 0.0}
    )
    for count in options.counts:
        hosts = hosts_file.for_trainers(kinds, count)
        hosts = hosts_file.at_cores(hosts, options.cores / sum(kind.count for kind in hosts))
        for arm_name, arm in arms(count, hosts).items():
            row, runs = _trained(f"{name}/{count} trainers/{arm_name}", case, arm, hosts, kept, options)
            gaps = [run["auc"] - one["auc"] for run, one in zip(runs, reference[1], strict=True)]
            table.row(
                {"case": name, "trainers": count, "strategy": arm_name, **row, "less one process": mean(gaps)}
            )


def _trained(
    title: str, case: Case, arm: Arm, kinds: Kinds | None, kept: Results, options: argparse.Namespace
) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]]]:
    """Columns of an arm, and its runs by the reported seeds."""
    quick: bool = options.quick
    conditions = {} if kinds is None else {"hosts": hosts_file.as_rows(kinds)}

    def train(factor: float, seed: int) -> Mapping[str, Any]:
        config = case.config(arm, factor, seed, quick=quick)
        updates = min(NUM_TRAIN[case.data] * case.passes // case.update, 40 if quick else 1 << 60)
        every = max(1, updates // arm.per_step // options.evaluations)
        config["train"] |= {"evaluate_every_steps": every, "max_steps": every * options.evaluations}
        run = Run(f"{title}/x{factor:g}/{seed}", config, arm.strategy, conditions)
        (found,) = kept.train(
            [run], trained if kinds is None else lambda run: _hosted(run, kinds, every, options.evaluations)
        )
        return found

    factor = tuned(
        lambda factor: best_valid(train(factor, TUNED)),
        case.factors[: 1 if quick else None],
        MOST_FACTORS,
        grow=not quick,
    )
    runs = [train(factor, seed) for seed in case.seeds[: 1 if quick else None]]
    row = {
        "rates ×": factor,
        "updates": runs[0]["steps"] * arm.per_step,
        "seeds": len(runs),
        "AUC": mean(run["auc"] for run in runs),
        "AUC of each": " ".join(f"{run['auc']:.4f}" for run in runs),
        "logloss": mean(run["logloss"] for run in runs),
        "staleness": mean(run["staleness_mean"] for run in runs),
        "staleness, most": max(run["staleness_max"] for run in runs),
        "dense staleness, most": max(run.get("dense_staleness_max", 0) for run in runs),
        "factors tried": tried(kept, title, TUNED, lambda run: f"{best_valid(run):.4f}"),
    }
    return row, runs


def _hosted(run: Run, kinds: Kinds, every: int, evaluations: int) -> dict[str, Any]:
    """Trains a run on hosts; returns the same as :func:`experiments.trained`."""
    counts = {
        hosts_file.TRAINER: run.strategy["trainers"],
        **{role: run.strategy[option] for role, option in COUNT_OPTIONS.items()},
    }
    with tempfile.TemporaryDirectory() as directory, slow_runs.hosts_of(kinds) as hosts:
        file = Path(directory, "config.toml")
        file.write_text(tomli_w.dumps(dict(run.config)))
        plan = fleet.Plan(
            str(file), (fleet.strategy_override(run.strategy),), warmup=0, steps=every, windows=evaluations,
            hosts=hosts_file.specs(hosts, hosts_file.placed(kinds, counts)), **slow_runs.bounds_of(hosts),
        )  # fmt: skip
        found = fleet.measure(plan, timeout_s=7200.0, tries=1)
    summary = found["summary"]
    kept = {key: summary[key] for key in KEPT if key in summary}
    return kept | {"curve": [[step, round(auc, 6)] for step, _, auc in found["curve"]]}


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of the page."""
    lines = [
        [
            row["case"], f"{row['trainers']}", row["strategy"], f"{row['AUC']:.4f}", f"{row['less one process']:+.4f}", "–",
            row["AUC of each"], f"{row['rates ×']:g}", f"{row['updates']:,}", f"{row['staleness']:.2f}", f"{row['staleness, most']}",
            f"{row['dense staleness, most']}",
        ]
        for row in pages.rows(results, TITLE)
    ]  # fmt: skip
    header = (
        "case",
        "trainers",
        "strategy",
        "test AUC",
        "less one process",
        "published gap",
        "seeds",
        "rates ×",
        "updates",
        "staleness",
        "at most",
        "dense, at most",
    )
    return {"quality": pages.table(header, lines)}


if __name__ == "__main__":
    main()
