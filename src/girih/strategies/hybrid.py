"""``hybrid``: embeddings asynchronous with bounded staleness, dense half synchronous (Persia, Algorithms 1 and 2).

| sparse half                      | schedule         | dense half            |
| ``RemoteSparse``, dispatched     | pipelined, ≤ τ   | ``AllReducedReplica`` |

Servers apply the gradients of all trainers of a step together, once: Persia's updating rule (§5, eq. 2), in which only
what was read is older. Equal to ``synchronous`` at τ = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from girih.planner.plan import Plan
from girih.strategies.remote import PipelinedStrategy

if TYPE_CHECKING:
    from girih.training.context import RunContext
    from girih.training.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(PipelinedStrategy):
    """Trains on several trainers in step, with tables in processes of their own; see ``PipelinedStrategy``."""

    name: ClassVar[str] = "hybrid"
    in_step: ClassVar[bool] = True

    def build(self, plan: Plan, context: RunContext) -> Session:
        """The way to the embedding workers, and this trainer's copy of the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica

        dense = AllReducedReplica(context.dense, context.ranks)
        return self.pipelined(plan, context, dense)
