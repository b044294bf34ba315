"""The predicted speed of a run: simulated, with the parts of a step that explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from girih.planner.facts import Facts
from girih.planner.simulator.hosts import Hosts
from girih.planner.simulator.result import Simulated, simulate
from girih.planner.simulator.terms import extended
from girih.planner.steps.fold import Fold, fold
from girih.planner.steps.graph import StepGraph

VALIDATED_TRAINERS = 2
"""Number of trainers up to which predictions were compared with runs (docs/planning.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The speed of a run.

    Attributes:
        simulated: the result of the simulator.
        fold: the work and the path of a step, without queues.
        cores: cores of all hosts. in_flight: steps of a trainer that are in flight.
    """

    simulated: Simulated
    fold: Fold
    cores: float
    in_flight: int

    @property
    def samples_per_s(self) -> float:
        """Training examples per second over all trainers, the same as in ``summary.json``."""
        return self.simulated.samples_per_s

    @property
    def bound(self) -> str:
        """The resource that decides the speed."""
        return self.simulated.bottleneck

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for ``Plan.predicted``, with times in milliseconds per step."""
        return {
            "bound": self.bound,
            **self.simulated.to_dict(),
            "work_ms": _ms(self.fold.work_s),
            "path_ms": _ms(self.fold.path_s),
            "in_flight": self.in_flight,
        }


def predict(graph: StepGraph, facts: Facts, hosts: Hosts | None = None, **options: Any) -> Prediction | None:
    """Simulates a graph. Returns None without a calibration.

    Args:
        hosts: the hosts of the run; None means the calibrated machines.
        options: see :func:`girih.planner.simulator.result.simulate`.
    """
    calibration, profile = facts.calibration, facts.profile
    if calibration is None or profile is None:
        return None
    hosts = hosts or Hosts.like(calibration)
    graph, reasons = extended(graph, facts, hosts)
    if graph.trainers > VALIDATED_TRAINERS:
        reasons.append(
            f"{graph.trainers} trainers; predictions for up to {VALIDATED_TRAINERS} were compared with runs"
        )
    if sum(each.count for each in hosts.hosts) > 1:
        reasons.append("several machines; predictions for one machine were compared with runs")
    found = simulate(graph, hosts, keys=profile.keys_of_share, extrapolated=reasons, **options)
    return Prediction(
        simulated=found, fold=fold(graph, hosts.cores), cores=hosts.cores, in_flight=graph.in_flight
    )


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * each for name, each in seconds.items()}
