"""The common part of strategies with tables in embedding servers."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from girih.cluster.roles import FAIL, RESTART, FailurePolicy, RestartPolicy, RoleName
from girih.comm.registry.remote import CONNECTED_S, RETURN_S
from girih.config.bounds import Bounds
from girih.errors import ConfigError
from girih.planner import costs, traffic
from girih.planner.calibration import Links
from girih.planner.facts import AccessProfile, Facts
from girih.planner.plan import Plan
from girih.planner.steps.basis import Basis
from girih.planner.steps.served import RowService
from girih.strategies.strategy import (
    Capabilities,
    Processes,
    StrategyOptions,
    base_plan,
    predicted_traffic,
)

if TYPE_CHECKING:
    from girih.cluster.cluster import Cluster
    from girih.comm.service import Service
    from girih.data import Dataset
    from girih.dense.half import DenseHalf
    from girih.sparse.halves.remote import RemoteSparse
    from girih.sparse.options import StoreOptions
    from girih.sparse.protocol import BatchCodec
    from girih.sparse.spec import SparseSpec
    from girih.training.feeds import LoaderFeed
    from girih.training.schedules import Schedule
    from girih.training.session import RunContext, Session


SERVER, WORKER, LOADER = RoleName.EMBEDDING_SERVER, RoleName.EMBEDDING_WORKER, RoleName.LOADER
COUNT_OPTIONS: Mapping[str, str] = {
    SERVER: "embedding_servers",
    WORKER: "embedding_workers",
    LOADER: "loaders",
}
"""Role → the option with its number of processes."""


class RemoteStrategy(StrategyOptions):
    """Trains with tables in separate processes.

    Attributes:
        in_step: True if all trainers do each step together. Then servers apply the gradients of a step as one update, and
            loaders read for all trainers at once. Not an option.
        waits_for_dense: True if a step waits for dense parameters or gradients to travel. Not an option.
        embedding_workers: number of processes that pool rows for trainers.
        embedding_servers: number of processes that keep rows.
        loaders: number of processes that read data, at most one per trainer.
        transport: transport between processes: "shared" (shared memory, on one host only), or "tcp".
        compress_ids: sends each unique id once, with the examples that contain it, without loss (Persia §4.2.3).
        wire_embeddings: "float16" halves the bytes of embeddings from embedding workers to trainers. The loss is at most
            2⁻¹² of the largest number of each vector (Persia §4.2.3).
        wire_gradients: the same for gradients from trainers to embedding workers.
    """

    in_step: ClassVar[bool]
    capabilities: ClassVar[Capabilities] = Capabilities(
        micro_batch_layers=("mlp",),
        prefetching=True,
        scalable_roles=COUNT_OPTIONS,
        scales_in_place=True,
        surviving_roles=(SERVER,),
    )
    waits_for_dense: ClassVar[bool] = True
    embedding_workers: Processes = 1
    embedding_servers: Processes = 1
    loaders: Processes = 1
    transport: Literal["shared", "tcp"] = "shared"
    compress_ids: bool = False
    wire_embeddings: Literal["float32", "float16"] = "float32"
    wire_gradients: Literal["float32", "float16"] = "float32"

    @property
    def roles(self) -> Mapping[str, int]:
        """Number of processes besides the trainers, by role: those of the sparse half and the feed."""
        return {SERVER: self.embedding_servers, WORKER: self.embedding_workers, LOADER: self.loaders}

    @property
    def one_host_option(self) -> str:
        """The option that keeps all processes on one host, for errors: shared memory needs one host."""
        return "strategy: transport = 'shared'" if self.transport == "shared" else ""

    def failure_policy(self, role: str, store: StoreOptions, num_trainers: int) -> FailurePolicy:
        """Returns the policy for a killed process of this role: loaders restart, and for other roles the run ends.

        A new loader needs no state, because each trainer's share of a batch depends only on the position in the data.
        """
        return RESTART if role == LOADER else FAIL

    def plan(self, facts: Facts) -> Plan:
        """Makes the plan. Keys are hashed to servers, regardless of the data.

        Raises:
            ConfigError: there are more loaders than trainers.
        """
        if self.loaders > facts.num_trainers:
            raise ConfigError(
                f"strategy: loaders = {self.loaders}: expected at most one per trainer, {facts.num_trainers} in all"
            )
        predicted: dict[str, Any] = {}
        if facts.profile is not None and facts.batch_size is not None:
            sent = self._traffic(facts, facts.profile, facts.batch_size)
            links = facts.links
            seconds = None if links is None else self._seconds(sent, facts.num_trainers, links)
            predicted = predicted_traffic(sent, seconds)
        return base_plan(
            self,
            facts,
            schedule=self._planned_schedule(),
            feed={"name": "loader", "loaders": self.loaders},
            wire=self._wire,
            predicted=predicted,
        )

    @property
    def _wire(self) -> dict[str, object]:
        return {
            "transport": self.transport,
            "compress_ids": self.compress_ids,
            "embeddings": self.wire_embeddings,
            "gradients": self.wire_gradients,
        }

    def _traffic(self, facts: Facts, profile: AccessProfile, batch_size: int) -> traffic.Traffic:
        share = batch_size / facts.num_trainers
        sent = traffic.remote(
            facts.num_trainers,
            ids=profile.ids / facts.num_trainers,
            keys=profile.keys_of_share,
            numbers=profile.numbers_of_share,
            vectors=share * sum(group.output_vectors for group in facts.groups),
            outputs=share * sum(group.output_numbers for group in facts.groups),
            parameters=facts.model.num_parameters,
            in_step=self.in_step,
            wire=self._wire,
        )
        return replace(sent, dense=self._dense_bytes(facts, sent.dense))

    def _seconds(self, sent: traffic.Traffic, num_trainers: int, links: Links) -> Mapping[str, float]:
        waited = sent if self.waits_for_dense else replace(sent, dense=0.0)
        return costs.remote_step(waited, num_trainers, links, transport=self.transport, in_step=self.in_step)

    def _service(self, basis: Basis) -> RowService:
        """Returns the processes that serve rows, for the step graph."""
        return RowService(
            workers=self.embedding_workers,
            servers=self.embedding_servers,
            loaders=self.loaders,
            link=basis.calibration.links[self.transport],
            sent=self._traffic(basis.facts, basis.profile, basis.batch_size),
        )

    def session(
        self,
        plan: Plan,
        context: RunContext,
        dense: DenseHalf,
        schedule: Schedule,
    ) -> Session:
        """Starts servers and workers, and joins them with a dense half and a schedule.

        With a GPU, threads fetch rows and send gradients.
        """
        from girih.sparse.halves.remote import RemoteSparse
        from girih.sparse.halves.staging import Staging
        from girih.sparse.protocol import BatchCodec
        from girih.training.session import Session

        processes, device = context.processes, context.dense.device
        codec = BatchCodec.of(
            context.sparse.schema,
            context.sparse.needs,
            compress_ids=plan.wire["compress_ids"],
            float16_embeddings=plan.wire["embeddings"] == "float16",
            float16_gradients=plan.wire["gradients"] == "float16",
        )
        servers = self._start_servers(plan, context)
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
            staging=None if device.type == "cpu" else Staging(device),
            servers_return_s=RETURN_S if self._restarts(SERVER, context) else CONNECTED_S,
            workers_return_s=RETURN_S if self._restarts(WORKER, context) else CONNECTED_S,
        )
        if processes.rows_stayed:
            sparse.reset()
        feed = self._feed(plan, context, codec, workers)
        return Session(sparse=sparse, dense=dense, schedule=schedule, feed=feed, optimizer=dense.optimizer)

    def rescale(self, plan: Plan, context: RunContext, session: Session, before: Plan) -> Session:
        """Starts and ends servers and workers so that they match ``plan``.

        Trainers have nothing in flight, and loaders have ended. New loaders start with the feed's next pass.
        """
        processes, sparse = context.processes, cast("RemoteSparse", session.sparse)
        servers, workers = (processes.addresses(name, before.roles[name]) for name in (SERVER, WORKER))
        rows_move = plan.roles[SERVER] != before.roles[SERVER]
        if rows_move or plan.roles[WORKER] != before.roles[WORKER]:
            ending = (SERVER, WORKER) if rows_move else (WORKER,)
            sparse.retire(ending)
            context.ranks.barrier()  # without it, trainers might call processes that end
            for name in ending:
                processes.end(name)
            if rows_move:
                processes.remove_memory()
            # start both roles in parallel; loaders start with the next pass
            processes.prepare({name: plan.roles[name] for name in (*ending, LOADER)}, again=True)
            if rows_move:
                servers = self._start_servers(plan, context)
            workers = self._start_workers(plan, context, sparse.codec, servers)
            sparse.connect(workers, servers)
        return replace(session, feed=self._feed(plan, context, sparse.codec, workers))

    def _feed(
        self, plan: Plan, context: RunContext, codec: BatchCodec, workers: tuple[str, ...]
    ) -> LoaderFeed:
        from girih.training.feeds import LoaderFeed

        processes = context.processes
        return LoaderFeed(
            context.ranks,
            lambda data: self._start_loaders(plan, context, codec, workers, data),
            lambda: processes.end(LOADER),
            processes.secret,
            processes.registry,
            return_s=RETURN_S,
        )

    def _num_senders(self, num_trainers: int) -> int:
        """Returns the number of independent sequences of pushes: one if trainers are in step, else one per trainer."""
        return 1 if self.in_step else num_trainers

    @abstractmethod
    def _planned_schedule(self) -> dict[str, object]:
        """Returns the schedule's name and options, for the plan."""

    def _dense_bytes(self, facts: Facts, sent: float) -> float:
        """Returns bytes of dense parameters and gradients per step; ``sent`` if every step sends all of them."""
        return sent

    def _start(
        self,
        plan: Plan,
        context: RunContext,
        name: str,
        count: int,
        role: Callable[[int, str], Service],
    ) -> tuple[str, ...]:
        """Starts the processes of one role, made from index and address, and returns their addresses."""
        processes = context.processes
        return processes.start(
            name,
            lambda: [role(index, address_of(plan, processes, name, index)) for index in range(count)],
            self._policy(name, context),
        )

    def _policy(self, role: str, context: RunContext) -> FailurePolicy:
        return self.failure_policy(role, context.sparse.store, context.ranks.size)

    def _restarts(self, role: str, context: RunContext) -> bool:
        """Returns whether processes of a role restart after they die."""
        return self._policy(role, context).policy is RestartPolicy.RESTART

    def _start_servers(self, plan: Plan, context: RunContext) -> tuple[str, ...]:
        from girih.services.embedding_server import EmbeddingServer

        secret, segment, count = context.processes.secret, context.processes.segment, plan.roles[SERVER]
        spec = _spec_of_servers(context.sparse, count)
        num_contributors = context.ranks.size if self.in_step else 1
        num_senders = self._num_senders(context.ranks.size) if self._restarts(WORKER, context) else None

        def server(index: int, address: str) -> EmbeddingServer:
            return EmbeddingServer(
                spec=spec, index=index, num_servers=count, num_contributors=num_contributors,
                address=address, secret=secret, segment=segment, num_senders=num_senders,
            )  # fmt: skip

        return self._start(plan, context, SERVER, count, server)

    def _start_workers(
        self, plan: Plan, context: RunContext, codec: BatchCodec, servers: tuple[str, ...]
    ) -> tuple[str, ...]:
        from girih.services.embedding_worker import EmbeddingWorker

        processes = context.processes
        spec = _spec_of_servers(context.sparse, len(servers))
        shards = spec.store.shards or 1
        resends = self._restarts(WORKER, context)

        def worker(index: int, address: str) -> EmbeddingWorker:
            secret, registry = processes.secret, processes.registry  # known once roles are started
            prefetch = plan.schedule.get("prefetch", False)
            return EmbeddingWorker(
                spec=spec, codec=codec, index=index, servers=servers, shards_each=shards,
                address=address, secret=secret, registry=registry, prefetch=prefetch, resends=resends,
            )  # fmt: skip

        return self._start(plan, context, WORKER, plan.roles[WORKER], worker)

    def _start_loaders(
        self, plan: Plan, context: RunContext, codec: BatchCodec, workers: tuple[str, ...], data: Dataset
    ) -> tuple[str, ...]:
        from girih.services.loader import Loader

        processes, size, count = context.processes, context.ranks.size, plan.feed["loaders"]
        returns = self._restarts(WORKER, context)

        def loader(index: int, address: str) -> Loader:
            served, secret, registry = range(index, size, count), processes.secret, processes.registry
            return Loader(
                data=data, codec=codec, index=index, trainers=tuple(served), num_trainers=size, workers=workers,
                address=address, secret=secret, registry=registry, in_step=self.in_step, workers_return=returns,
            )  # fmt: skip

        return self._start(plan, context, LOADER, count, loader)


