"""A step of all trainers as resources see it, and the speed that follows.

A step keeps resources busy: the cores of the host, each direction of a link, what one process does one step after the other. No step is faster
than the busiest of them allows, as in the roofline model (Williams et al. 2009) and in
:func:`girih.planner.tagging.utilization.examples_per_s`. With N steps under way a step also waits for others at the busiest resource:
at worst for all of the N − 1 that are ahead of it. So N steps take its own path and N − 1 times the busiest resource, the lower bound on
the throughput of a closed network of queues (Zahorjan, Sevcik, Eager and Galler, "Balanced job bound analysis of queueing
networks", CACM 25(2), 1982). For one step that is its path, for many the busiest resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CORES, PATH = "cores", "one step after the other"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step, of all trainers together. Terms have names, so that a prediction says what it consists of.

    Attributes:
        examples: that it trains on.
        work_s: term → core-seconds, of all processes of the host.
        busy_s: a link's direction, or a process that does one thing at a time → seconds that it is busy.
        path_s: term → seconds of what cannot overlap within a step, from its first message to its last update.
        in_flight: steps that are under way at once.
    """

    examples: float
    work_s: Mapping[str, float]
    path_s: Mapping[str, float]
    busy_s: Mapping[str, float] = field(default_factory=dict)
    in_flight: float = 1.0

    def seconds(self, cores: float) -> dict[str, float]:
        """Resource → seconds that a step keeps it busy; of the path, its share of the steps under way."""
        return {
            CORES: sum(self.work_s.values()) / cores,
            **self.busy_s,
            PATH: sum(self.path_s.values()) / self.in_flight,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The speed of a run.

    Attributes:
        samples_per_s: training examples per second over all trainers, as ``summary.json`` counts them.
        bound: the resource that decides it.
        seconds: resource → seconds of a step.
        cost: what they were made of.
    """

    samples_per_s: float
    bound: str
    seconds: Mapping[str, float]
    cost: StepCost

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``Plan.predicted``; times are in milliseconds per step."""
        return {
            "samples_per_s": self.samples_per_s,
            "bound": self.bound,
            "ms": _ms(self.seconds),
            "work_ms": _ms(self.cost.work_s),
            "path_ms": _ms(self.cost.path_s),
            "in_flight": self.cost.in_flight,
        }


def predict(cost: StepCost, cores: float) -> Prediction:
    """examples / max(busiest, (path + (N − 1) · busiest) / N), with N steps under way.

    Args:
        cores: of the host that all processes share.
    """
    seconds = cost.seconds(cores)
    bound = max(seconds, key=lambda name: seconds[name])
    busiest_s = max(each for name, each in seconds.items() if name != PATH)
    step_s = step_seconds(busiest_s, sum(cost.path_s.values()), cost.in_flight)
    return Prediction(samples_per_s=cost.examples / step_s, bound=bound, seconds=seconds, cost=cost)


def step_seconds(busiest_s: float, path_s: float, in_flight: float) -> float:
    """Seconds from one step to the next: max(busiest, (path + (N − 1) · busiest) / N), with N = ``in_flight`` steps under way."""
    return max(busiest_s, (path_s + (in_flight - 1) * busiest_s) / in_flight)


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * each for name, each in seconds.items() if each}
