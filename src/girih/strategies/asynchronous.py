"""``asynchronous``: no trainer waits for another trainer (the baseline of Persia's Table 2 and Figures 7 to 9).

| sparse half                      | schedule         | dense half               |
| ``RemoteSparse``, dispatched     | pipelined, ≤ τ   | ``ParameterServerReplica`` |

Faster than ``hybrid`` if trainers differ in speed. Less accurate, because dense gradients are of older parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from girih.errors import ConfigError
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.planner.steps import served
from girih.planner.steps.basis import Basis
from girih.planner.steps.graph import StepGraph
from girih.strategies.remote import PipelinedStrategy, address_of
from girih.strategies.strategy import deferred_if

if TYPE_CHECKING:
    from girih.training.session import RunContext, Session


class Asynchronous(PipelinedStrategy):
    """Trains on several trainers, with barriers only at evaluations and checkpoints.

    Each trainer's gradients are those of the mean loss over its own share of a batch. ``staleness`` also bounds the
    dense gradients that a trainer has in flight. The dense server is a thread of the first trainer, on its device.

    Examples:
        Start a program with this strategy with ``torchrun --nproc-per-node 2``.

        >>> import girih
        >>> strategy = girih.Asynchronous(trainers=2, staleness=8, embedding_servers=2)
        >>> {str(role): count for role, count in strategy.roles.items()}
        {'embedding-server': 2, 'embedding-worker': 1, 'loader': 1}
    """

    name: ClassVar[str] = "asynchronous"
    in_step: ClassVar[bool] = False

    def plan(self, facts: Facts) -> Plan:
        """Makes the plan. Keys are hashed to servers, regardless of the data.

        Raises:
            ConfigError: several trainers with ``global_batch_norm``, or more loaders than trainers.
        """
        if facts.global_batch_norm and facts.num_trainers > 1:
            raise ConfigError(
                "strategy 'asynchronous': trainers share no step, so batch norm sees only each trainer's own examples;"
                " drop train.global_batch_norm, or use 'hybrid'"
            )
        return super().plan(facts)

    def step_graph(self, facts: Facts) -> StepGraph | None:
        """Returns the work of a step with rows from servers and a dense server."""
        basis = Basis.of(facts, self.calibration_key)
        return (
            None
            if basis is None
            else served.asynchronous(basis, self._service(basis), staleness=self.staleness)
        )

    def build(self, plan: Plan, context: RunContext) -> Session:
        """Connects to the embedding workers, and copies the dense half."""
        from girih.dense.halves.parameter_server import ParameterServerReplica

        context.ranks.set_unsynchronized()
        processes = context.processes
        dense = ParameterServerReplica(
            deferred_if(context.dense.device.type == "cuda", context.dense),
            context.ranks,
            staleness=plan.schedule["staleness"],
            address=address_of(plan, processes, "trainer", 0),
            secret=processes.secret,
        )
        return self.pipelined(plan, context, dense)
