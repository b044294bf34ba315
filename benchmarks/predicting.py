"""Predictions of runs from configs, a calibration, and the time of the model's pass. Nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import network
from persia_wire import bytes_per_s

from girih.app.run_config import RunConfig
from girih.comm.group import TrainerGroup
from girih.lifecycle.planning import facts_of, measure_access, measured_pass, threads_of
from girih.planner.calibration import Calibration
from girih.planner.facts import DenseCost, Facts
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.strategies.strategy import Strategy, price

NO_LINK = "none"
GOODPUT = 1448 / 1514
"""Part of a link that is left for what TCP carries: of each packet of 1,500 bytes 52 are headers, and 14 more are Ethernet's."""


@dataclass(frozen=True)
class Passes:
    """Times of the models' passes on the machine of some runs.

    Attributes:
        memory_bytes: memory of the machine.
        threads: number of trainers → threads of each.
        costs: name of a task → the cost of a trainer's pass and of its update.
        replicated: tasks with their link, whose trainers under ``substitution`` each computed the whole upper network, if the
            code of the runs chose otherwise than today's. None is today's choice.
    """

    memory_bytes: float
    threads: Mapping[str, int]
    costs: Mapping[str, DenseCost]
    replicated: frozenset[str] | None = None

    @classmethod
    def read(cls, file: Path) -> Passes | None:
        """The times of a file, or None if there is none."""
        if not file.is_file():
            return None
        read = json.loads(file.read_text(encoding="utf-8"))
        costs = {
            name: DenseCost(memory_bytes=read["memory_bytes"], **cost) for name, cost in read["costs"].items()
        }
        replicated = frozenset(read["replicated"]) if "replicated" in read else None
        return cls(read["memory_bytes"], read["threads"], costs, replicated)

    def write(self, file: Path) -> None:
        """Writes the times for :meth:`read`."""
        costs = {name: asdict(cost) for name, cost in self.costs.items()}
        for cost in costs.values():
            del cost["memory_bytes"]  # of the machine
        content = {"memory_bytes": self.memory_bytes, "threads": dict(self.threads), "costs": costs}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def facts(self, settings: RunConfig, strategy: Strategy, task: str, calibration: Calibration) -> Facts:
        """The facts of a run on that machine. Nothing is timed.

        Args:
            strategy: that of the settings, or one with as many trainers.
        """
        return facts_with(
            settings, strategy, self.costs[task], calibration, self.threads[str(strategy.trainers)]
        )


def facts_with(
    settings: RunConfig, strategy: Strategy, cost: DenseCost, calibration: Calibration, threads: int
) -> Facts:
    """The facts of a run whose pass has a known cost. Counts the keys of its data."""
    (sparse, dense), data, trainers = settings.halves(), settings.dataset("train"), strategy.trainers
    return replace(
        facts_of(sparse, dense, trainers, settings.schedule),
        batch_size=data.batch_size,
        profile=measure_access(data, sparse, trainers),
        dense_cost=cost,
        calibration=calibration,
        links=calibration.links,
        threads=threads,
        memory_bytes=cost.memory_bytes,
        graph=strategy.operator_graph(sparse, dense) if strategy.places_operators else None,
    )


def measured_cost(settings: RunConfig, trainers: int) -> DenseCost:
    """The cost of a trainer's pass on this machine, with a trainer's share of the cores.

    Raises:
        SystemExit: the data have too few examples.
    """
    (sparse, dense), data = settings.halves(), settings.dataset("train")
    with threads_of(trainers):
        cost = measured_pass(data, sparse, dense, TrainerGroup(), trainers)
    if cost is None:
        raise SystemExit("the data have too few examples for a measured pass")
    return cost


def over(calibration: Calibration, link: str) -> Calibration:
    """The calibration, with links that are not faster than ``link``."""
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


def predicted(strategy: Strategy, facts: Facts, hosts: Hosts, **options: int) -> dict[str, Any]:
    """The result of the simulator, with ``wire_bytes``: kind → bytes of a trainer's share of a step.

    Raises:
        SystemExit: a fact is unknown.
    """
    own, graph = price(strategy, facts, hosts, **options), strategy.step_graph(facts)
    if own is None or graph is None:
        raise SystemExit(f"{strategy.name}: no speed is predicted")
    return {**own.to_dict(), "wire_bytes": graph.sent_bytes(), "examples": graph.examples}
