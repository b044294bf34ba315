"""Training examples per second, predicted when a run or ``girih plan`` knows its data: what that needs is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch

from girih.comm.group import TrainerGroup
from girih.data import Dataset
from girih.dense.half import DenseSpec
from girih.lifecycle.dense_cost import measure_dense_cost, with_update
from girih.planner.calibration import Calibration
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.plan import Plan
from girih.sparse.access_profile import measure_access
from girih.sparse.spec import SparseSpec
from girih.strategies.strategy import Strategy, price

MOST_EXAMPLES = 4096
"""The pass that is measured has no more; a line goes on to larger shares."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and the file that it is from."""

    calibration: Calibration
    file: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """A file of ``girih calibrate``.

        Raises:
            MissingFileError, ConfigError: see :meth:`Calibration.read`.
        """
        return cls(Calibration.read(path), str(path))


def priced(
    plan: Plan,
    strategy: Strategy,
    facts: Facts,
    file: str,
    ranks: TrainerGroup,
) -> Plan:
    """The plan with the speed that is predicted for it, in ``predicted.speed``; as it was where none is.

    Called by all trainers together.

    Args:
        facts: those of :func:`measured`, on the first trainer with what :func:`girih.lifecycle.run_planner.place_net` adds.
        file: where the calibration is from.
    """
    predicted = None
    if ranks.first:
        prediction = price(strategy, facts)
        predicted = None if prediction is None else {**prediction.to_dict(), "from": file}
    speed = ranks.broadcast(predicted)
    return plan if speed is None else replace(plan, predicted={**plan.predicted, "speed": speed})


def measured(
    facts: Facts,
    calibration: Calibration,
    train: Dataset,
    sparse: SparseSpec,
    dense: DenseSpec,
    ranks: TrainerGroup,
    cost: DenseCost | None = None,
) -> Facts:
    """Facts with all that a speed is predicted from: ids of the first batches, and a pass of the model on a trainer's share.

    They are not for plans: measuring must not change what a run does.

    Args:
        cost: see :func:`measured_pass`, where that is known; None measures it.
    """
    trainers = facts.num_trainers
    profile = asdict(measure_access(train, sparse, trainers)) if ranks.first else None
    if cost is None:
        cost = measured_pass(train, sparse, dense, ranks, trainers)
    return replace(
        facts,
        batch_size=train.batch_size,
        profile=AccessProfile(**ranks.broadcast(profile)),
        dense_cost=cost,
        calibration=calibration,
        threads=torch.get_num_threads(),
    )


def measured_pass(
    train: Dataset, sparse: SparseSpec, dense: DenseSpec, ranks: TrainerGroup, trainers: int
) -> DenseCost | None:
    """The cost of a pass of the model on the share of one of so many trainers, and of its optimizer's step, with the threads that there are.

    None where there are too few examples, see :func:`measure_dense_cost`.
    """
    share = max(1, min(MOST_EXAMPLES, train.batch_size // trainers))
    cost = measure_dense_cost(train, sparse, dense, ranks, share)
    return None if cost is None else with_update(cost, dense, ranks)


@contextmanager
def threads_of(num_trainers: int, machines: int = 1) -> Iterator[None]:
    """As many of torch's threads as each of so many trainers has on so many machines like this one, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, max(1, before * machines // num_trainers)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
