"""``hybrid``: embeddings asynchronous with bounded staleness, dense half synchronous (Persia, Algorithms 1 and 2).

| sparse half                      | schedule         | dense half            |
| ``RemoteSparse``, dispatched     | pipelined, ≤ τ   | ``AllReducedReplica`` |

Servers apply the gradients of all trainers of a step together, once: Persia's updating rule (§5, eq. 2), in which only
what was read is older. Equal to ``synchronous`` at τ = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from girih.comm.context import RunContext
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.options import OptimizerFactory
from girih.strategies.remote import RemoteStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid(RemoteStrategy):
    """Trains on several trainers in step, with tables in processes of their own; see ``RemoteStrategy``."""

    name: ClassVar[str] = "hybrid"
    lockstep: ClassVar[bool] = True
    together: ClassVar[bool] = True

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, context: RunContext, **options: Any
    ) -> AllReducedReplica:
        """This trainer's copy."""
        return AllReducedReplica(module, optimizer, ranks=context.ranks, **options)
