"""``local``: one process. The reference for all other strategies.

| sparse half                  | schedule | dense half |
| ``LocalSparse``, fed by rows | in step  | ``Replica`` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
from girih.planner.steps.in_step import local
from girih.planner.traffic import Traffic
from girih.strategies.strategy import (
    Capabilities,
    StrategyOptions,
    base_plan,
    deferred_if,
    half_options,
    in_step_session,
    predicted_traffic,
)

if TYPE_CHECKING:
    from girih.training.session import RunContext, Session


class Local(StrategyOptions):
    """Trains in this process, in step.

    Examples:
        >>> import girih
        >>> strategy = girih.Local()
        >>> strategy.name, strategy.trainers, dict(strategy.roles)
        ('local', 1, {})
    """

    name: ClassVar[str] = "local"
    capabilities: ClassVar[Capabilities] = Capabilities(
        standalone=True, micro_batch_layers=("embedding", "mlp"), prefetching=True, rows_on_gpu=True
    )

    def plan(self, facts: Facts) -> Plan:
        """Makes the plan: one trainer has all tables and the dense half.

        Raises:
            ConfigError: several trainers were started.
        """
        if facts.num_trainers > 1:
            raise ConfigError(
                f"strategy 'local' is one process, but {facts.num_trainers} trainers were started; use 'synchronous'"
            )
        return base_plan(self, facts, predicted=predicted_traffic(Traffic(), None))

    @classmethod
    def with_trainers(cls, count: int) -> tuple[Local, ...]:
        """Returns this strategy, which always has one process."""
        return (cls(),)

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step in one process."""
        basis = Basis.of(facts, self.calibration_key)
        return None if basis is None else local(basis)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Builds all tables and the only copy of the dense half in this process."""
        from girih.dense.halves.replica import Replica
        from girih.sparse.halves.local import LocalSparse
        from girih.training.feeds import ExampleFeed

        devices = {group["name"]: group["device"] for group in plan.groups}
        sparse = LocalSparse(context.sparse, devices=devices, **half_options(plan))
        dense = Replica(deferred_if(sparse.is_on_gpu_of(context.dense.device), context.dense))
        return in_step_session(plan, sparse, dense, ExampleFeed(context.ranks))
