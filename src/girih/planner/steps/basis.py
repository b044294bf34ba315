"""The facts that a step graph needs, and the parts of a step that all strategies share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from girih.planner.calibration import Calibration, Overhead, Rate, StepWork
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.steps.graph import TRAINER, Operation
from girih.planner.traffic import FLOAT_BYTES

READ, LOOKUP, PASS, MOVE, UPDATE, STEP, WIRE = (
    "reading", "lookups", "forward and backward", "dense update", "row updates", "step", "messages",
)  # fmt: skip
OVERHEAD = "overhead"
BACKWARD = 2 / 3
"""Fraction of a pass that is the backward pass. For each product of the forward pass, it computes two products."""
READ_AHEAD = 4
"""Batches that a reader has ready; the default of ``data.read_ahead``."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The facts that a prediction needs, all known. Seconds and core-seconds are of one trainer's share of a step."""

    facts: Facts
    calibration: Calibration
    work: StepWork
    profile: AccessProfile
    dense: DenseCost
    batch_size: int
    overhead: Overhead | None

    @classmethod
    def of(cls, facts: Facts, calibration_key: str) -> Self | None:
        """Returns the basis of a prediction, or None if a fact is unknown.

        The calibration does not apply to GPUs and to compiled passes. Then the result is None too.

        Args:
            calibration_key: the name of the strategy's overhead in calibrations.
        """
        calibration, profile, dense = facts.calibration, facts.profile, facts.dense_cost
        if calibration is None or profile is None or dense is None:
            return None
        if calibration.work is None or facts.batch_size is None:
            return None
        if facts.device != "cpu" or facts.rows_on == "gpu" or facts.compile:
            return None
        overhead = calibration.overheads.get(calibration_key)
        return cls(facts, calibration, calibration.work, profile, dense, facts.batch_size, overhead)

    @property
    def trainers(self) -> int:
        """Number of trainers, T."""
        return self.facts.num_trainers

    @property
    def share(self) -> float:
        """Examples in a trainer's share, B / T."""
        return self.batch_size / self.trainers

    @property
    def parameter_bytes(self) -> float:
        """Bytes of the dense half, in float32."""
        return float(FLOAT_BYTES * self.facts.model.num_parameters)

    @property
    def busy_threads(self) -> float:
        """Returns the number of a trainer's threads that its pass keeps busy: t, or fewer if the net is small."""
        return min(self.facts.threads, self.dense.busy_threads or self.facts.threads)

    def read_s(self, readings: float) -> float:
        """Returns core-seconds of reading, if all processes together read all examples ``readings`` times."""
        values = self.profile.ids + self.batch_size * len(self.facts.schema.numeric)
        whole = self.batch_size * self.work.example_s + values * self.work.value_s
        return readings * whole / self.trainers

    def rows_s(self) -> tuple[float, float]:
        """Returns core-seconds of lookups and of row updates.

        An optimizer without measurements counts as the slowest measured one.
        """
        slowest = max(self.work.updates.values(), key=lambda rate: rate.seconds(1.0, 16, 0.0))
        lookup_s = update_s = 0.0
        for group in self.facts.groups:
            ids = sum(self.profile.ids_of_tables.get(table, 0.0) for table in group.tables) / self.trainers
            lookup_s += self.work.lookup.seconds(ids, group.dim)
            update_s += self.work.updates.get(group.optimizer, slowest).seconds(ids, group.dim)
        return lookup_s, update_s

    def overhead_s(self) -> tuple[float, float]:
        """Returns the calibrated overhead: core-seconds on the step's path, and further seconds without a core.

        The overhead of the path includes the core-seconds, because a step of the calibration waits for them.
        """
        if self.overhead is None:
            return 0.0, 0.0
        work_s, path_s = (self._of_ids(rate) for rate in (self.overhead.work, self.overhead.path))
        return work_s, max(0.0, path_s - work_s)

    def _of_ids(self, rate: Rate) -> float:
        ids = self.profile.ids_of_tables
        counts = [
            (sum(ids.get(table, 0.0) for table in group.tables) / self.trainers, group.dim)
            for group in self.facts.groups
        ]
        return rate.call_s + sum(rate.seconds(count, dim, 0.0) for count, dim in counts)

    def dense_pass(
        self, name: str, fraction: float, after: tuple[str, ...], examples: float | None = None
    ) -> Operation:
        """Returns a fraction of a trainer's pass with the threads that it keeps busy: of its share, or of ``examples``."""
        busy = self.busy_threads
        seconds = fraction * self.dense.seconds(self.share if examples is None else examples)
        return Operation(name=name, term=PASS, role=TRAINER, core_s=busy * seconds, threads=busy, after=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Measurements of a short run, and the predicted times of its parts.

    Attributes:
        ids: ids in one trainer's share of a step.
        trainers: T.
        cpu_s: core-seconds of all processes in a step of all trainers.
        step_s: wall-clock seconds of this step.
        work_s, path_s: sums of the terms of its :class:`girih.planner.steps.fold.Fold`.
    """

    ids: float
    trainers: int
    cpu_s: float
    step_s: float
    work_s: float
    path_s: float


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
