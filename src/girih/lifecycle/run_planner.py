"""The plan of one run, on all its trainers: decided, the operators of its net placed, its speed predicted."""

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
from girih.errors import ConfigError
from girih.lifecycle.dense_cost import count_update, host_memory_bytes, measure_dense_cost, with_update
from girih.lifecycle.planning import decide, measure_access
from girih.planner.calibration import Calibration
from girih.planner.facts import AccessProfile, DenseCost, Facts
from girih.planner.operators import OperatorGraph
from girih.planner.plan import Plan, PlannedTagging
from girih.planner.speed.step import StepCost
from girih.planner.tagging.tag import Tagged
from girih.sparse.spec import SparseSpec
from girih.strategies.strategy import Strategy, price
from girih.training.notes import Notes
from girih.training.session import RunContext

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNet:
    """The net of a run over the devices of a group.

    Attributes:
        plan: with its tagging. facts: with the operators and their devices. tagged: what speaks for these.
    """

    plan: Plan
    facts: Facts
    graph: OperatorGraph
    tagged: Tagged


def place_net(
    plan: Plan, strategy: Strategy, facts: Facts, sparse: SparseSpec, dense: DenseSpec
) -> PlacedNet:
    """Tags the operators of a model with devices, unless the plan has: then it is checked.

    Done by one trainer: it rests on this machine's memory, and on the optimizer's cost, counted here if ``facts`` lack it.

    Args:
        strategy: one that ``places_operators``.

    Raises:
        ConfigError: the net does not fit into the memory of the group, or the plan does not fit the net.
    """
    if facts.dense_cost is None:
        cost = count_update(dense, facts.speeds)
        facts = replace(facts, dense_cost=cost, threads=torch.get_num_threads())
    held = plan.tagging
    graph = strategy.operator_graph(sparse.following(plan), dense, None if held is None else held.cut)
    facts = replace(
        facts,
        graph=graph,
        tagging=None if held is None else held.devices,
        memory_bytes=host_memory_bytes(),
    )
    tagged = strategy.tag_operators(facts, plan.wire)
    tagging = PlannedTagging(devices=tagged.tagging, cut=graph.cut)
    return PlacedNet(
        plan=replace(plan, tagging=tagging),
        facts=replace(
            facts,
            tagging=tagged.tagging,
            wire={kind: plan.wire[kind] for kind in ("activations", "dense_gradients") if kind in plan.wire},
        ),
        graph=graph,
        tagged=tagged,
    )


@dataclass
class RunPlanner:
    """Makes the plan of a run. Methods are called by all trainers together.

    Attributes:
        pinned: the plan that the user gave, if any.
        calibrated: the machine, to predict a speed by; None predicts none.
    """

    context: RunContext
    facts: Facts
    notes: Notes
    pinned: Plan | None
    calibrated: Calibrated | None
    _priced_by: Facts | None = None

    def plan(self, strategy: Strategy, train: Dataset | None, earlier: Plan | None) -> Plan:
        """The plan to build from.

        Args:
            train: the training data, where it is known.
            earlier: the plan of the run that goes on.

        Raises:
            ConfigError: see :func:`girih.lifecycle.planning.decide`.
        """
        sparse, dense, ranks = self.context.sparse, self.context.dense, self.context.ranks
        plan = decide(strategy, self.facts, self.context, train=train, earlier=earlier, pinned=self.pinned)
        facts = self.facts if train is None else replace(self.facts, batch_size=train.batch_size)
        calibrated = self.calibrated if train is not None and facts.device == "cpu" else None
        unmeasured = facts
        if calibrated is not None and train is not None:
            unmeasured = replace(facts, calibration=calibrated.calibration)
            facts = measured(facts, calibrated.calibration, train, sparse, dense, ranks)
        if strategy.places_operators:  # which is decided before anything is measured
            plan, net = self._placed(plan, strategy, unmeasured)
            facts = replace(
                facts, graph=net.graph, tagging=net.tagging, wire=net.wire, memory_bytes=net.memory_bytes
            )
        self._priced_by = None if calibrated is None else facts
        return self.priced(plan, strategy)

    def priced(self, plan: Plan, strategy: Strategy) -> Plan:
        """The plan with the speed that is predicted for it, by what was measured when the run's was made."""
        if self._priced_by is None or self.calibrated is None:
            return plan
        return priced(plan, strategy, self._priced_by, self.calibrated.file, self.context.ranks)

    def step_cost(
        self, plan: Plan, strategy: Strategy, train: Dataset, calibration: Calibration
    ) -> StepCost | None:
        """Adds up what a step on these data should take this machine, by its parts, on rank 0; None where nothing says so."""
        halves = self.context.sparse.following(plan), self.context.dense
        facts = measured(self.facts, calibration, train, *halves, self.context.ranks)
        if not self.context.ranks.first:
            return None
        if strategy.places_operators:
            facts = place_net(plan, strategy, facts, *halves).facts
        prediction = price(strategy, facts)
        return None if prediction is None else prediction.cost

    def _placed(self, plan: Plan, strategy: Strategy, facts: Facts) -> tuple[Plan, Facts]:
        """The plan with a tagging, on all trainers; rank 0's facts say it too. What an earlier run had is dropped where it does not fit."""
        if self.context.ranks.first:
            halves = self.context.sparse, self.context.dense
            try:
                placed = place_net(plan, strategy, facts, *halves)
            except ConfigError as error:
                if plan.tagging is None:
                    raise
                if self.pinned is not None:
                    raise ConfigError(f"the plan does not fit, plan again with girih plan: {error}") from None
                self.notes.log(
                    f"operators are tagged anew: the tagging of the run so far does not fit ({error})"
                )
                placed = place_net(replace(plan, tagging=None), strategy, facts, *halves)
            plan, facts = placed.plan, placed.facts
        return Plan.from_dict(self.context.ranks.broadcast(plan.to_dict())), facts