class PipelinedStrategy(RemoteStrategy):
    """Trains with tables in separate processes, and reads rows ahead.

    Attributes:
        staleness: τ, the maximum number of a trainer's earlier batches not yet applied when a batch is read.
        trainers: number of trainer processes; ``torchrun`` sets it.
    """

    capabilities: ClassVar[Capabilities] = replace(
        RemoteStrategy.capabilities, scalable_roles={**COUNT_OPTIONS, RoleName.TRAINER: "trainers"}
    )
    staleness: Annotated[int, Bounds(0, 1024)] = 4
    trainers: Processes = 1

    def without_pipelining(self) -> Self:
        """Returns this strategy without reading rows ahead."""
        return replace(self, staleness=0)

    def failure_policy(self, role: str, store: StoreOptions, num_trainers: int) -> FailurePolicy:
        """Returns the policy for a killed process of this role.

        Embedding workers restart if servers can recognize resent pushes. Embedding servers restart if, in addition,
        their rows survive the process. Loaders always restart.
        """
        from girih.sparse.protocol import why_resent_pushes_clash

        if role not in (SERVER, WORKER):
            return super().failure_policy(role, store, num_trainers)
        kept = store.why_not_kept if role == SERVER else ""
        told_apart = why_resent_pushes_clash(self._num_senders(num_trainers), self.staleness)
        why = told_apart or kept or store.why_not_numbered
        return FailurePolicy(why=why) if why else RESTART

    def pipelined(self, plan: Plan, context: RunContext, dense: DenseHalf) -> Session:
        """Opens a session with the pipelined schedule; see :meth:`session`."""
        from girih.training.schedules import Pipelined

        # the workers prepare the ids, so the trainer has none to prepare
        schedule = Pipelined(plan.schedule["staleness"], plan.schedule.get("micro_batches", 1))
        return self.session(plan, context, dense, schedule)

    def _planned_schedule(self) -> dict[str, object]:
        return {"name": "pipelined", "staleness": self.staleness}


def address_of(plan: Plan, processes: Cluster, name: str, index: int) -> str:
    """Returns the address at which a process will listen; see :func:`girih.comm.service.listen`."""
    return "shm://" if plan.wire["transport"] == "shared" else processes.address(name, index)


def _spec_of_servers(spec: SparseSpec, num_servers: int) -> SparseSpec:
    """Sets one shard per core for each server, if all servers are on this machine and ``[store]`` gives no number."""
    spec = replace(spec, threads=max(1, len(os.sched_getaffinity(0)) // num_servers))
    return replace(spec, store=spec.resolved_store())
