"""Kept runs of other benchmarks beside predictions: what each trained, over which links, and what was measured.

``left_out`` says which runs cannot be predicted, and why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fleet
import harness
import predicting
import tomli_w
import wide
from des_table5 import IDS_EACH
from experiments import RESULTS

from girih.app.run_config import RunConfig
from girih.planner.facts import DenseCost

BATCHES = 4
"""Batches of data, which the facts of a run count."""
MESH = "a mesh is a strategy of its benchmark, without a step graph"
SHARED = "the processes of each host share its link, and all hosts share the cores, which hosts of the simulator do not"
OLD = "a group that did not hold a plan that is known; measured again in prediction-groups"


@dataclass(frozen=True)
class KeptRun:
    """A run that was measured for another benchmark.

    Attributes:
        case: source, task and link. strategy: its name in tables.
        task: the name of its pass, see :class:`predicting.Passes`.
        windows: as of ``fleet``; in ``cpu_s_each``, processes of a role may be one.
        summary: ``wire_bytes``, ``num_shares`` (steps of all trainers), ``staleness_mean`` and ``staleness_max``.
        slow: True if it ran on the machine of ``prediction-groups``.
    """

    case: tuple[str, str, str]
    strategy: str
    settings: RunConfig
    task: str
    windows: list[dict[str, Any]]
    summary: Mapping[str, Any]
    slow: bool = False

    @property
    def link(self) -> str:
        return self.case[2]


Runs = Iterator[KeptRun]


def persia_wire(directory: Path) -> Runs:
    """Runs of ``persia_wire``: up to eleven processes, bags of ten ids."""
    for kept in _kept("persia-wire"):
        asked, rate = kept["asked"], kept["asked"]["conditions"]["rate"]
        batch = asked["batch"] * asked["strategy"]["trainers"]
        config = directory / "persia-wire" / "config.toml"
        if not config.exists():
            fleet.write_task(
                config.parent, rows=BATCHES * batch, cardinality=asked["cardinality"], dim=asked["dim"],
                zipf=1.2 if asked["ids"] == "zipf" else None, bag=asked["bag"], shuffle=False,
            )  # fmt: skip
        overrides = (fleet.strategy_override(asked["strategy"]), f"data.batch_size = {batch}")
        settings = RunConfig.load(config, overrides=overrides)
        name = kept["name"].split("/")[2]
        yield KeptRun(
            ("persia-wire", "deepfm", rate), name, settings, _task("persia-wire", settings), kept["windows"],
            _summary(kept["summary"], settings),
        )  # fmt: skip


def des_table5(directory: Path) -> Runs:
    """Runs of ``des_table5`` whose hosts have a trainer alone: four trainers, 200 features."""
    folder = directory / "wide"
    for kept in _kept("des-table5"):
        _, rate, batch, model, name, _ = kept["name"].split("/")
        if _left_out_of_des(name) is not None:
            continue
        rows = max(16_384, int(batch))
        wide.write_epoch(folder, rows, BATCHES, (), distinct=BATCHES, features=200, each=IDS_EACH)
        os.environ["WIDE"] = str(folder)
        config = directory / f"{model}-{batch}-{name}.toml"
        asked = {key: value for key, value in kept["asked"].items() if key != "conditions"}
        config.write_text(tomli_w.dumps(asked), encoding="utf-8")
        settings = RunConfig.load(config)
        windows = [
            {**window, "cpu_s": sum(window["cpu_s"].values()), "cpu_s_each": {f"{role} 0": s for role, s in window["cpu_s"].items()}}
            for window in kept["windows"]
        ]  # fmt: skip
        task = _task(f"des-table5/{model}", settings)
        case = ("des-table5", f"{model}, {batch}", rate)
        yield KeptRun(case, name, settings, task, windows, _summary(kept, settings))


def hierarchical_speed(directory: Path) -> Runs:
    """Runs of ``hierarchical_speed``: one to four trainers, with and without group servers."""
    for kept in _kept("hierarchical-speed"):
        asked, (rate, part, name, _) = kept["asked"], kept["name"].split("/")
        strategy = asked["strategy"]
        batch = asked["batch"] * strategy["groups"] * strategy["trainers_per_group"]
        config = directory / f"hierarchical-{batch}" / "config.toml"
        if not config.exists():
            fleet.write_task(
                config.parent, rows=BATCHES * batch, cardinality=asked["cardinality"], dim=asked["dim"], shuffle=False
            )  # fmt: skip
        overrides = (
            fleet.strategy_override(strategy), fleet.override("model", asked["model"]), f"data.batch_size = {batch}",
        )  # fmt: skip
        settings = RunConfig.load(config, overrides=overrides)
        task = _task("hierarchical-speed", settings)
        case = ("hierarchical-speed", f"{part}, {asked['batch']} examples", rate)
        summary = _summary(kept["summary"], settings)
        yield KeptRun(case, name, settings, task, kept["windows"], summary, slow=True)


class KeptPasses:
    """Times of the models' passes of kept runs: measured on this machine once, and kept in a file.

    Attributes:
        slowness: how many times as long the machine of ``prediction-groups`` took for the same passes. None if not known yet.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read: dict[str, Any] = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.is_file()
            else {"from": f"measured on {harness.machine()['processor']}", "slowness": None, "costs": {}}
        )

    @property
    def slowness(self) -> float | None:
        found: float | None = self._read["slowness"]
        return found

    def keep_slowness(self, slowness: float) -> None:
        """Notes it."""
        self._read["slowness"] = slowness
        self._write()

    def of(self, run: KeptRun) -> tuple[DenseCost, int]:
        """The cost of a pass on the machine of a run, and the threads of a trainer."""
        trainers = run.settings.strategy.trainers
        if run.task not in self._read["costs"]:
            cost = predicting.measured_cost(run.settings, trainers)
            self._read["costs"][run.task] = asdict(cost)
            self._write()
        cost = DenseCost(**self._read["costs"][run.task])
        if run.slow and self.slowness is not None:
            times = {
                name: self.slowness * getattr(cost, name) for name in ("pass_s", "example_s", "update_s")
            }
            cost = replace(cost, **times)
        return cost, max(1, fleet.CORES // trainers)

    def _write(self) -> None:
        self._file.write_text(json.dumps(self._read, indent=1) + "\n", encoding="utf-8")


SOURCES: dict[str, Callable[[Path], Runs]] = {
    "persia-wire": persia_wire,
    "des-table5": des_table5,
    "hierarchical-speed": hierarchical_speed,
}


def left_out() -> dict[str, tuple[int, str]]:
    """Source → number of its runs that are not predicted, and why."""
    reasons: dict[str, tuple[int, str]] = {}
    for kept in _kept("des-table5"):
        if (why := _left_out_of_des(kept["name"].split("/")[4])) is not None:
            source = f"des-table5, {'mesh' if why == MESH else 'asynchronous'}"
            reasons[source] = (reasons.get(source, (0, ""))[0] + 1, why)
    reasons["prediction, one group"] = (len(list((RESULTS / "prediction").rglob("one_group.json"))), OLD)
    return reasons


def _left_out_of_des(name: str) -> str | None:
    if name.startswith("mesh"):
        return MESH
    return SHARED if name.startswith("asynchronous") else None


def _kept(source: str) -> Iterator[dict[str, Any]]:
    for file in sorted((RESULTS / source).rglob("*.json")):
        yield json.loads(file.read_text(encoding="utf-8"))


def _summary(summary: Mapping[str, Any], settings: RunConfig) -> dict[str, Any]:
    trainers, batch = settings.strategy.trainers, settings.data.batch_size
    steps = summary["num_examples"] / batch if "num_examples" in summary else summary["steps"]
    return {**summary, "num_shares": steps * trainers}


def _task(name: str, settings: RunConfig) -> str:
    trainers = settings.strategy.trainers
    return f"{name}/{settings.data.batch_size // trainers}/{trainers}"
