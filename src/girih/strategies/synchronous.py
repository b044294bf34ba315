"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                       | schedule | dense half             |
| ``CollectiveSparse``, fed by rows | in step  | ``AllReducedReplica`` |

Equal to ``local`` on the same batches, to the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from girih.planner import costs, traffic
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.strategies.strategy import Processes, StrategyOptions, base_plan, predicted_bytes, predicted_times

if TYPE_CHECKING:
    from girih.training.context import RunContext
    from girih.training.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous(StrategyOptions):
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts.
    """

    name: ClassVar[str] = "synchronous"
    trainers: Processes = 1

    def plan(self, facts: Facts) -> Plan:
        """Keys are hashed to trainers, whatever the data."""
        return base_plan(self, facts, predicted=predicted_of(facts))

    def build(self, plan: Plan, context: RunContext) -> Session:
        """This trainer's part of all tables, and its copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica
        from girih.sparse.halves.collective import CollectiveSparse
        from girih.training.feeds import ExampleFeed
        from girih.training.schedules import in_step
        from girih.training.session import Session

        dense = AllReducedReplica(context.dense, context.ranks)
        sparse = CollectiveSparse(context.sparse, context.ranks, context.stats)
        feed = ExampleFeed(context.ranks)
        return Session(sparse=sparse, dense=dense, schedule=in_step(), feed=feed, optimizer=dense.optimizer)


def predicted_of(facts: Facts) -> dict[str, Any]:
    """Bytes that a trainer sends per step of this strategy, and their time; empty where nothing was measured."""
    profile, parameters = facts.profile, facts.model.num_parameters
    if profile is None:
        return {}
    keys, numbers = profile.keys_of_share, profile.numbers_of_share
    sent = traffic.synchronous(facts.num_trainers, keys=keys, numbers=numbers, parameters=parameters)
    predicted = predicted_bytes(sent)
    if facts.links is not None:
        seconds = costs.synchronous_step(sent, facts.num_trainers, facts.links, num_groups=len(facts.groups))
        predicted |= predicted_times(seconds)
    return predicted
