"""PICASSO's Figure 15 at the paper's size: 1 to 128 nodes with a V100, interleaving on and off.

The paper states the nodes (Table I), the features (Table II), the batches of W&D and CAN (Table VII), and samples/s, bytes and GPU
use of a node among 16 (Table IV). It does not state the batch of MMoE, ids' frequencies, or what bounds W&D.

``girih`` arms are girih's ``synchronous``, whose pass takes the GPU time of the paper. ``executor`` arms are three resources in
the order of PICASSO's executor (§III-C): the GPU, the host (launches, PCIe, input) and the link. Their times come from one row
of Table IV, "w/o Interleaving".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import paper_facts
import picasso
from paper_cases import Case, Published
from paper_facts import Law, Task
from paper_graphs import (
    Edit,
    Step,
    edits,
    on_gpu,
    reads_own_share,
    rings_of_buckets,
    rows_in_gpu_time,
    without_overheads,
)

from girih.planner.calibration import Calibration
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.steps.basis import LOOKUP, PASS, STEP, WIRE
from girih.planner.steps.graph import TRAINER, Operation, StepGraph

GBIT, CORES, NODES, SETS = 100, 52, 16, 5
ZIPF = Law(1e6, 1.2)
OFF = {"interleaving_groups": 1, "micro_batches": 1}


@dataclass(frozen=True)
class Workload:
    """A model of the paper.

    Attributes:
        share: examples of a node's step. parts: micro-batches.
        on, off: samples/s of a node with and without interleaving (Table IV).
        gpu_on, gpu_off: parts of the time in which its GPU is in use. gbit_off: Gbit/s that it sends without interleaving.
        shape: Figure 15 in the text's words.
    """

    share: int
    parts: int
    on: float
    off: float
    gpu_on: float
    gpu_off: float
    gbit_off: float
    shape: str

    @property
    def gpu_s(self) -> float:
        """Seconds of the GPU for an example."""
        return self.gpu_off / self.off

    @property
    def link_bytes(self) -> float:
        """Bytes that a node sends for an example if all of them go to other nodes."""
        return self.gbit_off * 1e9 / 8 / self.off * NODES / (NODES - 1)

    @property
    def host_s(self) -> float:
        """Seconds of the host for an example: those in which neither the GPU nor the link is in use."""
        return (1 - self.gpu_off) / self.off - self.gbit_off / GBIT / self.off


WORKLOADS = {
    "W&D": Workload(36_000, 2, 22_825, 16_218, 0.32, 0.21, 1.69, "less than linear"),
    "CAN": Workload(48_000, 4, 12_218, 7_957, 0.62, 0.43, 6.94, "nearly linear"),
    "MMoE": Workload(8_000, 4, 2_546, 1_319, 0.98, 0.64, 3.80, "nearly linear"),
}
GIRIH_OFF, GIRIH_ON = "girih, not interleaved", "girih, interleaved"
EXECUTOR_OFF, EXECUTOR_ON = "executor, not interleaved", "executor, interleaved"
BASES = {GIRIH_ON: GIRIH_OFF, EXECUTOR_ON: EXECUTOR_OFF}
CHANGES: dict[str, tuple[Edit, ...]] = {
    "trainers read their share": (reads_own_share,),
    "and rows in the GPU's time": (reads_own_share, rows_in_gpu_time),
    "and no overhead of Python": (reads_own_share, rows_in_gpu_time, without_overheads),
}


@dataclass
class Figure15:
    """Samples/s by nodes."""

    calibration: Calibration
    name: str = "PICASSO, Figure 15"
    x: str = "nodes"
    is_linear: bool = True
    passes: str = "Table IV, w/o Interleaving"
    steps: int = 10
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    _tasks: dict[tuple[str, bool], Task] = field(default_factory=dict, repr=False)

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """The curves, and their ends with other assumptions about girih."""
        for name in [*WORKLOADS][: 1 if quick else None]:
            for arm in (EXECUTOR_OFF, EXECUTOR_ON, GIRIH_OFF, GIRIH_ON):
                for count in self.counts[:2] if quick else self.counts:
                    yield Case(self.name, name, arm, count)
            for change in [*CHANGES][: 1 if quick else None]:
                for arm in (GIRIH_OFF, GIRIH_ON):
                    for count in (self.counts[0], self.counts[-1]):
                        yield Case(self.name, name, arm, count, change)

    def base(self, case: Case) -> str:
        """The arm without interleaving."""
        return BASES.get(case.arm, case.arm)

    def step(self, case: Case) -> Step:
        """A step: each node has a trainer."""
        nodes, workload = int(case.x), WORKLOADS[case.setting]
        interleaved = case.arm in BASES
        options = {
            "interleaving_groups": SETS,
            "micro_batches": workload.parts,
            "micro_batches_from": "embedding",
        }
        key = case.setting, interleaved
        if key not in self._tasks:
            self._tasks[key] = _task(case.setting, options if interleaved else OFF)
        strategy = paper_facts.create({"name": "synchronous", "trainers": nodes})
        known = paper_facts.nccl(self.calibration, GBIT)
        facts = self._tasks[key].facts(strategy, nodes, workload.share, known, CORES, paper_facts.GPU_COST)
        hosts = Hosts((HostGroup(count=nodes, cores=CORES, memory_gb=512, gbit=GBIT),))
        if case.arm.startswith("executor"):
            sets, parts = (SETS, workload.parts) if interleaved else (1, 1)
            return Step(
                executor(workload, nodes, sets, parts, 4.0 * facts.model.num_parameters), facts, hosts
            )
        graph = strategy.step_graph(facts)
        if graph is None:
            raise SystemExit(f"{case}: no speed is predicted")
        gpu = on_gpu(
            rings_of_buckets(graph, facts, self._tasks[key].buckets), workload.gpu_s * workload.share
        )
        return Step(gpu, facts, hosts).edited(*edits(CHANGES, case.change))

    def published(self, case: Case) -> Published:
        """Table IV, which has 16 nodes, and the words of §IV-C about Figure 15."""
        workload, interleaved = WORKLOADS[case.setting], case.arm in BASES
        if case.change or case.arm.startswith("girih"):
            return Published()
        shape = workload.shape if interleaved else ""
        if case.x != NODES:
            return Published(shape=shape)
        rate = workload.on if interleaved else workload.off
        return Published(samples_per_s=NODES * rate, of_base=rate / workload.off, shape=shape)


def executor(workload: Workload, nodes: int, sets: int, parts: int, parameter_bytes: float) -> StepGraph:
    """A step in which groups of tables and micro-batches pass the host, the GPU and the link one after the other.

    The host's time is before the GPU's. Half of the GPU's time is before the exchange of rows, half after it. Rows and their
    gradients are half of the bytes each.
    """
    share, pieces = workload.share, sets * parts
    others = nodes - 1
    size = workload.link_bytes * share * others / nodes / 2
    operations: list[Operation] = []
    rate = GBIT * 1e9 / 8

    def busy(name: str, seconds: float, where: str, after: tuple[str, ...], **more: Any) -> str:
        operations.append(
            Operation(
                name=name,
                role=TRAINER,
                delay_s=seconds,
                executor=where,
                after=after,
                **{"term": PASS, **more},
            )
        )
        return name

    def exchange(name: str, count: int, after: tuple[str, ...]) -> str:
        if not others:
            return after[0]
        latency_s = others * paper_facts.NCCL_LATENCY_S
        operations.append(
            Operation(
                name=name, term=WIRE, role=TRAINER, to=TRAINER, sent_bytes=size / count, bytes_per_s=rate, delay_s=latency_s,
                hops=float(others), after=after, together=True, executor="exchange",
            )
        )  # fmt: skip
        return name

    begun = busy("begin", 0.0, "", (), begins=True, term=STEP)
    ends = []
    for part in range(parts):
        came = []
        for group in range(sets):
            name = f"{part}.{group}"
            ready = busy(f"host {name}", workload.host_s * share / pieces, "host", (begun,))
            seconds = workload.gpu_s * share / pieces / 2
            found = busy(f"lookup {name}", seconds, "gpu", (ready,), term=LOOKUP, reads=name == "0.0")
            came.append(exchange(f"rows {name}", pieces, (found,)))
        end = busy(f"pass {part}", workload.gpu_s * share / parts / 2, "gpu", tuple(dict.fromkeys(came)))
        ends.append(exchange(f"gradients {part}", parts, (end,)))
    if others:
        hops = 2.0 * others
        operations.append(
            Operation(
                name="ring", term=WIRE, role=TRAINER, to=TRAINER, sent_bytes=2 * others / nodes * parameter_bytes,
                bytes_per_s=rate, delay_s=hops * paper_facts.NCCL_LATENCY_S, hops=hops, after=tuple(ends), together=True,
                executor="exchange",
            )
        )  # fmt: skip
        ends = ["ring"]
    busy("applied", 0.0, "", tuple(ends), term=STEP, applies=True)
    return StepGraph(examples=share * nodes, roles={TRAINER: nodes}, operations=tuple(operations))


def _task(name: str, schedule: dict[str, Any]) -> Task:
    config = picasso.config(picasso.WORKLOADS[name], "none", 1)
    del config["data"]
    each = {
        feature["name"]: float(feature["max_length"])
        for feature in config["features"]
        if "max_length" in feature
    }
    return Task(config | {"schedule": schedule}, ZIPF, each)
