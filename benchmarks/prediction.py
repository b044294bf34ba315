"""Predicted samples/s beside measured ones: strategies, models, sizes and links that the calibration has not seen.

The machine is calibrated once, unless ``--calibration`` names a file. Every process has a host of its own (a network namespace; needs
root), whose link has the bandwidth of ``--links`` in each direction; predictions know the same bandwidth and nothing else
of it. "none" leaves processes on this machine, and is all there is without root. The transport is TCP everywhere.

A prediction is that of ``girih simulate --calibration`` on one host whose processes have links of their own, with the rate and the
token bucket of the namespaces; a group's run holds the plan that was made when it was measured. It needs the time of the model's pass on
the machine of the runs: from ``passes.json`` in the folder of results if it is there, else measured now. A measurement takes ten to twenty seconds. Its result is a file of its own in
``--results``, so that a grid that was stopped goes on where it was, and ``--models``, ``--sizes``, ``--links`` and ``--strategies`` measure a
part of it; predictions are made anew each time.

These numbers judge the predictions:

- the median of |predicted / measured - 1|. Lin et al. (arXiv 2404.12674) report 5.2 % for synchronous training on GPUs.
- the share of cases in which the fastest distributed strategy is predicted to be the fastest. A case is one model, size and
  link. Lin et al. report that they pick the fastest sharding in 85 % of cases.
- the regret of a case: how much slower the strategy that is predicted to be the fastest is than the fastest.
- the share of runs within the band of 90 %.
- the share of pairs in the right order: pairs of distributed strategies of one case whose measured speeds differ by more than
  10 %. Lin et al. have no such number.

For the worst five predictions a table says what is wrong: core-seconds of the run's processes, or the time that the cores wait.

    girih bench prediction
    girih bench prediction --quick
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import fleet
import harness
import network
from experiments import RUNNING_PARTS, Results, Run, add_options, results
from persia_wire import bytes_per_s

from girih import strategies
from girih.app.run_config import RunConfig
from girih.lifecycle.planning import facts_of, measure_access
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost, Facts
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.simulator.result import RUNS, STEPS
from girih.strategies.strategy import price

NO_LINK = "none"
TRIES = 2
APART = 1.1
"""Measured speeds beyond this ratio are a pair whose order counts."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "synchronous": {"name": "synchronous", "trainers": 2},
    "substitution": {"name": "substitution", "trainers": 2},
    "hybrid, τ = 0": {"name": "hybrid", "trainers": 2, "staleness": 0, "transport": "tcp"},
    "hybrid, τ = 4": {"name": "hybrid", "trainers": 2, "staleness": 4, "transport": "tcp"},
    "asynchronous": {"name": "asynchronous", "trainers": 2, "staleness": 4, "transport": "tcp"},
    "two replicas": {"name": "hierarchical", "groups": 2, "nets": 2, "transport": "tcp"},
    "one group": {
        "name": "hierarchical", "trainers_per_group": 2, "servers_per_group": 2, "nets": 2, "transport": "tcp",
    },
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepfm": {"name": "deepfm"},
    "dlrm": {"name": "dlrm", "bottom_hidden": [128]},
    "dcn": {"name": "dcn"},
}
SIZES: dict[str, dict[str, Any]] = {
    "small": {"batch": 1024, "dim": 8, "hidden": [128, 64]},
    "large": {"batch": 4096, "dim": 32, "hidden": [1024, 512, 256]},
}
SHARES = {"small": 1.0, "large": 0.5, NO_LINK: 1.0, "1gbit": 0.8, "200mbit": 0.5}
"""Part of the steps that a size, and a link, are given: they take longer."""
FEWEST = 6
"""Steps of a window, and of those before the first: more than are under way at once, so that they are of a steady state."""
GOODPUT = 1448 / 1514
"""Part of a link that is left for what TCP carries: of each packet of 1,500 bytes 52 are headers, and 14 more are Ethernet's."""
REGRET = 0.05
"""Regret up to which a case counts as well picked."""
WORST = 5
QUICK: dict[str, Any] = {
    "strategies": ["local", "hybrid, τ = 4"], "models": ["deepfm"], "sizes": ["small"], "links": [NO_LINK],
    "warmup": 2, "steps": 2, "windows": 2, "cardinality": 1000,
}  # fmt: skip

Found = Mapping[str, Any]


