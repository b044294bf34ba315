"""Makes a plan from facts. Measures the first batches, chooses the plan, places operators, and predicts the speed.

No decision depends on a clock.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import nn

from girih.cluster.cluster import Cluster
from girih.cluster.options import ClusterOptions
from girih.comm.group import TrainerGroup
from girih.config.train import ScheduleOptions
from girih.data import Dataset
from girih.data.batch import Batch, share_of
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import made_by
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError
from girih.kernels.buffers import Buffers
from girih.lifecycle.dense_cost import (
    count_dense_cost,
    count_update,
    host_bytes,
    host_memory_bytes,
    measure_dense_cost,
    with_update,
)
from girih.models.operators import operators_of
from girih.planner.calibration import Calibration
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import (
    AccessProfile,
    DenseCost,
    Facts,
    GroupFacts,
    ModelFacts,
    OperatorFacts,
    TableFacts,
)
from girih.planner.operators import OperatorGraph
from girih.planner.plan import Plan, PlannedTagging
from girih.planner.steps.fold import Fold, fold
from girih.planner.tagging.tag import Tagged
from girih.planner.traffic import FLOAT_BYTES
from girih.schema import Schema
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup
from girih.sparse.spec import SparseSpec
from girih.store.accounting import row_bytes
from girih.store.rows.record import row_layout
from girih.strategies.strategy import Strategy, facts_for_schedule, price
from girih.training.notes import Notes
from girih.training.session import RunContext


def model_facts(module: nn.Module, optimizer: OptimizerFactory, schema: Schema) -> ModelFacts:
    """Returns parameters, substitutable operators and optimizer of a model.

    Raises:
        ConfigError: ``optimizer`` does not return an optimizer.
    """
    operators = list(operators_of(module))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    spread = {  # parameters that belong to features
        operator.get_parameter(name)
        for _, operator in operators
        for name in copy.deepcopy(operator).narrow(schema)
    }
    upper = [parameter for parameter in trained if parameter not in spread]
    made = made_by(optimizer, trained)
    kind = type(made)
    strategies = getattr(module, "loss_strategies", None)
    return ModelFacts(
        name=type(module).__name__,
        num_parameters=sum(p.numel() for p in trained),
        upper_parameters=sum(p.numel() for p in upper),
        upper_weights=sum(p.numel() for p in upper if p.dim() > 1),
        last_bucket=_last_bucket(trained),
        operators=tuple(
            OperatorFacts(
                name=name,
                aggregation=operator.aggregation,
                columns=operator.columns,
                colocated_features=operator.colocated_features,
            )
            for name, operator in operators
        ),
        not_substitutable=getattr(module, "not_substitutable", None),
        optimizer="" if made is None else f"{kind.__module__}.{kind.__name__}",
        loss_strategies=None if strategies is None else tuple(strategies),
    )


def _last_bucket(parameters: Sequence[nn.Parameter]) -> int:
    """Returns the size of the last bucket of gradients.

    Torch's DistributedDataParallel fills buckets from the last declared parameter to the first.
    """
    filled = 0
    for number, parameter in enumerate(reversed(parameters), start=1):
        filled += parameter.numel()
        if FLOAT_BYTES * filled >= BUCKET_BYTES and number < len(parameters):
            filled = 0
    return filled


def joined(strategy: Strategy, options: ClusterOptions | None = None) -> Cluster:
    """Returns the trainers that a launcher or ``torchrun`` has started for a strategy, or this process alone."""
    return Cluster() if strategy.capabilities.standalone else Cluster.join(strategy.trainers, options=options)


def facts_of(
    sparse: SparseSpec, dense: DenseSpec, num_trainers: int, schedule: ScheduleOptions | None = None
) -> Facts:
    """Returns the facts that are known without data.

    Raises:
        ConfigError: the option of the dense optimizer is not an optimizer.
    """
    groups = [
        GroupFacts(
            name=group.spec.name,
            tables=tuple(table.name for table in group.spec.tables),
            dim=group.spec.dim,
            output_vectors=sum(len(o.features) for o in group.outputs if not o.whole),
            output_numbers=sum(o.segment.dim * len(o.features) for o in group.outputs if not o.whole),
            optimizer=max(group.spec.segments, key=lambda each: each.dim).optimizer.name,
        )
        for group in sparse.groups()
    ]
    return Facts(
        schema=sparse.schema,
        model=model_facts(dense.module, dense.optimizer, sparse.schema),
        groups=tuple(groups),
        num_trainers=num_trainers,
        seed=sparse.seed,
        device=dense.device.type,
        rows_on=sparse.store.device,
        global_batch_norm=dense.global_batch_norm,
        compile=dense.compile,
        clips=dense.clip_norm is not None,
        schedule=schedule or ScheduleOptions(),
        tables=() if sparse.store.is_tiered or sparse.store.on_gpu else tuple(_tables(sparse)),
    )


def _tables(sparse: SparseSpec) -> Iterator[TableFacts]:
    for group in sparse.groups():
        size = sum(row_bytes(row_layout(group.spec, 0, 1).description).values())
        for table in group.spec.tables:
            most = None if table.eviction is None else table.eviction.max_rows
            yield TableFacts(name=table.name, row_bytes=size, max_rows=most)


def decide(
    strategy: Strategy,
    facts: Facts,
    context: RunContext,
    *,
    train: Dataset | None = None,
    earlier: Plan | None = None,
    pinned: Plan | None = None,
) -> Plan:
    """Returns the plan of a run. All trainers call it together.

    Args:
        train: the training data, if known. Rank 0 measures its first batches if the strategy needs the profile.
        earlier: the plan of the resumed run. girih keeps it if it fits, and otherwise reuses only its measurements.
        pinned: the user's plan. If it names no hosts, trainers stay on their current hosts.

    Raises:
        ConfigError: see :func:`_check_pinned`; or the strategy does not support ``[schedule]``.
    """
    ranks, sparse = context.ranks, context.sparse
    hosts = ranks.hosts()
    free = ranks.broadcast(host_bytes() if ranks.first else None)
    facts = replace(facts, hosts=hosts, free_bytes=free if len(set(hosts)) <= 1 else None)
    if train is not None:
        facts = replace(facts, batch_size=train.batch_size)
    draft = strategy.plan(facts)
    if facts.schedule != ScheduleOptions() and not draft.asked:
        raise ConfigError(
            f"schedule: strategy {strategy.name!r} ignores it in its plan; make the plan with base_plan, or drop [schedule]"
        )
    if facts.schedule.micro_batches != 1 and "micro_batches" not in draft.schedule:
        raise ConfigError(
            f"schedule: micro_batches: strategy {strategy.name!r} plans a schedule without them; set micro_batches = 1"
        )
    if pinned is not None:
        _check_pinned(pinned, draft, strategy, sparse)
        return pinned if pinned.hosts or not draft.hosts else replace(pinned, hosts=draft.hosts)
    if earlier is not None and earlier.fits(draft) and _can_be_packed(sparse, earlier, draft):
        return _adapt_to_hosts(draft, earlier)
    required = facts_for_schedule(facts.schedule)
    if ranks.size > 1:
        required |= strategy.required_facts
    profile = None if earlier is None else earlier.measured.get("profile")
    if profile is None and train is not None and "profile" in required:
        counted = asdict(measure_access(train, sparse, ranks.size)) if ranks.first else None
        profile = ranks.broadcast(counted)
    cost = None
    if train is not None and "dense_cost" in required:
        cost = count_dense_cost(train, sparse, context.dense, facts, max(1, hosts.count(hosts[0])))
    facts = replace(
        facts,
        profile=None if profile is None else AccessProfile(**profile),
        dense_cost=cost,
    )
    return Plan.from_dict(ranks.broadcast(strategy.plan(facts).to_dict()))


def _check_pinned(pinned: Plan, draft: Plan, strategy: Strategy, sparse: SparseSpec) -> None:
    """Refuses a user's plan that does not fit the run.

    Raises:
        ConfigError: the plan is for another strategy, or for other options, processes or tables.
    """
    if not pinned.fits(draft):
        raise ConfigError(
            f"the plan is for strategy {pinned.strategy!r} with options {dict(pinned.options)}, processes"
            f" {dict(pinned.roles)} and schedule {dict(pinned.asked)}, but the run has {draft.strategy!r} with"
            f" {dict(draft.options)}, {dict(draft.roles)} and {dict(draft.asked)}; plan again with girih plan"
        )
    pinned.check_like(draft)
    if pinned.tagging is not None and not strategy.places_operators:
        raise ConfigError(
            f"plan: tagging: under strategy {strategy.name!r} all operators run on trainers; plan again with girih plan"
        )
    sparse.following(pinned).groups()  # groups() refuses an invalid packing


def _can_be_packed(sparse: SparseSpec, earlier: Plan, draft: Plan) -> bool:
    """Returns whether the groups of an earlier plan can hold the current tables. Optimizers may differ."""
    try:
        earlier.check_like(draft)
        sparse.following(earlier).groups()
    except ConfigError:
        return False
    return True


def _adapt_to_hosts(draft: Plan, plan: Plan) -> Plan:
    """Returns the plan with the hosts and the device of this run."""
    (device,) = {group["device"] for group in draft.groups} or {"cpu"}
    groups = tuple({**group, "device": device} for group in plan.groups)
    return (
        plan
        if (plan.hosts, plan.groups) == (draft.hosts, groups)
        else replace(plan, hosts=draft.hosts, groups=groups)
    )


SAMPLE_BATCHES = 4


def measure_access(data: Dataset, spec: SparseSpec, num_trainers: int) -> AccessProfile:
    """Measures the access profile on the first batches in file order, from their ids.

    Raises:
        DataError: a row is not valid.
    """
    groups = spec.groups()
    if not groups:  # only numeric features
        return AccessProfile(rows={}, rows_of_share={}, widths={})
    batches = data.select([feature.name for feature in spec.schema.sparse]).in_order()
    widths = {table.name: group.spec.dim for group in groups for table in group.spec.tables}
    keys, keys_of_share, ids = (dict.fromkeys(widths, 0) for _ in range(3))
    num_batches, num_ids = 0, 0
    for batch, _ in zip(batches, range(SAMPLE_BATCHES), strict=False):
        num_batches += 1
        num_ids += len(batch.ids)
        for table, num_keys, count in _counted(batch, groups):
            keys[table] += num_keys
            ids[table] += count
        for table, num_keys, _ in _counted(share_of(batch, 0, num_trainers), groups):
            keys_of_share[table] += num_keys
    rows, rows_of_share, ids_of_tables = (
        {table: count / max(1, num_batches) for table, count in sums.items()}
        for sums in (keys, keys_of_share, ids)
    )
    return AccessProfile(
        rows=rows,
        rows_of_share=rows_of_share,
        widths=widths,
        ids=num_ids / max(1, num_batches),
        ids_of_tables=ids_of_tables,
    )


def _counted(batch: Batch, groups: Sequence[Group]) -> Iterator[tuple[str, int, int]]:
    """Yields each table, with its unique keys and ids in a batch."""
    dedup, inverse = Dedup(Buffers()), np.empty(len(batch.ids), np.int32)
    for group in groups:
        unique_keys, tables = dedup.unique(ids_of(batch, group), inverse), group.spec.tables
        for number, table in enumerate(tables):
            of_table = unique_keys.tables == number
            yield table.name, int(of_table.sum()), int(unique_keys.counts[of_table].sum())


MOST_EXAMPLES = 4096
"""The most examples of a measured pass. The times of larger shares are extrapolated."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, and the file that it comes from."""

    calibration: Calibration
    file: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file of ``girih calibrate``.

        Raises:
            MissingFileError, ConfigError: see :meth:`Calibration.read`.
        """
        return cls(Calibration.read(path), str(path))


def measured(
    facts: Facts,
    calibration: Calibration,
    train: Dataset,
    sparse: SparseSpec,
    dense: DenseSpec,
    ranks: TrainerGroup,
) -> Facts:
    """Adds the facts that predict a speed: ids of the first batches, and a pass of the model on a trainer's share.

    Plans do not use these facts, because a measurement must not change what a run does.
    """
    trainers = facts.num_trainers
    profile = asdict(measure_access(train, sparse, trainers)) if ranks.first else None
    return replace(
        facts,
        batch_size=train.batch_size,
        profile=AccessProfile(**ranks.broadcast(profile)),
        dense_cost=measured_pass(train, sparse, dense, ranks, trainers),
        calibration=calibration,
        threads=torch.get_num_threads(),
    )


def measured_pass(
    train: Dataset, sparse: SparseSpec, dense: DenseSpec, ranks: TrainerGroup, trainers: int
) -> DenseCost | None:
    """Measures a pass of the model on one trainer's share, and a step of its optimizer.

    Uses torch's current number of threads. Returns None if there are too few examples, see :func:`measure_dense_cost`.
    """
    share = max(1, min(MOST_EXAMPLES, train.batch_size // trainers))
    cost = measure_dense_cost(train, sparse, dense, ranks, share)
    return None if cost is None else with_update(cost, dense, ranks)


@contextmanager
def threads_of(num_trainers: int, machines: int = 1) -> Iterator[None]:
    """Sets torch's threads to the share of one trainer, if ``num_trainers`` run on ``machines`` like this one.

    Restores the number afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, max(1, before * machines // num_trainers)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedNet:
    """The net of a run, placed on the devices of a group.

    Attributes:
        plan: the plan, with the tagging.
        facts: the facts, with the operators and their devices.
        tagged: the tagging, with its reasons.
    """

    plan: Plan
    facts: Facts
    graph: OperatorGraph
    tagged: Tagged


def place_net(
    plan: Plan, strategy: Strategy, facts: Facts, sparse: SparseSpec, dense: DenseSpec
) -> PlacedNet:
    """Tags the operators of a model with devices. If the plan has a tagging, only checks it.

    One trainer does this, since it depends on this machine's memory. Counts the optimizer's cost if ``facts`` lack it.

    Args:
        strategy: a strategy that ``places_operators``.

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
    """Makes the plan of a run. All trainers call its methods together.

    Attributes:
        pinned: the user's plan, if any.
        calibrated: the calibration to predict a speed from; None predicts no speed.
    """

    context: RunContext
    facts: Facts
    notes: Notes
    pinned: Plan | None
    calibrated: Calibrated | None
    _priced_by: Facts | None = None

    def plan(self, strategy: Strategy, train: Dataset | None, earlier: Plan | None) -> Plan:
        """Returns the plan to build from.

        Args:
            train: the training data, if known.
            earlier: the plan of the resumed run.

        Raises:
            ConfigError: see :func:`decide`.
        """
        sparse, dense, ranks = self.context.sparse, self.context.dense, self.context.ranks
        plan = decide(strategy, self.facts, self.context, train=train, earlier=earlier, pinned=self.pinned)
        facts = self.facts if train is None else replace(self.facts, batch_size=train.batch_size)
        calibrated = self.calibrated if train is not None and facts.device == "cpu" else None
        unmeasured = facts
        if calibrated is not None and train is not None:
            unmeasured = replace(facts, calibration=calibrated.calibration)
            facts = measured(facts, calibrated.calibration, train, sparse, dense, ranks)
        if strategy.places_operators:  # placement is decided before anything is measured
            plan, net = self._placed(plan, strategy, unmeasured)
            facts = replace(
                facts, graph=net.graph, tagging=net.tagging, wire=net.wire, memory_bytes=net.memory_bytes
            )
        self._priced_by = None if calibrated is None else facts
        return self.priced(plan, strategy)

    def priced(self, plan: Plan, strategy: Strategy) -> Plan:
        """Returns the plan with its predicted speed. The prediction uses measurements for this plan."""
        if self._priced_by is None or self.calibrated is None:
            return plan
        ranks, predicted = self.context.ranks, None
        if ranks.first:
            prediction = price(strategy, self._priced_by)
            file = {"from": self.calibrated.file}
            predicted = None if prediction is None else prediction.to_dict() | file
        speed = ranks.broadcast(predicted)
        return plan if speed is None else replace(plan, predicted={**plan.predicted, "speed": speed})

    def step_fold(
        self, plan: Plan, strategy: Strategy, train: Dataset, calibration: Calibration
    ) -> Fold | None:
        """Predicts, on rank 0, the parts of a step on these data on this machine. Returns None if this is impossible."""
        halves = self.context.sparse.following(plan), self.context.dense
        facts = measured(self.facts, calibration, train, *halves, self.context.ranks)
        if not self.context.ranks.first:
            return None
        if strategy.places_operators:
            facts = place_net(plan, strategy, facts, *halves).facts
        graph = strategy.step_graph(facts)
        return None if graph is None else fold(graph, calibration.cores)

    def _placed(self, plan: Plan, strategy: Strategy, facts: Facts) -> tuple[Plan, Facts]:
        """Adds a tagging to the plan on all trainers, and to rank 0's facts.

        Drops an earlier run's tagging if it does not fit.
        """
        if self.context.ranks.first:
            halves = self.context.sparse, self.context.dense
            try:
                placed = place_net(plan, strategy, facts, *halves)
            except ConfigError as error:
                if plan.tagging is None:
                    raise
                if self.pinned is not None:
                    raise ConfigError(f"the plan does not fit; plan again with girih plan: {error}") from None
                self.notes.log(
                    f"operators are tagged again: the earlier tagging of the run does not fit ({error})"
                )
                placed = place_net(replace(plan, tagging=None), strategy, facts, *halves)
            plan, facts = placed.plan, placed.facts
        return Plan.from_dict(self.context.ranks.broadcast(plan.to_dict())), facts
