"""Which processes a strategy needs, by the names of its roles."""

from __future__ import annotations

import os
from dataclasses import replace

from girih.cluster.cluster import Cluster
from girih.cluster.loader import Loader
from girih.cluster.roles import RoleName
from girih.data import Dataset
from girih.sparse.halves.remote import SERVER, WORKER
from girih.sparse.options import StoreOptions
from girih.sparse.service.embedding_server import EmbeddingServer
from girih.sparse.service.embedding_worker import EmbeddingWorker
from girih.sparse.spec import SparseSpec
from girih.strategies import Strategy
from girih.strategies.remote import RemoteStrategy

LOADER = RoleName.LOADER


def start_roles(cluster: Cluster, strategy: Strategy, spec: SparseSpec) -> None:
    """Starts what a strategy has beside its trainers, but for loaders."""
    counts, secret = strategy.roles, cluster.context.secret
    cluster.prepare(counts)
    if isinstance(strategy, RemoteStrategy):
        packets = strategy.packets(spec)
        num_servers = counts[SERVER]
        spec = replace(spec, store=_of_a_server(spec, num_servers))
        together = cluster.context.ranks.size if strategy.together else 1
        servers = cluster.start(
            SERVER,
            lambda: [
                EmbeddingServer(
                    spec,
                    index,
                    num_servers,
                    together,
                    strategy.address(cluster.host(SERVER, index)),
                    secret,
                    cluster.segment,
                )
                for index in range(num_servers)
            ],
        )
        shards_each = spec.store.num_shards(group.spec for group in spec.groups())
        cluster.start(
            WORKER,
            lambda: [
                EmbeddingWorker(
                    spec,
                    packets,
                    index,
                    servers,
                    shards_each,
                    strategy.address(cluster.host(WORKER, index)),
                    secret,
                )
                for index in range(counts[WORKER])
            ],
        )


def _of_a_server(spec: SparseSpec, num_servers: int) -> StoreOptions:
    """As many shards as a server has cores, if all are on this machine, unless it is said."""
    cores = max(1, (os.cpu_count() or 1) // num_servers)
    return replace(spec.store, shards=spec.store.num_shards((group.spec for group in spec.groups()), cores))


def start_loaders(cluster: Cluster, strategy: Strategy, spec: SparseSpec, data: Dataset) -> None:
    """Starts those that read the training data, where a strategy has such."""
    counts, size = strategy.roles, cluster.context.ranks.size
    workers, secret = cluster.context.addresses.get(WORKER, ()), cluster.context.secret
    if isinstance(strategy, RemoteStrategy):
        packets = strategy.packets(spec)
        num_loaders = min(counts[LOADER], size)
        cluster.start(
            LOADER,
            lambda: [
                Loader(
                    data,
                    packets,
                    index,
                    tuple(range(index, size, num_loaders)),
                    size,
                    workers,
                    strategy.address(cluster.host(LOADER, index)),
                    secret,
                )
                for index in range(num_loaders)
            ],
        )
