"""``local``: one process. The reference that every other strategy is measured against.

| sparse half                  | schedule | dense half |
| ``LocalSparse``, fed by rows | in step  | ``Replica`` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from girih.company import Company
from girih.dense.options import OptimizerFactory
from girih.dense.replica import Replica
from girih.feeds import Rows
from girih.schedules import Schedule, in_step
from girih.sparse.local import LocalSparse
from girih.sparse.spec import SparseSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Trains in this process, in step."""

    name: ClassVar[str] = "local"
    trainers: ClassVar[int] = 1
    lockstep: ClassVar[bool] = True
    together: ClassVar[bool] = True
    roles: ClassVar[Mapping[str, int]] = {}
    feed: ClassVar[type[Rows]] = Rows
    schedule: ClassVar[Schedule] = staticmethod(in_step)

    def sparse_half(self, spec: SparseSpec, company: Company) -> LocalSparse:
        """All tables, here."""
        return LocalSparse.of(spec)

    def dense_half(
        self, module: nn.Module, optimizer: OptimizerFactory, company: Company, **options: Any
    ) -> Replica:
        """The only copy."""
        return Replica(module, optimizer, **options)
