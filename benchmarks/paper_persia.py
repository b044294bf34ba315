"""Persia's Figures 8 and 9 at the paper's size: hosts, models and published values.

The paper states the hosts (§6, cluster setup), the layers of the open benchmarks (§6, benchmark) and the compression (§4.2.3).
It does not state examples of a step, GPUs of a host, dims in Figure 8, τ, or the model of Kwai-Video.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paper_facts
from paper_cases import Case, Published
from paper_facts import Law, Task
from paper_graphs import (
    Edit,
    Step,
    edits,
    no_dense_server,
    parallel_requests,
    reads_own_share,
    rings_of_buckets,
    without_overheads,
)

from girih.planner.calibration import Calibration
from girih.planner.simulator.hosts import HostGroup, Hosts

HIDDEN = [4096, 2048, 1024, 512, 256]
FEATURES, NUMERIC = 26, 13
SHARE, THREADS, GPUS_OF_HOST = 4096, 6, 8
ZIPF = Law(1e6, 1.2)
MODES: dict[str, dict[str, Any]] = {
    "hybrid, τ = 0": {"name": "hybrid", "staleness": 0},
    "hybrid, τ = 4": {"name": "hybrid", "staleness": 4},
    "asynchronous, τ = 4": {"name": "asynchronous", "staleness": 4},
}
SYNCHRONOUS, HYBRID, ASYNCHRONOUS = MODES
WIRE = {"wire_embeddings": "float16", "wire_gradients": "float16", "compress_ids": True}
INSTANCE: dict[str, Any] = {"cores": 52, "memory_gb": 480, "gbit": 100}
EACH_MB = "a ring for each MB"
CHANGES: dict[str, tuple[Edit, ...]] = {
    EACH_MB: (),
    "gloo in place of NCCL": (),
    "loaders read their share": (reads_own_share,),
    "and requests in parallel": (reads_own_share, parallel_requests),
    "and no overhead of Python": (reads_own_share, parallel_requests, without_overheads),
    "and no dense server": (reads_own_share, parallel_requests, without_overheads, no_dense_server),
}


def _task(dim: int, ids_each: float, law: Law, **table: Any) -> Task:
    names = [f"c{place}" for place in range(FEATURES)]
    pooling = {"pooling": "sum"} if ids_each > 1 else {}
    config = {
        "features": [
            *paper_facts.one_id(names, dim, **pooling),
            *({"name": f"x{place}", "kind": "numeric"} for place in range(NUMERIC)),
        ],
        "labels": {"names": ["click"]},
        "model": {"name": "dnn", "hidden": HIDDEN},
        "sparse_optimizer": {"name": "rowwise_adagrad"},
    }
    if table:
        config["tables"] = [{"name": name, "dim": dim, **table} for name in names]
    return Task(config, law, dict.fromkeys(names, ids_each))


@dataclass
class Figure8:
    """Samples/s by the number of V100s, up to 64."""

    calibration: Calibration
    name: str = "Persia, Figure 8"
    x: str = "GPUs"
    is_linear: bool = True
    passes: str = "V100, nominal"
    steps: int = 16
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    tasks: dict[str, Task] = field(
        default_factory=lambda: {"Criteo-Ad": _task(16, 1.0, ZIPF), "Kwai-Video": _task(16, 10.0, ZIPF)}
    )

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """The curves, and the largest size with other assumptions."""
        for task in [*self.tasks][: 1 if quick else None]:
            for arm in MODES:
                for count in self.counts[:2] if quick else self.counts:
                    yield Case(self.name, task, arm, count)
            for change in [*CHANGES][: 1 if quick else -1]:  # without the dense server
                for arm in (SYNCHRONOUS, HYBRID):
                    for count in (self.counts[0], self.counts[-1]):
                        yield Case(self.name, task, arm, count, change)

    def base(self, case: Case) -> str:
        """Fully synchronous training over the same servers."""
        return SYNCHRONOUS

    def step(self, case: Case) -> Step:
        """A step: 1.5 CPU instances for each GPU, one with a worker and a loader, and half of one with a server."""
        trainers = int(case.x)
        servers = math.ceil(trainers / 2)
        hosts = Hosts(
            (
                HostGroup(
                    count=math.ceil(trainers / GPUS_OF_HOST), device="v100", roles=("trainer",), **INSTANCE
                ),
                HostGroup(count=trainers, roles=("embedding-worker", "loader"), **INSTANCE),
                HostGroup(count=servers, roles=("embedding-server",), **INSTANCE),
            )
        )
        counts = trainers, servers, trainers
        return _step(self.calibration, self.tasks[case.setting], case, trainers, counts, hosts)

    def published(self, case: Case) -> Published:
        """Values of §6.3. The figure's own numbers are not in the text."""
        if case.change or case.arm != HYBRID:
            return Published()
        if case.setting == "Criteo-Ad":
            return Published(shape="nearly linear")
        return Published(of_base=3.8 if case.x == self.counts[-1] else None)