def main() -> None:
    parser = harness.parser("prediction", __doc__)
    add_options(parser, pictures=False)
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of girih calibrate; made where it is left out"
    )
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--links", nargs="+", default=["200mbit", "1gbit", NO_LINK])
    parser.add_argument("--cardinality", type=int, default=5000, help="ids that a feature may have")
    fleet.add_windows(parser, steps=20, windows=3)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    report = harness.Report("prediction", options)
    if any(link != NO_LINK for link in options.links) and (reason := network.missing()) is not None:
        report.skip("links", reason)
        options.links = [NO_LINK]
    kept = results(options, "prediction", parts=RUNNING_PARTS)
    calibration = Calibration.read(options.calibration or _calibrated(kept.folder))
    with tempfile.TemporaryDirectory() as directory:
        found = [
            (each, *_measured_case(*each, calibration, options, kept, Path(directory)))
            for each in _cases(options)
        ]
        passes = Passes.read(kept.folder / "passes.json")
        rows = [_row(*each, calibration, passes, options, Path(directory)) for each in found]
    _show(report, rows)
    print(kept.told())
    report.finish()


def judged(rows: Sequence[Found]) -> dict[str, Any]:
    """The median error, the share of pairs in the right order, and the cases whose fastest strategy is predicted.

    Args:
        rows: each with its ``case`` (model, size and link), ``strategy``, ``predicted`` and ``measured``.
    """
    distributed = [row for row in rows if row["strategy"] != "local"]
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
    regrets = [_regret(case) for case in contests]
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


def _fastest(rows: Sequence[Found], speed: str) -> str:
    return str(max(rows, key=lambda row: row[speed])["strategy"])


def _regret(rows: Sequence[Found]) -> float:
    picked = max(rows, key=lambda row: row["predicted"])
    return 1 - float(picked["measured"] / max(row["measured"] for row in rows))


def _ratio(one: float, other: float) -> float:
    return max(one, other) / min(one, other)


def _cases(options: argparse.Namespace) -> list[tuple[str, str, str, str]]:
    """Strategy, model, size, link; one process has no link."""
    return [
        (strategy, model, size, link)
        for model in options.models
        for size in options.sizes
        for link in options.links
        for strategy in options.strategies
        if link == NO_LINK or strategy != "local"
    ]


def _calibrated(folder: Path) -> Path:
    """The calibration beside the results, made once."""
    file = folder / "calibration.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "girih", "calibrate", "--out", str(file)], check=True)
    return file


def _measured_case(
    strategy: str,
    model: str,
    size: str,
    link: str,
    calibration: Calibration,
    options: argparse.Namespace,
    kept: Results,
    directory: Path,
) -> tuple[Run, Found]:
    conditions = _windows(options, size, link) | {"cardinality": options.cardinality, "link": link}
    if "servers_per_group" in STRATEGIES[strategy]:
        conditions["planned_for"] = link
    run = Run(
        f"{model}/{size}/{link}/{strategy}",
        {**SIZES[size], "model": MODELS[model]},
        STRATEGIES[strategy],
        conditions,
    )
    return run, kept.measure(run, lambda run: _measured(run, calibration, options, directory))


def _row(
    case: tuple[str, str, str, str],
    run: Run,
    found: Found,
    calibration: Calibration,
    passes: Passes | None,
    options: argparse.Namespace,
    directory: Path,
) -> dict[str, Any]:
    """A measurement beside what is predicted for it; both with the names of :func:`judged` and :func:`missing_term`."""
    strategy, *others = case
    speed = _predicted(run, calibration, passes, options, directory)
    return {
        "case": tuple(others),
        "strategy": strategy,
        "examples": run.config["batch"],
        "predicted": speed["samples_per_s"],
        "low": speed["samples_per_s_p5"],
        "high": speed["samples_per_s_p95"],
        "measured": statistics.median(window["samples_per_s"] for window in found["windows"]),
        "bound": speed["bound"],
        "found": {**found, "speed": speed},
    }


