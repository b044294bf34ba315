"""What the benchmarks of the PICASSO paper share: workloads of its sizes, the arms of its ablation, and their runs.

A workload has the features of one of the paper's data sets (Table II): as many categorical features and sequences, dims
within its range in as many sizes as it has packed embeddings (Table V), in the ratio of one to the next; numbers; and
ids by a Zipf law (exponent 1.2), since the data themselves are not public. The paper gives no widths of networks: those here
are small, so that two cores show more than matrix products.

Runs are of two trainers under ``synchronous``, each a host of its own (a network namespace) over links of ``--rate``, or
of one process. With ``--hosts`` the hosts are slow, as in ``slow_hosts``. Arms take turns, forwards and backwards; each run is a file below
``docs/results/``.

Shapes: R examples of a file, L ids of a sequence.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import fleet
import harness
import hosts_file
import network
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sampler
import slow_runs
import tomli_w
import wide
from experiments import RUNNING_PARTS, Results, Run, add_options, results
from hosts_file import Kinds

from girih import strategies
from girih.cluster.roles import HostSpec

ROOT = Path("runs", "picasso")
ZIPF, CARDINALITY, LENGTH, NUMERIC, DOMAINS = 1.2, 100_000, 50, 10, 4
DISTINCT, MORE_FILES = 8, 4
TRAINERS = 2
QUICK = {"batch": 32, "length": 3, "scale": 0.03, "rounds": 1, "warmup": 2, "steps": 2, "windows": 2}
SUMMARY = ("wire_bytes", "num_examples", "steps", "num_rows", "hit_ratio")

Key = TypeVar("Key")
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Workload:
    """One data set and its model.

    Attributes:
        categorical, sequences: numbers of features; length: ids of a sequence.
        dims: least dim, largest dim, how many sizes.
        model: ``[model]``, without what :func:`config` adds.
        copies: how often all features stand side by side (Table VIII).
    """

    name: str
    model: Mapping[str, Any]
    categorical: int
    dims: tuple[int, int, int]
    sequences: int = 0
    length: int = LENGTH
    labels: tuple[str, ...] = ("click",)
    copies: int = 1

    @property
    def folder(self) -> str:
        """Name of its data."""
        return f"{self.copies}x{self.categorical}+{self.sequences}x{self.length}-{len(self.labels)}"

    @property
    def num_features(self) -> int:
        """Categorical features and sequences."""
        return (self.categorical + self.sequences) * self.copies

    def sizes(self) -> list[int]:
        """The dims, from the least on."""
        least, most, number = self.dims
        return sorted({round(float(each)) for each in np.geomspace(least, most, number)})

    def scaled(self, scale: float, length: int) -> Workload:
        """A smaller one for a quick look, with the same kinds of features."""
        least, most, number = self.dims
        categorical, sequences, sizes = (
            math.ceil(count * scale) for count in (self.categorical, self.sequences, number)
        )
        dims = (least, most, sizes)
        return replace(self, categorical=categorical, sequences=sequences, dims=dims, length=length)


FEED_DIM = 12
UNIT_LAYERS = (8, 4)
UNIT_DIM = FEED_DIM * UNIT_LAYERS[0] + UNIT_LAYERS[0] + UNIT_LAYERS[0] * UNIT_LAYERS[1] + UNIT_LAYERS[1]
"""Parameters of a micro-MLP: the dim of an item whose row they are, CAN's nineteenth."""
WIDE_DEEP = Workload("W&D", {"name": "wide_deep", "hidden": [256, 128]}, 204, (8, 32, 16))
CAN = Workload("CAN", {"name": "can", "hidden": [128, 64]}, 334, (8, 200, 18), sequences=30)
MMOE = Workload(
    "MMoE", {"name": "mmoe", "num_experts": 71, "expert_hidden": [32, 16], "tower_hidden": [16]}, 84, (12, 128, 11),
    sequences=10, labels=("click", "buy"),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in (WIDE_DEEP, CAN, MMOE)}

INTERLEAVED = {"micro_batches": "auto", "interleaving_groups": "auto"}
ALONE = {"micro_batches": 1, "interleaving_groups": 1}
ON_A_GPU = {"micro_batches": 2, "interleaving_groups": 1}
"""What "auto" is with rows in GPU memory, where groups have no order of their own and no profile is taken."""


