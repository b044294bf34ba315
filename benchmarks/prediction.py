"""Predicted samples/s beside measured ones: strategies, models, sizes and links that the calibration has not seen.

The machine is calibrated once, unless ``--calibration`` names a file. Every process has a host of its own (a network namespace; needs
root), whose link has the bandwidth of ``--links`` in each direction; predictions know the same bandwidth and nothing else
of it. "none" leaves processes on this machine, and is all there is without root. The transport is TCP everywhere.

A prediction is that of ``girih simulate --calibration`` on one host whose processes have links of their own, with the rate and the
token bucket of the namespaces; a group's run holds the plan that was made when it was measured. It needs the time of the model's pass on
the machine of the runs. ``passes.json`` in the folder of results has it; the first prediction measures it.

A measurement takes ten to forty seconds. Its result is a file of its own in ``--results``, so that a grid that was stopped goes on
where it was, and ``--models``, ``--sizes``, ``--links`` and ``--strategies`` measure a part of it; predictions are made anew each
time. ``--also`` adds kept runs of groups and of other benchmarks, and measures none.

These numbers judge the predictions:

- the median of |predicted / measured - 1|. Lin et al. (arXiv 2404.12674) report 5.2 % for synchronous training on GPUs.
- the share of cases in which the fastest distributed strategy is predicted to be the fastest. A case is one model, size and
  link. Lin et al. report that they pick the fastest sharding in 85 % of cases.
- the regret of a case: how much slower the strategy that is predicted to be the fastest is than the fastest.
- the share of runs within the band of 90 %.
- the share of pairs in the right order: pairs of distributed strategies of one case whose measured speeds differ by more than
  10 %. Lin et al. have no such number.

Further tables show which part of a step is wrong: processor time by role, the time that the cores wait, bytes by kind, and staleness.

    girih bench prediction
    girih bench prediction --quick
    girih bench prediction --steps 24 --small-steps 200 --results docs/results/prediction-unseen   # windows of seconds
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fleet
import harness
import network
import pages
import predicting
import prediction_kept
from experiments import RESULTS, RUNNING_PARTS, Results, Run, add_options, results
from predicting import NO_LINK, Passes
from prediction_tables import page_parts, show

from girih import strategies
from girih.app.run_config import RunConfig
from girih.planner.calibration import Calibration
from girih.planner.simulator.result import RUNS, STEPS

TRIES = 2
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
GROUP = "one group"
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
OWN, GROUPS = "this grid", "prediction-groups"
"""Sources of runs."""
QUICK: dict[str, Any] = {
    "strategies": ["local", "hybrid, τ = 4"], "models": ["deepfm"], "sizes": ["small"], "links": [NO_LINK],
    "warmup": 2, "steps": 2, "windows": 2, "cardinality": 1000,
}  # fmt: skip

Found = Mapping[str, Any]
Row = dict[str, Any]


def main() -> None:
    parser = harness.parser("prediction", __doc__)
    add_options(parser, pictures=False)
    pages.add_option(parser, page_parts)
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="of girih calibrate; made where it is left out"
    )
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--links", nargs="+", default=["200mbit", "1gbit", NO_LINK])
    parser.add_argument("--cardinality", type=int, default=5000, help="ids that a feature may have")
    parser.add_argument(
        "--also", nargs="*", default=[], choices=[GROUPS, *prediction_kept.SOURCES], help="further kept runs"
    )
    fleet.add_windows(parser, steps=20, windows=3)
    parser.add_argument(
        "--small-steps", type=int, metavar="N", help="of a window of a small model (default: --steps)"
    )
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
        bench = Bench(options, calibration, Path(directory))
        rows = list(bench.rows(options.strategies, kept))
        if GROUPS in options.also:
            groups = Results(RESULTS / GROUPS, other_code=True, parts=RUNNING_PARTS)
            rows += bench.rows([GROUP], groups, source=GROUPS, contest=False)
        for source in (name for name in prediction_kept.SOURCES if name in options.also):
            rows += bench.others(source)
    if options.also:
        for left, (number, why) in prediction_kept.left_out().items():
            report.skip(left, f"{number} kept runs: {why}")
    show(report, rows)
    print(kept.told())
    report.finish()


def _calibrated(folder: Path) -> Path:
    """The calibration beside the results, made once."""
    file = folder / "calibration.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "girih", "calibrate", "--out", str(file)], check=True)
    return file


class Bench:
    """Measures or reads runs, and predicts them.

    Args:
        directory: for data.
    """

    def __init__(self, options: argparse.Namespace, calibration: Calibration, directory: Path) -> None:
        self.options, self.calibration, self.directory = options, calibration, directory
        self._size = {"runs": 1, "steps": 8} if options.quick else {"runs": RUNS, "steps": STEPS}

    def rows(
        self, names: list[str], kept: Results, *, source: str = OWN, contest: bool = True
    ) -> Iterator[Row]:
        """Rows of the grid: a measurement beside what is predicted for it.

        Args:
            names: of strategies. contest: whether the strategies of a case are held against each other.
        """
        cases = [
            (name, model, size, link)
            for model in self.options.models
            for size in self.options.sizes
            for link in self.options.links
            for name in names
            if link == NO_LINK or name != "local"
        ]
        found = [(case, *self._measured_case(*case, kept)) for case in cases]
        passes = self._passes(cases, kept.folder / "passes.json")
        for (name, *others), run, measured in found:
            speed = self._predicted(run, passes)
            yield row_of((*others,), name, measured, speed, source=source, contest=contest)

    def others(self, source: str) -> Iterator[Row]:
        """Rows of the kept runs of another benchmark."""
        costs = prediction_kept.KeptPasses(RESULTS / "prediction" / "passes-kept.json")
        if costs.slowness is None:
            costs.keep_slowness(self._slowness())
        for run in prediction_kept.SOURCES[source](self.directory):
            strategy, calibration = run.settings.strategy, predicting.over(self.calibration, run.link)
            cost, threads = costs.of(run)
            facts = predicting.facts_with(run.settings, strategy, cost, calibration, threads)
            hosts = predicting.hosts_of(self.calibration, run.link)
            speed = predicting.predicted(strategy, facts, hosts, **self._size)
            measured = {"windows": run.windows, "summary": run.summary}
            yield row_of(run.case, run.strategy, measured, speed, source=source, contest=False)

    def _passes(self, cases: list[tuple[str, str, str, str]], file: Path) -> Passes:
        """Reads the passes of a folder. Those that it lacks are measured on this machine, and written."""
        found = Passes.read(file) or Passes(0.0, {}, {})
        costs, threads, memory_bytes = dict(found.costs), dict(found.threads), found.memory_bytes
        for name, model, size, _ in cases:
            settings = self._settings(self._run(name, model, size))
            trainers = settings.strategy.trainers
            if (task := f"{model}/{size}/{trainers}") not in costs:
                costs[task] = predicting.measured_cost(settings, trainers)
                threads[str(trainers)] = max(1, fleet.CORES // trainers)
                memory_bytes = costs[task].memory_bytes
        if len(costs) > len(found.costs):
            found = replace(found, memory_bytes=memory_bytes, threads=threads, costs=costs)
            found.write(file)
        return found

    def _slowness(self) -> float:
        """How many times as long the machine of the groups took for passes of the large models as this one."""
        theirs = Passes.read(RESULTS / GROUPS / "passes.json")
        if theirs is None:
            raise SystemExit(f"{RESULTS / GROUPS}: expected passes.json")
        share = SIZES["large"]["batch"] // 2
        ratios = []
        for model in MODELS:
            run = self._run("synchronous", model, "large")
            here = predicting.measured_cost(self._settings(run), 2)
            ratios.append(theirs.costs[f"{model}/large/2"].seconds(share) / here.seconds(share))
        return statistics.median(ratios)

    def _predicted(self, run: Run, passes: Passes) -> Row:
        """The speed that is predicted by the calibration, the link and the pass. No measured speed takes part."""
        (model, size, link, _), settings = run.name.split("/"), self._settings(run)
        calibration, strategy = predicting.over(self.calibration, link), settings.strategy
        if strategy.name == "substitution" and passes.replicated is not None:
            dense = "replicated" if f"{model}/{size}/{link}" in passes.replicated else "split"
            strategy = strategies.create({**run.strategy, "dense": dense}, "[strategy]")
        facts = passes.facts(settings, strategy, f"{model}/{size}/{strategy.trainers}", calibration)
        return predicting.predicted(
            strategy, facts, predicting.hosts_of(self.calibration, link), **self._size
        )

    def _measured_case(self, name: str, model: str, size: str, link: str, kept: Results) -> tuple[Run, Found]:
        conditions = _windows(self.options, size, link) | {
            "cardinality": self.options.cardinality,
            "link": link,
        }
        if "servers_per_group" in STRATEGIES[name]:
            conditions["planned_for"] = link
        run = self._run(name, model, size, link, conditions)
        return run, kept.measure(run, self._measured)

    def _run(
        self, name: str, model: str, size: str, link: str = NO_LINK, conditions: Found = MappingProxyType({})
    ) -> Run:
        task = {**SIZES[size], "model": MODELS[model]}
        return Run(f"{model}/{size}/{link}/{name}", task, STRATEGIES[name], conditions)

    def _measured(self, run: Run) -> dict[str, Any]:
        link = run.conditions["link"]
        chosen = strategies.create(dict(run.strategy), "[strategy]")
        counts = {"trainer": chosen.trainers, **chosen.roles}
        place = network.nowhere() if link == NO_LINK else network.network(network.names_apart(counts), link)
        with place as hosts:
            plan = fleet.Plan(
                str(self._config(run.config)),
                _overrides(run),
                **{name: run.conditions[name] for name in ("warmup", "steps", "windows")},
                hosts=network.apart(hosts),
                links=tuple(hosts.links.values()),
                held=self._held(run),
            )
            found = fleet.measure(plan, timeout_s=900.0, tries=1 if self.options.quick else TRIES)
        keys = ("samples_per_s", "step_s", "cpu_s", "cpu_s_each", "machine_cpu_s")
        windows = [{key: window[key] for key in keys} for window in found["windows"]]
        return {"windows": windows, "tries": found["tries"]}

    def _held(self, run: Run) -> str | None:
        """The file with the plan that a group's run holds: it is the one that is priced."""
        if "planned_for" not in run.conditions:
            return None
        file = self.directory / "plan.json"
        calibration = predicting.over(self.calibration, run.conditions["link"])
        file.write_text(json.dumps(self._settings(run).planned(calibration).to_dict()))
        return str(file)

    def _settings(self, run: Run) -> RunConfig:
        return RunConfig.load(self._config(run.config), overrides=_overrides(run))

    def _config(self, task: Mapping[str, Any]) -> Path:
        """Data for one epoch that is longer than a run."""
        options = self.options
        file = self.directory / f"{task['dim']}-{task['batch']}" / "config.toml"
        if not file.exists():
            most = max(options.steps, options.small_steps or 0)  # of any size and link
            steps = options.warmup + most * options.windows + 16
            fleet.write_task(
                file.parent, rows=steps * task["batch"], cardinality=options.cardinality, dim=task["dim"], shuffle=False
            )  # fmt: skip
        return file