@dataclass(frozen=True)
class Passes:
    """Times of the models' passes on the machine of the runs.

    Attributes:
        memory_bytes: memory of the machine.
        threads: number of trainers → threads of each.
        costs: model, size, number of trainers, joined by "/" → the cost of a trainer's pass and of its update.
    """

    memory_bytes: float
    threads: Mapping[str, int]
    costs: Mapping[str, DenseCost]

    @classmethod
    def read(cls, file: Path) -> Passes | None:
        """The times of a file, or None if there is none."""
        if not file.is_file():
            return None
        read = json.loads(file.read_text())
        costs = {
            name: DenseCost(memory_bytes=read["memory_bytes"], **cost) for name, cost in read["costs"].items()
        }
        return cls(read["memory_bytes"], read["threads"], costs)

    def facts(self, settings: RunConfig, run: Run, calibration: Calibration) -> Facts:
        """The facts of a run on that machine. Nothing is timed."""
        (sparse, dense), strategy, data = settings.halves(), settings.strategy, settings.dataset("train")
        model, size, *_ = run.name.split("/")
        graph = strategy.operator_graph(sparse, dense) if strategy.places_operators else None
        return replace(
            facts_of(sparse, dense, strategy.trainers, settings.schedule),
            batch_size=data.batch_size,
            profile=measure_access(data, sparse, strategy.trainers),
            dense_cost=self.costs[f"{model}/{size}/{strategy.trainers}"],
            calibration=calibration,
            links=calibration.links,
            threads=self.threads[str(strategy.trainers)],
            memory_bytes=self.memory_bytes,
            graph=graph,
        )


