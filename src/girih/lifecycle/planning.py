"""From facts to a plan: what is counted in the first batches, and which plan holds. No decision rests on a clock."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
from torch import nn

from girih.cluster.cluster import Cluster
from girih.cluster.options import ClusterOptions
from girih.config.train import ScheduleOptions
from girih.data import Dataset
from girih.data.batch import Batch, share_of
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import made_by
from girih.dense.options import OptimizerFactory
from girih.errors import ConfigError
from girih.kernels.buffers import Buffers
from girih.lifecycle.dense_cost import count_dense_cost, host_bytes
from girih.models.operators import operators_of
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import AccessProfile, Facts, GroupFacts, ModelFacts, OperatorFacts, TableFacts
from girih.planner.plan import Plan
from girih.planner.traffic import FLOAT_BYTES
from girih.schema import Schema
from girih.sparse.groups.group import ids_of
from girih.sparse.groups.pack import Group
from girih.sparse.groups.shards import Dedup
from girih.sparse.spec import SparseSpec
from girih.store.accounting import row_bytes
from girih.store.rows.record import row_layout
from girih.strategies.strategy import Strategy, facts_for_schedule
from girih.training.session import RunContext


def model_facts(module: nn.Module, optimizer: OptimizerFactory, schema: Schema) -> ModelFacts:
    """Parameters, substitutable operators and optimizer of a model.

    Raises:
        ConfigError: ``optimizer`` makes no optimizer.
    """
    operators = list(operators_of(module))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    spread = {  # those that go with features
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
    """Numbers of the last bucket that torch's DistributedDataParallel fills, from the parameters declared last to the first."""
    filled = 0
    for number, parameter in enumerate(reversed(parameters), start=1):
        filled += parameter.numel()
        if FLOAT_BYTES * filled >= BUCKET_BYTES and number < len(parameters):
            filled = 0
    return filled


def joined(strategy: Strategy, options: ClusterOptions | None = None) -> Cluster:
    """The trainers that a launcher, or ``torchrun``, has started for a strategy; or this one alone."""
    return Cluster() if strategy.capabilities.standalone else Cluster.join(strategy.trainers, options=options)


def facts_of(
    sparse: SparseSpec, dense: DenseSpec, num_trainers: int, schedule: ScheduleOptions | None = None
) -> Facts:
    """Facts that are known without data.

    Raises:
        ConfigError: the dense optimizer is none.
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
        train: the training data, where it is known. Rank 0 measures its first batches if the strategy wants them.
        earlier: the plan of the run that is resumed. It holds where it fits, else its measurements are used again.
        pinned: the plan of the user; where it names no hosts, trainers are where they are.

    Raises:
        ConfigError: see :func:`_check_pinned`; or the strategy plans without ``[schedule]``.
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
            f"schedule: strategy {strategy.name!r} plans without it; have its plan made by base_plan, or drop [schedule]"
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
    """Refuses a plan of the user that does not fit the run.

    Raises:
        ConfigError: it is of another strategy, or of other options, processes or tables.
    """
    if not pinned.fits(draft):
        raise ConfigError(
            f"the plan is of strategy {pinned.strategy!r} with options {dict(pinned.options)}, processes"
            f" {dict(pinned.roles)} and schedule {dict(pinned.asked)}, the run of {draft.strategy!r} with"
            f" {dict(draft.options)}, {dict(draft.roles)} and {dict(draft.asked)}; plan again with girih plan"
        )
    pinned.check_like(draft)
    if pinned.tagging is not None and not strategy.places_operators:
        raise ConfigError(
            f"plan: tagging: under strategy {strategy.name!r} all operators run on trainers; plan again with girih plan"
        )
    sparse.following(pinned).groups()  # which refuses what is no packing


def _can_be_packed(sparse: SparseSpec, earlier: Plan, draft: Plan) -> bool:
    """Returns whether the groups of an earlier plan can hold the current tables. Optimizers may have changed."""
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
    """Reads the first batches in file order, ids alone.

    Raises:
        DataError: a bad row.
    """
    groups = spec.groups()
    if not groups:  # numeric features alone
        return AccessProfile(rows={}, rows_of_share={}, widths={})
    batches = data.select([feature.name for feature in spec.schema.sparse]).in_order()
    whole, share = _Counts(groups), _Counts(groups)
    num_batches, num_ids = 0, 0
    for batch, _ in zip(batches, range(SAMPLE_BATCHES), strict=False):
        num_batches += 1
        num_ids += len(batch.ids)
        whole.add(batch)
        share.add(share_of(batch, 0, num_trainers))
    widths = {table.name: group.spec.dim for group in groups for table in group.spec.tables}
    return AccessProfile(
        rows=whole.means("keys", num_batches),
        rows_of_share=share.means("keys", num_batches),
        widths=widths,
        ids=num_ids / max(1, num_batches),
        ids_of_tables=whole.means("ids", num_batches),
    )


class _Counts:
    """Unique keys and ids of each table, summed over batches."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._dedup = Dedup(Buffers())
        self._groups = list(groups)
        sizes = [len(group.spec.tables) for group in self._groups]
        self._sums = {kind: [np.zeros(size, np.int64) for size in sizes] for kind in ("keys", "ids")}

    def add(self, batch: Batch) -> None:
        """Adds those of a batch."""
        inverse = np.empty(len(batch.ids), np.int32)
        for group, keys, ids in zip(self._groups, self._sums["keys"], self._sums["ids"], strict=True):
            unique_keys = self._dedup.unique(ids_of(batch, group), inverse)
            np.add.at(keys, unique_keys.tables, 1)
            np.add.at(ids, unique_keys.tables, unique_keys.counts)

    def means(self, kind: str, num_batches: int) -> dict[str, float]:
        """Table → how many it had in a batch."""
        return {
            table.name: count / max(1, num_batches)
            for group, sums in zip(self._groups, self._sums[kind], strict=True)
            for table, count in zip(group.spec.tables, sums.tolist(), strict=True)
        }
