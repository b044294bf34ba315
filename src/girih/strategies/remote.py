"""The common part of strategies whose tables are in embedding servers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from girih.cluster.roles import RoleName
from girih.planner import traffic
from girih.planner.facts import Facts
from girih.planner.plan import Plan
from girih.strategies.strategy import base_plan, check_choices, check_counts, predicted_bytes

if TYPE_CHECKING:
    from girih.data import Dataset
    from girih.sparse.halves.remote import RemoteSparse
    from girih.sparse.service.codec import Codec
    from girih.sparse.spec import SparseSpec
    from girih.training.context import RunContext
    from girih.training.feeds import LoaderFeed

SERVER, WORKER, LOADER = RoleName.EMBEDDING_SERVER, RoleName.EMBEDDING_WORKER, RoleName.LOADER


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteStrategy:
    """Tables in processes of their own.

    Attributes:
        staleness: τ, the most batches of a trainer that are read but not yet applied when a batch is read.
        trainers, embedding_workers, embedding_servers, loaders: processes; trainers under ``torchrun`` as many
            as it starts.
        transport: between processes: "shared" memory, or "tcp".
        compress_ids: ids travel as unique ids with the examples they are in, without loss (Persia §4.2.3).
        wire_embeddings, wire_gradients: "float16" halves what goes between embedding workers and trainers, with
            a loss of up to 2⁻¹² of the largest number of each vector (Persia §4.2.3).
    """

    name: ClassVar[str]
    staleness: int = 4
    trainers: int = 1
    embedding_workers: int = 1
    embedding_servers: int = 1
    loaders: int = 1
    transport: Literal["shared", "tcp"] = "shared"
    compress_ids: bool = False
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        check_counts(self, ("trainers", "embedding_workers", "embedding_servers", "loaders"))
        check_counts(self, ("staleness",), least=0)
        precisions = ("float32", "float16")
        check_choices(
            self,
            {
                "transport": ("shared", "tcp"),
                "wire_embeddings": precisions,
                "wire_gradients": precisions,
                "compress_ids": (True, False),
            },
        )

    @property
    def roles(self) -> Mapping[str, int]:
        """Processes beside the trainers."""
        return {SERVER: self.embedding_servers, WORKER: self.embedding_workers, LOADER: self.loaders}

    def remote_plan(self, facts: Facts, *, in_step: bool) -> Plan:
        """The part of the plan that does not depend on the dense half."""
        decided: dict[str, Any] = {
            "schedule": {"name": "pipelined", "staleness": self.staleness},
            "feed": {"name": "loader", "loaders": min(self.loaders, facts.num_trainers)},
            "wire": {
                "transport": self.transport,
                "compress_ids": self.compress_ids,
                "embeddings": self.wire_embeddings,
                "gradients": self.wire_gradients,
            },
        }
        profile = facts.profile
        if profile is not None and facts.batch_size is not None:
            share, keys = facts.batch_size / facts.num_trainers, profile.rows_of_share
            sent = traffic.remote(
                facts.num_trainers,
                ids=profile.ids / facts.num_trainers,
                keys=sum(keys.values()),
                numbers=sum(count * profile.widths[name] for name, count in keys.items()),
                outputs=share * sum(group.output_numbers for group in facts.groups),
                parameters=facts.model.num_parameters,
                in_step=in_step,
            )
            decided["predicted"] = predicted_bytes(sent)
        return base_plan(self, facts, **decided)  # type: ignore[arg-type]

    def address(self, host: str) -> str:
        """The address at which a process of a host is to listen; see :func:`girih.comm.rpc.listen`."""
        return "shm://" if self.transport == "shared" else f"tcp://{host}:*"

    def remote_halves(
        self, plan: Plan, context: RunContext, *, num_contributors: int
    ) -> tuple[RemoteSparse, LoaderFeed]:
        """Starts servers and workers; returns the way to them, and the feed.

        Args:
            num_contributors: trainers whose gradients of a step are applied as one.
        """
        from girih.sparse.halves.remote import RemoteSparse
        from girih.sparse.service.codec import Codec
        from girih.training.feeds import LoaderFeed

        processes = context.processes
        codec = Codec.of(
            context.sparse.schema,
            context.sparse.needs,
            compress_ids=self.compress_ids,
            half_embeddings=self.wire_embeddings == "float16",
            half_gradients=self.wire_gradients == "float16",
        )
        servers = self._start_servers(plan, context, num_contributors)
        workers = self._start_workers(plan, context, codec, servers)
        sparse = RemoteSparse(
            context.sparse,
            codec,
            context.ranks,
            workers=workers,
            servers=servers,
            secret=processes.secret,
            registry=processes.registry,
            stats=context.stats,
        )
        feed = LoaderFeed(
            context.ranks,
            lambda data: self._start_loaders(plan, context, codec, workers, data),
            lambda: processes.end(LOADER),
            processes.secret,
            processes.registry,
        )
        return sparse, feed

    def _start_servers(self, plan: Plan, context: RunContext, num_contributors: int) -> Sequence[str]:
        from girih.sparse.service.embedding_server import EmbeddingServer

        processes, count = context.processes, plan.roles[SERVER]
        spec = _spec_of_servers(context.sparse, count)
        return processes.start(
            SERVER,
            lambda: [
                EmbeddingServer(
                    spec,
                    index,
                    count,
                    num_contributors,
                    self.address(processes.host(SERVER, index)),
                    processes.secret,
                    processes.segment,
                )
                for index in range(count)
            ],
        )

    def _start_workers(
        self, plan: Plan, context: RunContext, codec: Codec, servers: Sequence[str]
    ) -> Sequence[str]:
        from girih.sparse.service.embedding_worker import EmbeddingWorker

        processes = context.processes
        spec = _spec_of_servers(context.sparse, len(servers))
        return processes.start(
            WORKER,
            lambda: [
                EmbeddingWorker(
                    spec,
                    codec,
                    index,
                    tuple(servers),
                    spec.store.shards or 1,
                    self.address(processes.host(WORKER, index)),
                    processes.secret,
                    processes.registry,
                )
                for index in range(plan.roles[WORKER])
            ],
        )

    def _start_loaders(
        self, plan: Plan, context: RunContext, codec: Codec, workers: Sequence[str], data: Dataset
    ) -> Sequence[str]:
        from girih.cluster.loader import Loader

        processes, size = context.processes, context.ranks.size
        count = plan.feed["loaders"]
        return processes.start(
            LOADER,
            lambda: [
                Loader(
                    data,
                    codec,
                    index,
                    tuple(range(index, size, count)),
                    size,
                    tuple(workers),
                    self.address(processes.host(LOADER, index)),
                    processes.secret,
                    processes.registry,
                )
                for index in range(count)
            ],
        )


def _spec_of_servers(spec: SparseSpec, num_servers: int) -> SparseSpec:
    """As many shards as a server has cores, if all are on this machine, unless it is said."""
    spec = replace(spec, threads=max(1, (os.cpu_count() or 1) // num_servers))
    return replace(spec, store=spec.resolved_store())