def _predicted(
    run: Run, calibration: Calibration, passes: Passes | None, options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    """The speed that is predicted by the calibration and the link, before anything runs."""
    settings = RunConfig.load(_config(run.config, options, directory), overrides=_overrides(run))
    known = _over(calibration, run)
    if passes is not None:
        facts = passes.facts(settings, run, known)
    else:
        _, net = settings.planned_net(known)
        facts = settings.facts_by(known, net)(settings.strategy)
    size = {"runs": 1, "steps": 8} if options.quick else {"runs": RUNS, "steps": STEPS}
    own = price(settings.strategy, facts, hosts_of(calibration, run.conditions["link"]), **size)
    if own is None:
        raise SystemExit(f"{run.name}: no speed is predicted")
    return own.to_dict()


def _over(calibration: Calibration, run: Run) -> Calibration:
    """The calibration, with the links of a run."""
    link = run.conditions["link"]
    return calibration if link == NO_LINK else calibration.over(GOODPUT * bytes_per_s(link))


def hosts_of(calibration: Calibration, link: str) -> Hosts:
    """One machine, whose processes have links of their own."""
    if link == NO_LINK:
        return Hosts.like(calibration)
    group = HostGroup(
        count=1, cores=calibration.cores, memory_gb=1e3, gbit=8e-9 * GOODPUT * bytes_per_s(link),
        burst_kb=network.BURST_BYTES / 1e3, link_per_process=True,
    )  # fmt: skip
    return Hosts((group,))


def _windows(options: argparse.Namespace, size: str, link: str) -> dict[str, int]:
    """The steps of a configuration: fewer where they take long."""
    share = SHARES[size] * SHARES.get(link, 1.0)
    asked = fleet.windows_of(vars(options))
    fewest = min(FEWEST, asked["steps"])
    return asked | {name: max(fewest, round(share * asked[name])) for name in ("warmup", "steps")}


def missing_term(row: Found) -> dict[str, Any]:
    """Names what a prediction has wrong: ``work``, the milliseconds that the cores compute per step, or ``waiting``, those that they do not.

    Args:
        row: with ``examples``, ``predicted`` and ``found``, of which ``speed`` has the predicted ``work_ms``.
    """
    found = row["found"]
    work = (
        sum(found["speed"]["work_ms"].values()) / fleet.CORES,
        1e3 * fleet.median(found, "cpu_s") / fleet.CORES,
    )
    steps = (1e3 * row["examples"] / row["predicted"], 1e3 * fleet.median(found, "step_s"))
    waiting = tuple(max(0.0, step - each) for step, each in zip(steps, work, strict=True))
    name, (predicted, measured) = max(
        (("work", work), ("waiting", waiting)), key=lambda each: abs(each[1][0] - each[1][1])
    )
    return {"misses": name, "predicted, ms": predicted, "measured, ms": measured}


def _held(run: Run, calibration: Calibration, options: argparse.Namespace, directory: Path) -> str | None:
    """The file with the plan that a group's run holds: it is the one that is priced."""
    if "planned_for" not in run.conditions:
        return None
    settings = RunConfig.load(_config(run.config, options, directory), overrides=_overrides(run))
    file = directory / "plan.json"
    file.write_text(json.dumps(settings.planned(_over(calibration, run)).to_dict()))
    return str(file)


def _measured(
    run: Run, calibration: Calibration, options: argparse.Namespace, directory: Path
) -> dict[str, Any]:
    link = run.conditions["link"]
    chosen = strategies.create(dict(run.strategy), "[strategy]")
    counts = {"trainer": chosen.trainers, **chosen.roles}
    place = network.nowhere() if link == NO_LINK else network.network(network.names_apart(counts), link)
    with place as hosts:
        plan = fleet.Plan(
            str(_config(run.config, options, directory)),
            _overrides(run),
            **{name: run.conditions[name] for name in ("warmup", "steps", "windows")},
            hosts=network.apart(hosts),
            links=tuple(hosts.links.values()),
            held=_held(run, calibration, options, directory),
        )
        found = fleet.measure(plan, timeout_s=900.0, tries=1 if options.quick else TRIES)
    keys = ("samples_per_s", "step_s", "cpu_s", "cpu_s_each", "machine_cpu_s")
    windows = [{key: window[key] for key in keys} for window in found["windows"]]
    return {"windows": windows, "tries": found["tries"]}


def _overrides(run: Run) -> tuple[str, ...]:
    task = run.config
    return (
        fleet.strategy_override(run.strategy),
        fleet.override("model", {**task["model"], "hidden": task["hidden"]}),
        f"data.batch_size = {task['batch']}",
    )


def _config(task: Mapping[str, Any], options: argparse.Namespace, directory: Path) -> Path:
    """Data for one epoch that is longer than a run."""
    file = directory / f"{task['dim']}-{task['batch']}" / "config.toml"
    if not file.exists():
        steps = options.warmup + options.steps * options.windows + 16  # the most of any link
        fleet.write_task(
            file.parent, rows=steps * task["batch"], cardinality=options.cardinality, dim=task["dim"], shuffle=False
        )  # fmt: skip
    return file


def _show(report: harness.Report, rows: Sequence[Found]) -> None:
    table = report.table(
        "samples/s, predicted and measured",
        {"model": "{}", "size": "{}", "link": "{}", "strategy": "{}", "predicted": "{:,.0f}", "measured": "{:,.0f}",
         "error": "{:+.0%}", "5 %": "{:,.0f}", "95 %": "{:,.0f}", "staleness": "{}", "bounded by": "{}", **fleet.DISTURBED},
    )  # fmt: skip
    for row in rows:
        model, size, link = row["case"]
        table.row(
            {
                "model": model,
                "size": size,
                "link": link,
                "strategy": row["strategy"],
                "predicted": row["predicted"],
                "measured": row["measured"],
                "error": row["predicted"] / row["measured"] - 1,
                "5 %": row["low"],
                "95 %": row["high"],
                "staleness": "{staleness_p50}, {staleness_p99}".format(**row["found"]["speed"]),
                "bounded by": row["bound"],
                **fleet.disturbance(row["found"]),
            }
        )
    judgement = report.table(
        f"all runs; pairs are of distributed strategies whose measured speeds differ by more than {APART - 1:.0%}",
        {"of": "{}", "runs": "{}", "median error": "{:.1%}", "worst error": "{:.1%}", "pairs": "{}", "rightly ordered": "{:.0%}",
         "cases": "{}", "fastest picked": "{:.0%}", "regret ≤ 5 %": "{:.0%}", "worst regret": "{:.0%}", "in the band": "{:.0%}"},
    )  # fmt: skip
    judgement.row({"of": "all", **judged(rows)})
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        judgement.row({"of": strategy, **judged([row for row in rows if row["strategy"] == strategy])})
    worst = report.table(
        f"the worst {WORST}",
        {"model": "{}", "size": "{}", "link": "{}", "strategy": "{}", "error": "{:+.0%}", "misses": "{}",
         "predicted, ms": "{:.1f}", "measured, ms": "{:.1f}"},
    )  # fmt: skip
    for row in sorted(rows, key=lambda row: -_ratio(row["predicted"], row["measured"]))[:WORST]:
        names = dict(zip(("model", "size", "link"), row["case"], strict=True))
        error = row["predicted"] / row["measured"] - 1
        worst.row({**names, "strategy": row["strategy"], "error": error, **missing_term(row)})
    report.not_identical("links are of network namespaces of one machine, whose processes share its cores")


if __name__ == "__main__":
    main()
