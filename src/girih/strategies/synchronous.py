"""``synchronous``: model parallel embeddings, data parallel dense half, all in step (PICASSO §III-A).

| sparse half                       | schedule | dense half             |
| ``CollectiveSparse``, fed by rows | in step  | ``AllReducedReplica`` |

Equal to ``local`` on the same batches, to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from girih.comm.context import RunContext
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.options import OptimizerFactory
from girih.sparse.halves.collective import CollectiveSparse
from girih.sparse.spec import SparseSpec
from girih.strategies.counts import check_counts
from girih.training.feeds import ExampleFeed
from girih.training.schedules import Schedule, in_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """Trains on several trainers, each with a part of all tables.

    Attributes:
        trainers: processes; under ``torchrun`` as many as it starts.
    """

    name: ClassVar[str] = "synchronous"
    lockstep: ClassVar[bool] = True
    together: ClassVar[bool] = True
    trainers: int = 1
    roles: ClassVar[Mapping[str, int]] = {}
    feed: ClassVar[type[ExampleFeed]] = ExampleFeed
    schedule: ClassVar[Schedule] = staticmethod(in_step)

    def __post_init__(self) -> None:
        check_counts(self, ("trainers",))

    def sparse_half(self, spec: SparseSpec, context: RunContext) -> CollectiveSparse:
        """This trainer's part of all tables."""
        return CollectiveSparse(spec, context.ranks)

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, context: RunContext, **options: Any
    ) -> AllReducedReplica:
        """This trainer's copy."""
        return AllReducedReplica(module, optimizer, ranks=context.ranks, **options)
