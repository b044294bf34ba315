"""DES's Table 5 at the paper's size: four and fifteen hosts, 600 features, 950 ids of an example.

The paper states the hosts (§6, hardware), the ids (§6, dataset) and the batches (§6, parameter settings). It does not state the
number of features, dim or layers; 600 features of dim 8 and a first layer of 256 follow from Table 2 (docs/experiments/des.md).
Fifteen hosts are those of Table 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paper_facts
import wide
from paper_cases import Case, Published
from paper_facts import Law, Task
from paper_graphs import (
    Edit,
    Step,
    edits,
    mesh,
    parallel_requests,
    reads_own_share,
    without_overheads,
    without_reading,
)

from girih.planner.calibration import Calibration
from girih.planner.simulator.hosts import HostGroup, Hosts

SHARE, THREADS = 4096, 24
LAW = Law(wide.NUM_IDS, wide.EXPONENT, wide.NEW)
MODELS: dict[str, dict[str, Any]] = {
    "LR": {"name": "lr"},
    "W&D": {"name": "wide_deep", "hidden": [256, 64]},
    "DeepFM": {"name": "deepfm", "hidden": [256, 64]},
}
PAPER = {"LR": (50_396.8, 78_205.3), "W&D": (11_023.9, 49_837.3), "DeepFM": (10_560.1, 41_295.5)}
"""Samples/s of DiFacto and of DES (Table 5)."""
MESH, AHEAD, DES = "mesh, τ = 0", "mesh, τ = 4", "substitution"
ARMS: dict[str, dict[str, Any]] = {
    MESH: {"name": "asynchronous", "staleness": 0},
    AHEAD: {"name": "asynchronous", "staleness": 4},
    DES: {"name": "substitution"},
}
CHANGES: dict[str, tuple[Edit, ...]] = {
    "requests in parallel": (parallel_requests,),
    "and no overhead of Python": (parallel_requests, without_overheads),
    "and no reading": (parallel_requests, without_overheads, without_reading),
}


@dataclass
class Table5:
    """Samples/s of substitution and of a mesh with four hosts, and with fifteen."""

    calibration: Calibration
    name: str = "DES, Table 5"
    x: str = "hosts"
    is_linear: bool = True
    passes: str = "calibrated products"
    steps: int = 16
    counts: tuple[int, ...] = (4, 15)
    tasks: dict[str, Task] = field(
        default_factory=lambda: {name: _task(model) for name, model in MODELS.items()}
    )

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """All models and arms, and these with other assumptions."""
        for model in [*self.tasks][: 1 if quick else None]:
            for change in ["", *CHANGES][: 2 if quick else None]:
                for arm in ARMS:
                    for count in self.counts:
                        yield Case(self.name, model, arm, count, change)

    def base(self, case: Case) -> str:
        """The mesh that waits for rows."""
        return MESH

    def step(self, case: Case) -> Step:
        """A step: each host has a process of each role."""
        trainers = int(case.x)
        served = {} if case.arm == DES else {
            "transport": "tcp", "loaders": trainers, "embedding_workers": trainers, "embedding_servers": trainers,
        }  # fmt: skip
        strategy = paper_facts.create({**ARMS[case.arm], "trainers": trainers, **served})
        calibration = self.calibration.over(10e9 / 8)
        facts = self.tasks[case.setting].facts(strategy, trainers, SHARE, calibration, THREADS)
        graph = strategy.step_graph(facts)
        if graph is None:
            raise SystemExit(f"{case}: no speed is predicted")
        hosts = Hosts((HostGroup(count=trainers, cores=24, memory_gb=128, gbit=10),))
        first = reads_own_share if case.arm == DES else mesh  # a trainer of substitution reads its columns
        return Step(graph, facts, hosts).edited(first, *edits(CHANGES, case.change))

    def published(self, case: Case) -> Published:
        """Table 5, which has four hosts."""
        if case.change or case.x != self.counts[0] or case.arm == AHEAD:
            return Published()
        theirs, des = PAPER[case.setting]
        rate = des if case.arm == DES else theirs
        return Published(samples_per_s=rate, of_base=rate / theirs)


def _task(model: dict[str, Any]) -> Task:
    config = wide.config("none", 1, model)
    del config["data"]
    features = config["features"]
    each = {feature["name"]: 2.0 for feature in features if "pooling" in feature}
    return Task(config, LAW, each)