def arms(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name → ``[schedule]`` and ``[store]``: all of PICASSO's parts, each left out alone, and none of them.

    Caching is worth something over a cold tier alone, so it has a pair of its own: :data:`BASE` says whom an arm stands beside.
    """
    parts = {"packing": True, "prefetch": True, **INTERLEAVED}
    parts |= {
        name: getattr(options, name) for name in INTERLEAVED if getattr(options, name, None) is not None
    }
    if options.gpu:
        parts |= {name: value for name, value in ON_A_GPU.items() if parts[name] == "auto"}
    rows = {"tiers": ["gpu"]} if options.gpu else {}
    return {
        "all": {"schedule": parts, "store": rows},
        "without packing": {"schedule": parts | {"packing": False}, "store": rows},
        "without interleaving": {"schedule": parts | ALONE, "store": rows},
        "without prefetch": {"schedule": parts | {"prefetch": False}, "store": rows},
        "none": {"schedule": {"packing": False, "prefetch": False, **ALONE}, "store": rows},
        "with caching": {"schedule": parts, "store": store(options, options.hot_rows)},
        "without caching": {"schedule": parts, "store": store(options, 0)},
        **{name: {"schedule": {**ALONE, **own}, "store": rows} for name, own in VARIED.items()},
    }


ONE = "one group, one micro-batch"
VARIED = {
    ONE: {},
    "5 interleaving groups": {"interleaving_groups": 5},
    "2 micro-batches": {"micro_batches": 2},
    "4 micro-batches": {"micro_batches": 4},
}
"""Arms of slow hosts → what differs from :data:`ALONE`: one of both numbers, so that each effect is seen alone."""
BASE = {"with caching": "with caching", "without caching": "with caching", **dict.fromkeys(VARIED, ONE)}
"""Arm → the arm that it is compared with; "all" for the others."""


def store(options: argparse.Namespace, hot_rows: int) -> dict[str, Any]:
    """``[store]`` of several tiers; the hot set is chosen once the warm-up has counted, and then after each window.

    Without hot rows all are in the cold tier, but for those of the last few batches.
    """
    steps = {"warm_up_steps": options.warmup, "flush_every_steps": options.steps}
    where = {"ssd_dir": "${PICASSO}/tiers"} if "ssd" in options.tiers else {}
    return {"tiers": options.tiers, "hot_rows": hot_rows, **steps, **where}


def config(workload: Workload, train: str, batch: int) -> dict[str, Any]:
    """The config of a workload's files, as :func:`write_epoch` wrote them."""
    sizes, names = workload.sizes(), [f"f{place}" for place in range(workload.categorical * workload.copies)]
    features: list[dict[str, Any]] = [
        {"name": name, "kind": "categorical", "dim": sizes[place % len(sizes)]}
        for place, name in enumerate(names)
    ]
    model = dict(workload.model)
    behaviours = [f"s{place}" for place in range(workload.sequences * workload.copies)]
    for place, name in enumerate(behaviours):
        dim = FEED_DIM if model["name"] == "can" else sizes[place % len(sizes)]
        features.append({"name": name, "kind": "sequence", "dim": dim, "max_length": workload.length})
    if model["name"] == "can":  # each copy's first feature is the item of its sequences
        model |= {"unit_layers": list(UNIT_LAYERS), "co_action": {}}
        for copy in range(workload.copies):
            item = features[copy * workload.categorical]
            item["dim"] = UNIT_DIM
            own = behaviours[copy * workload.sequences : (copy + 1) * workload.sequences]
            model["co_action"][item["name"]] = own
    features += [{"name": f"x{place}", "kind": "numeric"} for place in range(NUMERIC)]
    features += [{"name": "domain", "kind": "numeric"}] if model["name"] == "star" else []
    return {
        "data": {"train": train, "batch_size": batch, "shuffle": False},
        "features": features,
        "labels": {"names": list(workload.labels)},
        "model": model,
        "sparse_optimizer": {"name": "adagrad", "lr": 0.01},
        "dense_optimizer": {"name": "adam", "lr": 1e-3},
        "train": {"seed": 1, "epochs": 1000},
    }  # fmt: skip


def write_epoch(workload: Workload, rows: int, num_files: int, distinct: int = DISTINCT) -> str:
    """Writes an epoch of files with R examples each, of which some are distinct; one that is there is kept.

    Returns:
        What ``data.train`` is to be, below the variable ``PICASSO``, which this sets.
    """
    os.environ["PICASSO"] = str(ROOT.resolve())
    name = f"{workload.folder}-{num_files}x{rows}-{distinct}"
    wide.link_epoch(
        ROOT / name, num_files, distinct, lambda file, number: _write(file, workload, rows, number)
    )
    (ROOT / "tiers").mkdir(exist_ok=True)
    return f"${{PICASSO}}/{name}/train-*.parquet"


def _write(file: Path, workload: Workload, rows: int, seed: int) -> dict[str, int]:
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {}

    def ids(number: int) -> Any:
        return pa.array(rng.zipf(ZIPF, number) % CARDINALITY)

    for place in range(workload.categorical * workload.copies):
        columns[f"f{place}"] = ids(rows)
    bounds = pa.array(np.arange(0, rows * workload.length + 1, workload.length, dtype=np.int32))
    for place in range(workload.sequences * workload.copies):
        columns[f"s{place}"] = pa.ListArray.from_arrays(bounds, ids(rows * workload.length))
    for place in range(NUMERIC):
        columns[f"x{place}"] = rng.normal(size=rows).astype(np.float32)
    columns["domain"] = rng.integers(0, DOMAINS, rows)
    for label in workload.labels:
        columns[label] = (rng.random(rows) < 0.25).astype(np.int8)
    pq.write_table(pa.table(columns), file, row_group_size=min(rows, 4096))
    return {}


def parser(
    name: str, doc: str | None, *, batch: int, workloads: Sequence[str] = (), gpu: bool = False, hosts: bool = False
) -> argparse.ArgumentParser:  # fmt: skip
    """Options that the benchmarks of runs share; ``gpu`` and ``hosts`` say whether this one has arms on a GPU, and on slow hosts."""
    made = harness.parser(name, doc)
    add_options(made)
    if workloads:
        made.add_argument("--workloads", nargs="+", default=list(workloads), choices=list(workloads))
    made.add_argument("--batch", type=int, default=batch, help="examples of a step, of all trainers")
    made.add_argument("--length", type=int, default=LENGTH, help="ids of a sequence")
    made.add_argument("--scale", type=float, default=1.0, help="of the paper's numbers of features")
    made.add_argument(
        "--rate", default="1gbit", help="of each link and direction, as tc writes it; none bounds nothing"
    )
    made.set_defaults(gpu=False, hosts=None)
    if hosts:
        words = "slow hosts, as benchmarks/picasso_hosts.toml; --rate then counts for nothing"
        made.add_argument("--hosts", type=Path, metavar="FILE", help=words)
    if gpu:
        words = "rows in GPU memory, one trainer; --tiers are then gpu and dram by default"
        made.add_argument("--gpu", action="store_true", help=words)
    made.add_argument("--tiers", nargs="+", help="of the cache, hot to cold; default: dram ssd")
    made.add_argument("--hot-rows", type=int, default=100_000)
    made.add_argument("--rounds", type=int, default=2, help="runs of each case, by turns")
    made.add_argument("--warmup", type=int, default=10, help="steps that do not count, whole windows")
    made.add_argument("--steps", type=int, default=5, help="of a window")
    made.add_argument("--windows", type=int, default=6)
    return made


def parsed(made: argparse.ArgumentParser, quick: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """The options; those of ``--quick`` are small."""
    options = made.parse_args()
    if options.quick:
        vars(options).update(QUICK | dict(quick or {}))
    options.tiers = options.tiers or (["gpu", "dram"] if options.gpu else ["dram", "ssd"])
    if options.warmup % options.steps:
        made.error("--warmup: expected a multiple of --steps")
    return options


def number_or_auto(text: str) -> int | str:
    """An option of ``[schedule]``."""
    return text if text == "auto" else int(text)


@dataclass(frozen=True)
class Bench:
    """The runs of one benchmark.

    Attributes:
        trainers: each on a host of its own; 1 is ``local``.
        sample_ms: see :class:`fleet.Plan`.
        kinds: the slow hosts; None without ``--hosts``.
    """

    options: argparse.Namespace
    kept: Results
    trainers: int = TRAINERS
    sample_ms: float | None = None
    kinds: Kinds | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, name: str, **words: Any) -> Bench:
        """Results are in ``docs/results/NAME``, those of one trainer on a GPU in ``NAME-gpu``, those of slow hosts in ``NAME-hosts``."""
        if options.gpu:
            name, words = f"{name}-gpu", words | {"trainers": 1}
        elif options.hosts is not None:
            kinds = hosts_file.for_trainers(hosts_file.load(options.hosts), TRAINERS)
            name, words = f"{name}-hosts", words | {"kinds": kinds}
        return cls(options, results(options, name, parts=RUNNING_PARTS), **words)

    def missing(self) -> str | None:
        """Why it cannot run here, if so."""
        if self.kinds is not None:
            return network.missing(delay=any(kind.delay_ms for kind in self.kinds), cores=True)
        return network.missing() if self.trainers > 1 else None

    def workload(self, workload: Workload) -> Workload:
        """As the options want it."""
        return workload.scaled(self.options.scale, self.options.length)

    def case(
        self, name: str, workload: Workload, sections: Mapping[str, Any], batch: int | None = None,
        strategy: Mapping[str, Any] | None = None,
    ) -> Run:  # fmt: skip
        """One run; writes its data."""
        options, size = self.options, batch or self.options.batch
        train = write_epoch(workload, size, options.warmup + options.steps * options.windows + MORE_FILES)
        return self.run(name, {**config(workload, train, size), **sections}, strategy)

    def run(self, name: str, made: Mapping[str, Any], strategy: Mapping[str, Any] | None = None) -> Run:
        """One run of a config.

        Args:
            strategy: None is ``local`` or ``synchronous``, by the number of trainers.
        """
        options = self.options
        alone = (
            {"name": "local"} if self.trainers == 1 else {"name": "synchronous", "trainers": self.trainers}
        )
        conditions = {key: getattr(options, key) for key in ("warmup", "steps", "windows")}
        if self.kinds is not None:
            conditions |= {"hosts": hosts_file.as_rows(self.kinds)}
        elif self.trainers > 1:
            conditions |= {"rate": options.rate}
        conditions |= {"sample_ms": self.sample_ms} if self.sample_ms else {}
        return Run(name, made, strategy or alone, conditions)

    def measured(self, cases: Mapping[Key, Run]) -> dict[Key, list[Found]]:
        """Each case's runs, one a round; every other round goes backwards."""
        found: dict[Key, list[Found]] = {key: [] for key in cases}
        for number in range(self.options.rounds):
            for key in list(cases)[:: -1 if number % 2 else 1]:
                run = replace(cases[key], name=f"{cases[key].name}/{1 + number}")
                found[key].append(self.kept.measure(run, self._measure))
        return found

    def _measure(self, run: Run) -> dict[str, Any]:
        options = self.options
        with tempfile.TemporaryDirectory() as folder, self._hosts(run) as (hosts, bounds):
            file = Path(folder, "config.toml")
            file.write_text(tomli_w.dumps(run.settings))
            plan = fleet.Plan(
                str(file), (), warmup=options.warmup, steps=options.steps, windows=options.windows, hosts=hosts, sample_ms=self.sample_ms,
                **bounds,
            )  # fmt: skip
            once = options.quick or self.kinds is not None  # a relay of delays looks like a disturbance
            found = fleet.measure(plan, timeout_s=1800.0, tries=1 if once else fleet.TRIES)
        return short(found, self._link_bytes_per_s)

    @contextmanager
    def _hosts(self, run: Run) -> Iterator[tuple[dict[str, HostSpec], dict[str, Any]]]:
        """Places of a run's processes, and the part of a plan that bounds their hosts and counts the use."""
        if self.trainers == 1:
            yield {}, {}
            return
        names = [f"t{rank}" for rank in range(self.trainers)]
        kinds = self.kinds
        counts = {
            hosts_file.TRAINER: self.trainers,
            **strategies.create(dict(run.strategy), "strategy").roles,
        }
        if kinds is not None:
            with slow_runs.hosts_of(kinds) as hosts:
                places = hosts_file.specs(hosts, hosts_file.placed(kinds, counts))
                yield places, slow_runs.bounds_of(hosts)
            return
        with network.network(names, None if self.options.rate == "none" else self.options.rate) as hosts:
            places = {
                f"{role} {index}": hosts.places[names[index % len(names)]]
                for role, count in counts.items()
                for index in range(count)
            }
            yield places, {"links": tuple(hosts.links.values())}

    @property
    def _link_bytes_per_s(self) -> float | None:
        if self.kinds is not None:
            return self.kinds[0].gbit * 1e9 / 8
        return bytes_per_s(None if self.options.rate == "none" or self.trainers == 1 else self.options.rate)


def short(found: Mapping[str, Any], link_bytes_per_s: float | None) -> dict[str, Any]:
    """What is kept of a run: of links, (bytes sent, bytes got) a step by trainer."""
    kept = (
        "samples_per_s",
        "step_s",
        "cpu_s",
        "cpu_s_each",
        "machine_cpu_s",
        "phases_s",
        "tiers",
        "room_rows",
    )
    windows = [
        {key: window[key] for key in kept} | {"link_bytes": list(window["link_bytes"].values())}
        for window in found["windows"]
    ]
    summary, plan = found["summary"], found["plan"]
    made = {
        "tries": found["tries"],
        "windows": windows,
        "summary": {key: summary[key] for key in SUMMARY if key in summary},
        "plan": {"num_groups": len(plan["groups"]), "schedule": plan["schedule"]},
    }
    if found["samples"] and len(found["samples"]["time_s"]) > 1:
        made["samples"] = sampler.reduced(found["samples"], fleet.CORES, link_bytes_per_s)
    return made


def bytes_per_s(rate: str | None) -> float | None:
    """What ``tc`` makes of a rate."""
    if rate is None:
        return None
    unit = next(unit for unit in ("kbit", "mbit", "gbit") if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}[unit] / 8


def middle(runs: Iterable[Found], of: Callable[[Found], float]) -> float:
    """The median over all windows of all rounds."""
    return float(median(of(window) for run in runs for window in run["windows"]))


def speed(runs: Iterable[Found]) -> float:
    """Samples/s."""
    return middle(runs, lambda window: window["samples_per_s"])


def beside(runs: Sequence[Found], base: Sequence[Found]) -> float:
    """How many times as fast as ``base``: the median of :func:`ratios`."""
    return float(median(ratios(runs, base)))


def ratios(runs: Sequence[Found], base: Sequence[Found]) -> list[float]:
    """How many times as fast as ``base``, round by round."""
    return [speed([run]) / speed([other]) for run, other in zip(runs, base, strict=True)]


def columns(runs: Sequence[Found]) -> dict[str, str]:
    """What each row of a table of speeds has."""
    found = {
        "samples/s": f"{speed(runs):,.0f}",
        "ms a step": f"{1e3 * middle(runs, lambda window: window['step_s']):,.0f}",
        "cores busy": f"{middle(runs, lambda window: window['cpu_s'] / window['step_s']):.2f}",
        "others": f"{max(map(fleet.others, runs)):.0%}",
    }
    if runs[0]["windows"][0]["link_bytes"]:
        busiest = middle(runs, lambda window: max(max(both) for both in window["link_bytes"]))
        found["MB a step, busiest direction"] = f"{busiest / 1e6:.2f}"
        per_s = middle(
            runs, lambda window: max(max(both) for both in window["link_bytes"]) / window["step_s"]
        )
        found["Mbit/s"] = f"{8 * per_s / 1e6:,.0f}"
    return found


def planned(run: Found) -> dict[str, str]:
    """What the plan decided: embedding groups, interleaving groups, micro-batches."""
    plan = run["plan"]
    sets, parts = plan["schedule"].get("interleaving", ()), plan["schedule"].get("micro_batches", 1)
    return {
        "groups": str(plan["num_groups"]),
        "interleaving groups": str(len(sets) or 1),
        "micro-batches": str(parts),
    }


def hot_ratio(run: Found) -> float | None:
    """The share of the reads that the hot tier answered, after the warm-up; None where there is one tier."""
    counts: Counter[str] = Counter()
    for window in run["windows"]:
        counts.update(window["tiers"])
    reads = {name: count for name, count in counts.items() if name.endswith("_reads")}
    hot = reads.get(f"{run['asked']['store'].get('tiers', ['dram'])[0]}_reads", 0)
    return hot / sum(reads.values()) if sum(reads.values()) else None
