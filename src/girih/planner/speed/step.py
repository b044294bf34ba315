"""A step of all trainers as a load on resources, and the resulting speed.

A step uses resources: the cores of the host, the directions of links, and processes that do one thing at a time. The
busiest resource limits the speed, as in the roofline model (Williams et al. 2009) and in
:func:`girih.planner.tagging.ledger.examples_per_s`.

Several steps may be in flight. Then a step also waits for other steps at the busiest resource. With N steps in flight,
it waits at worst for the N − 1 steps before it. So N steps take the path of one step, and N − 1 times the seconds of
the busiest resource. This is the lower bound on the throughput of a closed network of queues (Zahorjan, Sevcik, Eager
and Galler, "Balanced job bound analysis of queueing networks", CACM 25(2), 1982). With one step in flight, a step takes
its path. With many, it takes the seconds of the busiest resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from girih.planner.calibration import Calibration, Overhead, Rate, StepWork
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.traffic import FLOAT_BYTES

CORES, PATH = "cores", "one step after the other"
READ, LOOKUP, PASS, MOVE, UPDATE, STEP, WIRE = (
    "reading", "lookups", "forward and backward", "dense update", "row updates", "step", "messages",
)  # fmt: skip
TRAINER_LINK = "a trainer's link"
NOTHING: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step of all trainers together. Terms have names, which explain a prediction.

    Attributes:
        examples: number of examples in the step.
        work_s: term → core-seconds, of all processes of the host.
        busy_s: resource → seconds that it is busy. A resource is a direction of a link, or a process that does one
            thing at a time.
        path_s: term → seconds that cannot overlap within a step, from its first message to its last update.
        in_flight: number of steps in flight.
    """

    examples: float
    work_s: Mapping[str, float]
    path_s: Mapping[str, float]
    busy_s: Mapping[str, float] = field(default_factory=dict)
    in_flight: float = 1.0

    def adding(
        self,
        *,
        work_s: Mapping[str, float] = NOTHING,
        path_s: Mapping[str, float] = NOTHING,
        busy_s: Mapping[str, float] = NOTHING,
    ) -> Self:
        """Returns this cost with more terms. A term with an existing name replaces the old one."""
        return replace(
            self,
            work_s={**self.work_s, **work_s},
            path_s={**self.path_s, **path_s},
            busy_s={**self.busy_s, **busy_s},
        )

    def seconds(self, cores: float) -> dict[str, float]:
        """Returns resource → seconds per step that limit the speed.

        The path counts divided by the number of steps in flight.
        """
        return {
            CORES: sum(self.work_s.values()) / cores,
            **self.busy_s,
            PATH: sum(self.path_s.values()) / self.in_flight,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The speed of a run.

    Attributes:
        samples_per_s: training examples per second over all trainers, the same as in ``summary.json``.
        bound: the resource that decides the speed.
        seconds: resource → seconds of a step.
        cost: the step from which these seconds follow.
    """

    samples_per_s: float
    bound: str
    seconds: Mapping[str, float]
    cost: StepCost

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for ``Plan.predicted``, with times in milliseconds per step."""
        return {
            "samples_per_s": self.samples_per_s,
            "bound": self.bound,
            "ms": _ms(self.seconds),
            "work_ms": _ms(self.cost.work_s),
            "path_ms": _ms(self.cost.path_s),
            "in_flight": self.cost.in_flight,
        }


def predict(cost: StepCost, cores: float) -> Prediction:
    """Predicts examples / max(busiest, (path + (N − 1) · busiest) / N), with N steps in flight.

    Args:
        cores: cores of the host, which all processes share.
    """
    seconds = cost.seconds(cores)
    bound = max(seconds, key=lambda name: seconds[name])
    busiest_s = max(each for name, each in seconds.items() if name != PATH)
    step_s = step_seconds(busiest_s, sum(cost.path_s.values()), cost.in_flight)
    return Prediction(samples_per_s=cost.examples / step_s, bound=bound, seconds=seconds, cost=cost)


def step_seconds(busiest_s: float, path_s: float, in_flight: float) -> float:
    """Returns seconds from one step to the next: max(busiest, (path + (N − 1) · busiest) / N), N = ``in_flight``."""
    return max(busiest_s, (path_s + (in_flight - 1) * busiest_s) / in_flight)


def _ms(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * each for name, each in seconds.items() if each}


OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of a short run, and the predicted times of its parts.

    Attributes:
        ids: ids in one trainer's share of a step.
        trainers: T.
        cpu_s: core-seconds of all processes in a step of all trainers.
        step_s: wall-clock seconds of this step.
        work_s, path_s: sums of the terms of its :class:`StepCost`.
    """

    ids: float
    trainers: int
    cpu_s: float
    step_s: float
    work_s: float
    path_s: float


def with_overhead(cost: StepCost, overhead: Overhead, facts: Facts) -> StepCost:
    """Adds the calibrated overhead of the strategy, for each trainer's share."""
    ids = {} if facts.profile is None else facts.profile.ids_of_tables
    trainers = facts.num_trainers

    def seconds(rate: Rate) -> float:
        shares = [(sum(ids.get(table, 0.0) for table in g.tables) / trainers, g.dim) for g in facts.groups]
        return rate.call_s + sum(rate.seconds(count, dim, 0.0) for count, dim in shares)

    work_s, path_s = trainers * seconds(overhead.work), seconds(overhead.path)
    return cost.adding(work_s={OVERHEAD: work_s}, path_s={OVERHEAD: path_s})


def fit_overhead(few: Observed, many: Observed) -> Overhead:
    """Fits the overhead to two runs, one with few ids and one with many.

    Each overhead is a line through both runs. Its slope and its start are never negative.
    """
    work = [(each.cpu_s - each.work_s) / each.trainers for each in (few, many)]
    path = [each.step_s - each.path_s for each in (few, many)]
    return Overhead(*(_line(few.ids, many.ids, *each) for each in (work, path)))


def _line(few: float, many: float, least_s: float, most_s: float) -> Rate:
    id_s = max(0.0, most_s - max(0.0, least_s)) / (many - few)
    return Rate(max(0.0, least_s - few * id_s), id_s, 0.0)


BACKWARD = 2 / 3
"""Fraction of a pass that is the backward pass. For each product of the forward pass, it computes two products."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The facts that a prediction needs, all known."""

    facts: Facts
    calibration: Calibration
    work: StepWork
    profile: AccessProfile
    dense: DenseCost
    batch_size: int

    @classmethod
    def of(cls, facts: Facts) -> Self | None:
        """Returns the basis of a prediction, or None if a fact is unknown.

        The calibration does not apply to GPUs and to compiled passes. Then the result is None too.
        """
        calibration, profile, dense = facts.calibration, facts.profile, facts.dense_cost
        if calibration is None or profile is None or dense is None:
            return None
        if calibration.work is None or facts.batch_size is None:
            return None
        if facts.device != "cpu" or facts.rows_on == "gpu" or facts.compile:
            return None
        return cls(facts, calibration, calibration.work, profile, dense, facts.batch_size)

    @property
    def trainers(self) -> int:
        """Number of trainers, T."""
        return self.facts.num_trainers

    @property
    def cores(self) -> int:
        """Number of cores, c."""
        return self.calibration.cores

    @property
    def share(self) -> float:
        """Examples in a trainer's share, B / T."""
        return self.batch_size / self.trainers

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the dense half, in float32."""
        return float(FLOAT_BYTES * self.facts.model.num_parameters)

    @property
    def parallel(self) -> int:
        """min(c, T · t): cores that trainers can use in parallel."""
        return max(1, min(self.cores, self.trainers * self.facts.threads))

    @property
    def crowd(self) -> float:
        """max(1, T · t / c): the slowdown of a trainer's pass while all other trainers compute theirs."""
        return max(1.0, self.trainers * self.facts.threads / self.cores)

    def cost(
        self, *, readings: float, examples: float, passes_s: float, rows_at_once: int, steps_s: float
    ) -> StepCost:
        """Returns the costs that all strategies share.

        An optimizer without measurements counts as the slowest measured one.

        Args:
            readings: number of times that all B examples are read. examples: number of examples in a trainer's pass.
            passes_s: seconds of a trainer's pass. steps_s: seconds of the rest of its step, without the pass.
            rows_at_once: number of cores that look up and update rows at the same time.
        """
        trainers, moved_s = self.trainers, self.dense.update_s
        slowest = max(self.work.updates.values(), key=lambda rate: rate.seconds(1.0, 16, 0.0))
        rates = [
            (self.work.lookup, self.work.updates.get(group.optimizer, slowest)) for group in self.facts.groups
        ]
        lookup_s, update_s = (
            sum(
                rate.seconds(self._ids(group.tables), group.dim, trainers)
                for rate, group in zip(column, self.facts.groups, strict=True)
            )
            for column in zip(*rates, strict=True)
        )
        values = self.profile.ids + self.batch_size * len(self.facts.schema.numeric)
        return StepCost(
            examples=self.batch_size,
            work_s={
                READ: readings * (self.batch_size * self.work.example_s + values * self.work.value_s),
                LOOKUP: lookup_s,
                PASS: trainers * self.busy_threads * self.dense.seconds(examples),
                MOVE: trainers * self.busy_threads * moved_s,
                UPDATE: update_s,
                STEP: trainers * self.work.step_s,
            },
            path_s={
                LOOKUP: lookup_s / rows_at_once,
                PASS: passes_s,
                MOVE: moved_s * self.crowd,
                UPDATE: update_s / rows_at_once,
                STEP: steps_s,
            },
        )

    def pass_s(self, examples: float) -> float:
        """Returns the seconds of a trainer's forward and backward pass while all trainers compute.

        This is the measured time, multiplied by :attr:`crowd`.
        """
        return self.dense.seconds(examples) * self.crowd

    @property
    def busy_threads(self) -> float:
        """Returns the number of a trainer's threads that its pass keeps busy: t, or fewer if the net is small."""
        return min(self.facts.threads, self.dense.busy_threads or self.facts.threads)

    def _ids(self, tables: tuple[str, ...]) -> float:
        return sum(self.profile.ids_of_tables.get(table, 0.0) for table in tables)
