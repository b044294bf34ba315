"""``mesh``: asynchronous training as DES's baseline has it (DiFacto's mesh), a strategy of girih's user kind.

Each host reads its own examples and makes its own bags; only rows of other hosts, their gradients and parameters cross
links. Girih's ``asynchronous`` shares every batch among the trainers as all its strategies do, so that each loader decodes
all of it, and embedding workers serve the trainers by turns.
"""

from __future__ import annotations

from typing import Any, ClassVar

import girih
from girih.cluster.roles import RoleName
from girih.comm.registry import find
from girih.data import Dataset
from girih.planner.plan import Plan
from girih.services.loader import Loader
from girih.sparse.protocol import BatchCodec
from girih.strategies.asynchronous import Asynchronous
from girih.training.session import RunContext


class Mesh(Asynchronous):
    """``asynchronous`` of Parquet files that are dealt out to the trainers, with a loader and a worker for each.

    As many loaders and embedding workers as trainers.
    """

    name: ClassVar[str] = "mesh"

    def _start_workers(
        self, plan: Plan, context: RunContext, codec: BatchCodec, servers: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The one that is this trainer's."""
        started = Asynchronous._start_workers(self, plan, context, codec, servers)
        return (started[context.ranks.rank],)

    def _start_loaders(
        self, plan: Plan, context: RunContext, codec: BatchCodec, workers: tuple[str, ...], data: Dataset
    ) -> tuple[str, ...]:
        """Each reads every so-manieth file, in batches of one trainer."""
        processes, size = context.processes, context.ranks.size
        registry: Any = processes.registry

        def loader(index: int, address: str) -> Loader:
            worker = find(registry, RoleName.EMBEDDING_WORKER, index)
            if worker is None:
                raise LookupError(f"embedding-worker {index} is not registered")
            own = girih.read_parquet(
                data.addresses[index::size], data.schema, batch_size=data.batch_size // size
            )
            return Loader(
                data=own, codec=codec, index=index, trainers=(index,), num_trainers=1, workers=(worker.address,),
                address=address, secret=processes.secret, in_step=False,
            )  # fmt: skip

        return self._start(plan, context, RoleName.LOADER, size, loader)
