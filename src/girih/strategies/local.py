"""``local``: one process. The reference that every other strategy is measured against.

| sparse half                  | schedule | dense half |
| ``LocalSparse``, fed by rows | in step  | ``Replica`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from girih.comm.context import RunContext
from girih.dense.halves.replica import Replica
from girih.dense.options import OptimizerFactory
from girih.sparse.halves.local import LocalSparse
from girih.sparse.spec import SparseSpec
from girih.training.feeds import ExampleFeed
from girih.training.schedules import Schedule, in_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Trains in this process, in step."""

    name: ClassVar[str] = "local"
    trainers: ClassVar[int] = 1
    lockstep: ClassVar[bool] = True
    together: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, int]] = {}
    feed: ClassVar[type[ExampleFeed]] = ExampleFeed
    schedule: ClassVar[Schedule] = staticmethod(in_step)

    def sparse_half(self, spec: SparseSpec, context: RunContext) -> LocalSparse:
        """All tables, here."""
        return LocalSparse.of(spec)

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, context: RunContext, **options: Any
    ) -> Replica:
        """The only copy."""
        return Replica(module, optimizer, **options)