def row_of(
    case: tuple[str, ...], name: str, found: Found, speed: Found, *, source: str, contest: bool
) -> Row:
    """Medians of windows beside what is predicted, with the names of :func:`prediction_tables.judged`."""
    speeds = [window["samples_per_s"] for window in found["windows"]]
    return {
        "case": case,
        "strategy": name,
        "source": source,
        "contest": contest,
        "predicted": speed["samples_per_s"],
        "low": speed["samples_per_s_p5"],
        "high": speed["samples_per_s_p95"],
        "measured": statistics.median(speeds),
        "first": speeds[0],
        "last": speeds[-1],
        "bound": speed["bound"],
        "found": {**found, "speed": speed},
    }


def _windows(options: argparse.Namespace, size: str, link: str) -> dict[str, int]:
    """The steps of a configuration: fewer where they take long."""
    share = SHARES[size] * SHARES.get(link, 1.0)
    asked = fleet.windows_of(vars(options))
    if size == "small" and options.small_steps is not None:
        asked["steps"] = options.small_steps
    fewest = min(FEWEST, asked["steps"])
    return asked | {name: max(fewest, round(share * asked[name])) for name in ("warmup", "steps")}


def _overrides(run: Run) -> tuple[str, ...]:
    task = run.config
    return (
        fleet.strategy_override(run.strategy),
        fleet.override("model", {**task["model"], "hidden": task["hidden"]}),
        f"data.batch_size = {task['batch']}",
    )


if __name__ == "__main__":
    main()
