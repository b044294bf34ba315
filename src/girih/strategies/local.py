"""``local``: one process. The reference that every other strategy is measured against.

| sparse half                  | schedule | dense half |
| ``LocalSparse``, fed by rows | in step  | ``Replica`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.speed.in_step import local
from girih.planner.speed.step import Basis, StepCost
from girih.planner.traffic import Traffic
from girih.strategies.strategy import StrategyOptions, ahead_of, base_plan, predicted_bytes, steps_of

if TYPE_CHECKING:
    from girih.training.session import RunContext, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(StrategyOptions):
    """Trains in this process, in step."""

    name: ClassVar[str] = "local"
    misplaced_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("trainers", "loaders", "embedding_workers", "embedding_servers"),
        "local trains in one process; take a strategy of several, as --strategy synchronous (girih.Synchronous)",
    )
    trainers: ClassVar[int] = 1
    alone: ClassVar[bool] = True
    cuts_from: ClassVar[tuple[str, ...]] = ("embedding", "mlp")
    prefetches: ClassVar[bool] = True
    keeps_rows_on_gpu: ClassVar[bool] = True

    def plan(self, facts: Facts) -> Plan:
        """One trainer has everything.

        Raises:
            ConfigError: several trainers were started.
        """
        if facts.num_trainers > 1:
            raise ConfigError(
                f"strategy 'local' is one process, but {facts.num_trainers} trainers were started; use 'synchronous'"
            )
        return base_plan(self, facts, roles={"trainer": 1}, predicted=predicted_bytes(Traffic()))

    @classmethod
    def with_trainers(cls, count: int) -> tuple[Local, ...]:
        """One process, however many there might be."""
        return (cls(),)

    def step_cost(self, facts: Facts) -> StepCost | None:
        """A step as the cost model has it; None where facts do not say enough."""
        basis = Basis.of(facts)
        return None if basis is None else local(basis)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """All tables and the only copy of the dense half, here."""
        from girih.dense.halves.deferred import DeferredReplica
        from girih.dense.halves.replica import Replica
        from girih.sparse.halves.local import LocalSparse
        from girih.training.feeds import ExampleFeed
        from girih.training.schedules import in_step
        from girih.training.session import Session

        devices = {group["name"]: group["device"] for group in plan.groups}
        sparse = LocalSparse(context.sparse, devices=devices, **ahead_of(plan))
        # under "skip", the number of the next update depends on what came of this one
        late = context.dense.on_nonfinite == "stop" and sparse.is_on_gpu_of(context.dense.device)
        dense = DeferredReplica(context.dense) if late else Replica(context.dense)
        feed, schedule = ExampleFeed(context.ranks), in_step(**steps_of(plan), deferred=late)
        return Session(sparse=sparse, dense=dense, schedule=schedule, feed=feed, optimizer=dense.optimizer)
