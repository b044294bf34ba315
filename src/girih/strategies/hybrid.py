"""``hybrid``: asynchronous embeddings with bounded staleness, synchronous dense half (Persia, Algorithms 1 and 2).

| sparse half                      | schedule         | dense half            |
| ``RemoteSparse``, dispatched     | pipelined, ≤ τ   | ``AllReducedReplica`` |

Servers apply the gradients of all trainers together, once per step. This is Persia's updating rule (§5, eq. 2): only
the rows that were read are older. Equal to ``synchronous`` at τ = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps import served
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
from girih.strategies.remote import PipelinedStrategy
from girih.strategies.strategy import deferred_if

if TYPE_CHECKING:
    from girih.training.session import RunContext, Session


class Hybrid(PipelinedStrategy):
    """Trains on several trainers in step, with tables in separate processes.

    Examples:
        Start a program with this strategy with ``torchrun --nproc-per-node 2``.

        >>> import girih
        >>> strategy = girih.Hybrid(trainers=2, staleness=4, wire_gradients="float16")
        >>> {str(role): count for role, count in strategy.roles.items()}
        {'embedding-server': 1, 'embedding-worker': 1, 'loader': 1}
    """

    name: ClassVar[str] = "hybrid"
    in_step: ClassVar[bool] = True

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step with rows from servers and an AllReduce."""
        basis = Basis.of(facts, self.calibration_key)
        return None if basis is None else served.hybrid(basis, self._service(basis), staleness=self.staleness)

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Connects to the embedding workers, and copies the dense half."""
        from girih.dense.halves.allreduced import AllReducedReplica

        return self.pipelined(
            plan,
            context,
            AllReducedReplica(deferred_if(context.dense.device.type == "cuda", context.dense), context.ranks),
        )
