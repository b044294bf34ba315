"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                       | schedule | dense half             |
| ``CollectiveSparse``, fed by rows | in step  | ``AllReducedReplica`` |

Equal to ``local`` on the same batches, to the order of sums; near it where rows travel as float16.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from girih.planner import costs, traffic
from girih.planner.facts import Facts
from girih.planner.interleaving import arrange
from girih.planner.micro_batches import micro_batches
from girih.planner.plan import Plan
from girih.strategies.strategy import (
    TRAINER,
    Processes,
    StrategyOptions,
    ahead_of,
    base_plan,
    predicted_bytes,
    predicted_times,
    steps_of,
)

if TYPE_CHECKING:
    from girih.training.context import RunContext
    from girih.training.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous(StrategyOptions):
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts.
        wire_embeddings, wire_gradients: "float16" nearly halves the rows, and gradients of rows, that go between trainers,
            with a loss of up to 2⁻¹² of the largest number of each row (PICASSO §V).
    """

    name: ClassVar[str] = "synchronous"
    interleaves: ClassVar[bool] = True
    cuts_from: ClassVar[tuple[str, ...]] = ("embedding", "mlp")
    prefetches: ClassVar[bool] = True
    trainers: Processes = 1
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    def plan(self, facts: Facts) -> Plan:
        """Keys are hashed to trainers, whatever the data."""
        wire = {"embeddings": self.wire_embeddings, "gradients": self.wire_gradients}
        half_of = [kind for kind, dtype in wire.items() if dtype == "float16"]
        return base_plan(self, facts, wire=wire, predicted=predicted_of(facts, half_of))

    def build(self, plan: Plan, context: RunContext) -> Session:
        """This trainer's part of all tables, and its copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica
        from girih.sparse.halves.collective import CollectiveSparse
        from girih.training.feeds import ExampleFeed
        from girih.training.schedules import in_step
        from girih.training.session import Session

        dense = AllReducedReplica(context.dense, context.ranks)
        sparse = CollectiveSparse(
            context.sparse,
            context.ranks,
            context.stats,
            hosts=plan.hosts_of(TRAINER),
            float16_embeddings=plan.wire["embeddings"] == "float16",
            float16_gradients=plan.wire["gradients"] == "float16",
            interleaving=plan.schedule.get("interleaving", ()),
            excluded=plan.schedule.get("excluded", ()),
            **ahead_of(plan),
        )
        feed, schedule = ExampleFeed(context.ranks), in_step(**steps_of(plan))
        return Session(sparse=sparse, dense=dense, schedule=schedule, feed=feed, optimizer=dense.optimizer)


def predicted_of(facts: Facts, half_of: Collection[str] = ()) -> dict[str, Any]:
    """Bytes that a trainer sends per step of this strategy, and their time; empty where nothing was measured.

    Args:
        half_of: "embeddings", "gradients": what travels as float16.
    """
    profile, parameters = facts.profile, facts.model.num_parameters
    if profile is None:
        return {}
    sent = traffic.synchronous(
        facts.num_trainers,
        keys=profile.keys_of_share,
        numbers=profile.numbers_of_share,
        parameters=parameters,
        half_of=half_of,
    )
    predicted = predicted_bytes(sent)
    if facts.links is not None:
        arranged = arrange(facts)
        cut = facts.schedule.micro_batches_from == "embedding"
        seconds = costs.synchronous_step(
            sent,
            facts.num_trainers,
            facts.links,
            num_sets=len(arranged.interleaving) + bool(arranged.excluded),
            micro_batches=micro_batches(facts)[0] if cut else 1,
        )
        predicted |= predicted_times(seconds)
    return predicted
