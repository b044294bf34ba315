"""Parts that steps of all strategies consist of, from facts and a calibration.

B: examples of a step, T: trainers, t: threads of a trainer, c: cores of the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from girih.planner.calibration import Calibration, Rate, StepWork
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.traffic import FLOAT_BYTES

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

    def lookup_s(self, calls: float = 1.0) -> float:
        """Core-seconds of unique keys, lookups and pooling for all B examples, in so many calls for each group."""
        return sum(
            self.work.lookup.seconds(self._ids(group.tables), group.dim, calls) for group in self.facts.groups
        )

    def update_s(self, calls: float = 1.0) -> float:
        """Core-seconds of gradients scattered to keys, and rows moved, for all B examples; of an optimizer
        that was not measured as of the slowest that was."""
        slowest = max(self.work.updates.values(), key=lambda rate: rate.seconds(1.0, 16, 0.0))
        return sum(
            self._rate(group.optimizer, slowest).seconds(self._ids(group.tables), group.dim, calls)
            for group in self.facts.groups
        )

    def read_s(self, readings: float = 1.0) -> float:
        """Core-seconds of reading all B examples, so many times over."""
        values = self.profile.ids + self.batch_size * len(self.facts.schema.numeric)
        return readings * (self.batch_size * self.work.example_s + values * self.work.value_s)

    def pass_s(self, examples: float) -> float:
        """Seconds of a trainer's forward and backward pass while all trainers have one: measured, times the crowd."""
        return self.dense.seconds(examples) * self.crowd

    def pass_work_s(self, examples: float) -> float:
        """Core-seconds of the passes of all trainers, of so many examples each."""
        return self.trainers * self.busy_threads * self.dense.seconds(examples)

    @property
    def busy_threads(self) -> float:
        """Threads of a trainer that its pass keeps busy: t, or fewer where the net is too small for all of them."""
        return min(self.facts.threads, self.dense.busy_threads or self.facts.threads)

    def _ids(self, tables: tuple[str, ...]) -> float:
        return sum(self.profile.ids_of_tables.get(table, 0.0) for table in tables)

    def _rate(self, optimizer: str, slowest: Rate) -> Rate:
        return self.work.updates.get(optimizer, slowest)
