"""A step of all trainers as resources see it, and the speed that follows.

A step takes as long as the busiest resource has work with it: the cores of the host, each direction of a link, what one process does one
step after the other, and a step's own path where few steps are under way at once. Resources that are less busy wait, and add nothing.
This is the bound that the roofline model takes (Williams et al. 2009) for a machine with more than two resources, and the one that
:func:`girih.planner.tagging.utilization.examples_per_s` takes for a group's devices.
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
    """examples / max over resources of the seconds that a step keeps each busy.

    Args:
        cores: of the host that all processes share.
    """
    seconds = cost.seconds(cores)
    bound = max(seconds, key=lambda name: seconds[name])
    return Prediction(samples_per_s=cost.examples / seconds[bound], bound=bound, seconds=seconds, cost=cost)


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * each for name, each in seconds.items() if each}
