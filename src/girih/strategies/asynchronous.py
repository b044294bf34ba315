"""``asynchronous``: no trainer waits for another (the baseline of Persia's Table 2 and Figures 7 to 9).

| sparse half                      | schedule         | dense half        |
| ``RemoteSparse``, dispatched     | pipelined, ≤ τ   | ``ParameterServerReplica`` |

Faster than ``hybrid`` where trainers differ in speed, and worse: dense gradients are of old parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from girih.comm.context import RunContext
from girih.dense.halves.parameter_server import ParameterServerReplica
from girih.dense.options import OptimizerFactory
from girih.strategies.remote import RemoteStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asynchronous(RemoteStrategy):
    """Trains on several trainers without any barrier but at evaluations and checkpoints; see ``RemoteStrategy``.

    ``staleness`` bounds each trainer's dense gradients under way as well. The dense server is a thread of the
    first trainer.
    """

    name: ClassVar[str] = "asynchronous"
    lockstep: ClassVar[bool] = False
    together: ClassVar[bool] = False

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, context: RunContext, **options: Any
    ) -> ParameterServerReplica:
        """This trainer's copy."""
        address = self.address(context.host)
        return ParameterServerReplica(
            module, optimizer, context=context, staleness=self.staleness, address=address, **options
        )