@dataclass
class Figure9:
    """Samples/s by the number of parameters, up to 10¹⁴, on Google's cloud: 64 A100, 100 embedding workers, 30 servers."""

    calibration: Calibration
    name: str = "Persia, Figure 9"
    x: str = "parameters"
    is_linear: bool = False
    passes: str = "A100, nominal"
    steps: int = 16
    counts: tuple[float, ...] = (1e12, 1e13, 1e14)
    dim: int = 128

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """Hybrid by size, all modes with the largest size, and these with other assumptions."""
        for count in self.counts[:1] if quick else self.counts:
            for arm in MODES:
                yield Case(self.name, "Criteo-Syn", arm, count)
        for change in [*CHANGES][: 1 if quick else None]:
            for arm in MODES:
                yield Case(self.name, "Criteo-Syn", arm, self.counts[-1], change)

    def base(self, case: Case) -> str:
        """Fully synchronous training over the same servers."""
        return SYNCHRONOUS

    def step(self, case: Case) -> Step:
        """A step: ids drawn from all rows, one process of a role on each instance."""
        rows = case.x / self.dim
        law = Law(rows / FEATURES)
        task = _task(self.dim, 1.0, law, dtype="float16", eviction={"name": "lru", "max_rows": int(law.ids)})
        hosts = Hosts((
            HostGroup(count=8, cores=48, memory_gb=680, gbit=100, device="a100", roles=("trainer",)),
            HostGroup(count=100, cores=15, memory_gb=120, gbit=32, roles=("embedding-worker", "loader")),
            HostGroup(count=30, cores=208, memory_gb=12_000, gbit=32, roles=("embedding-server",)),
        ))  # fmt: skip
        return _step(self.calibration, task, case, 64, (100, 30, 100), hosts)

    def published(self, case: Case) -> Published:
        """Values of §6.3: flat, 2.6 times fully synchronous, and 1.2 times hybrid."""
        of_base = {SYNCHRONOUS: 1.0, HYBRID: 2.6, ASYNCHRONOUS: 2.6 * 1.2}[case.arm]
        return (
            Published()
            if case.change
            else Published(
                of_base=of_base if case.x == self.counts[-1] else None,
                shape="flat" if case.arm == HYBRID else "",
            )
        )


def _step(
    calibration: Calibration,
    task: Task,
    case: Case,
    trainers: int,
    counts: tuple[int, int, int],
    hosts: Hosts,
) -> Step:
    workers, servers, loaders = counts
    strategy = paper_facts.create(
        {
            **MODES[case.arm], **WIRE, "trainers": trainers, "transport": "tcp",
            "embedding_workers": workers, "embedding_servers": servers, "loaders": loaders,
        }
    )  # fmt: skip
    known = calibration if case.change.startswith("gloo") else paper_facts.nccl(calibration, 100)
    facts = task.facts(strategy, trainers, SHARE, known, THREADS, paper_facts.GPU_COST)
    graph = strategy.step_graph(facts)
    if graph is None:
        raise SystemExit(f"{case}: no speed is predicted")
    if case.change != EACH_MB:
        graph = rings_of_buckets(graph, facts, task.buckets)
    return Step(graph, facts, hosts).edited(*edits(CHANGES, case.change))
