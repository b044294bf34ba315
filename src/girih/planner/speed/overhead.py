"""The overhead of a strategy: found as what short runs took beyond the sum of a step's parts, and added to its cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from girih.planner.calibration import Overhead, Rate
from girih.planner.facts import Facts
from girih.planner.speed.step import StepCost

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

    return replace(
        cost,
        work_s={**cost.work_s, OVERHEAD: trainers * seconds(overhead.work)},
        path_s={**cost.path_s, OVERHEAD: seconds(overhead.path)},
    )


def fit_overhead(few: Observed, many: Observed) -> Overhead:
    """The lines through two runs, of few ids and of more; none falls, or begins below 0."""
    work = [(each.cpu_s - each.work_s) / each.trainers for each in (few, many)]
    path = [each.step_s - each.path_s for each in (few, many)]
    return Overhead(*(_line(few.ids, many.ids, *each) for each in (work, path)))


def _line(few: float, many: float, least_s: float, most_s: float) -> Rate:
    id_s = max(0.0, most_s - max(0.0, least_s)) / (many - few)
    return Rate(max(0.0, least_s - few * id_s), id_s, 0.0)
