"""A step of all trainers as resources see it, and the speed that follows.

A step keeps resources busy: the cores of the host, each direction of a link, what one process does one step after the other. No step is faster
than the busiest of them allows, as in the roofline model (Williams et al. 2009) and in
:func:`girih.planner.tagging.ledger.examples_per_s`. With N steps under way a step also waits for others at the busiest resource:
at worst for all of the N − 1 that are ahead of it. So N steps take its own path and N − 1 times the busiest resource, the lower bound on
the throughput of a closed network of queues (Zahorjan, Sevcik, Eager and Galler, "Balanced job bound analysis of queueing
networks", CACM 25(2), 1982). For one step that is its path, for many the busiest resource.
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

    def adding(
        self,
        *,
        work_s: Mapping[str, float] = NOTHING,
        path_s: Mapping[str, float] = NOTHING,
        busy_s: Mapping[str, float] = NOTHING,
    ) -> Self:
        """Returns the cost with more terms, or other values of them."""
        return replace(
            self,
            work_s={**self.work_s, **work_s},
            path_s={**self.path_s, **path_s},
            busy_s={**self.busy_s, **busy_s},
        )

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

    def to_dict(self) -> dict[str, object]:
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


OVERHEAD = "overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Steps of a short run beside what their parts should take.

    Attributes:
        ids: of one trainer's share of a step.
        trainers: T.
        cpu_s, step_s: core-seconds of all processes, and seconds on the clock, of a step of all trainers.
        work_s, path_s: the sums of the terms of its :class:`StepCost`.
    """

    ids: float
    trainers: int
    cpu_s: float
    step_s: float
    work_s: float
    path_s: float


def with_overhead(cost: StepCost, overhead: Overhead, facts: Facts) -> StepCost:
    """The cost with what the calibrated strategy takes beyond its parts, for each trainer's share."""
    ids = {} if facts.profile is None else facts.profile.ids_of_tables
    trainers = facts.num_trainers

    def seconds(rate: Rate) -> float:
        shares = [(sum(ids.get(table, 0.0) for table in g.tables) / trainers, g.dim) for g in facts.groups]
        return rate.call_s + sum(rate.seconds(count, dim, 0.0) for count, dim in shares)

    work_s, path_s = trainers * seconds(overhead.work), seconds(overhead.path)
    return cost.adding(work_s={OVERHEAD: work_s}, path_s={OVERHEAD: path_s})


def fit_overhead(few: Observed, many: Observed) -> Overhead:
    """The lines through two runs, of few ids and of more; none falls, or begins below 0."""
    work = [(each.cpu_s - each.work_s) / each.trainers for each in (few, many)]
    path = [each.step_s - each.path_s for each in (few, many)]
    return Overhead(*(_line(few.ids, many.ids, *each) for each in (work, path)))


def _line(few: float, many: float, least_s: float, most_s: float) -> Rate:
    id_s = max(0.0, most_s - max(0.0, least_s)) / (many - few)
    return Rate(max(0.0, least_s - few * id_s), id_s, 0.0)


BACKWARD = 2 / 3
"""The backward pass's part of both: two products for one of the forward pass."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Facts that a prediction needs, all of them there."""

    facts: Facts
    calibration: Calibration
    work: StepWork
    profile: AccessProfile
    dense: DenseCost
    batch_size: int

    @classmethod
    def of(cls, facts: Facts) -> Self | None:
        """None where something is not known, or what was calibrated does not say: GPUs, and passes that torch compiles."""
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
        """T."""
        return self.facts.num_trainers

    @property
    def cores(self) -> int:
        """c."""
        return self.calibration.cores

    @property
    def share(self) -> float:
        """B / T."""
        return self.batch_size / self.trainers

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the dense half, in float32."""
        return float(FLOAT_BYTES * self.facts.model.num_parameters)

    @property
    def parallel(self) -> int:
        """min(c, T · t): cores that trainers can use at once."""
        return max(1, min(self.cores, self.trainers * self.facts.threads))

    @property
    def crowd(self) -> float:
        """max(1, T · t / c): how many times as long a trainer's pass takes while all others have theirs."""
        return max(1.0, self.trainers * self.facts.threads / self.cores)

    def cost(
        self, *, readings: float, examples: float, passes_s: float, rows_at_once: int, steps_s: float
    ) -> StepCost:
        """The costs that all strategies have.

        An optimizer that was not measured takes as long as the slowest that was.

        Args:
            readings: how many times over all B examples are read. examples: of a trainer's pass.
            passes_s: seconds of a trainer's pass. steps_s: those of the rest of its step.
            rows_at_once: cores that look up and move rows at once.
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
        """Seconds of a trainer's forward and backward pass while all trainers have one: measured, times the crowd."""
        return self.dense.seconds(examples) * self.crowd

    @property
    def busy_threads(self) -> float:
        """Threads of a trainer that its pass keeps busy: t, or fewer where the net is too small for all of them."""
        return min(self.facts.threads, self.dense.busy_threads or self.facts.threads)

    def _ids(self, tables: tuple[str, ...]) -> float:
        return sum(self.profile.ids_of_tables.get(table, 0.0) for table in tables)
