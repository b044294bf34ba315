"""``local``: one process. The reference that every other strategy is measured against.

| sparse half                  | schedule | dense half |
| ``LocalSparse``, fed by rows | in step  | ``Replica`` |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from girih.dense.replica import Replica
from girih.schedules import Schedule, in_step
from girih.sparse.local import LocalSparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Trains in this process, in step."""

    name: ClassVar[str] = "local"
    sparse: ClassVar[type[LocalSparse]] = LocalSparse
    dense: ClassVar[type[Replica]] = Replica
    schedule: ClassVar[Schedule] = staticmethod(in_step)
