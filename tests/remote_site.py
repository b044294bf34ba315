"""Embedding servers and a worker as threads, and trainers' ways to them; loaders are played by hand.

The worker may end and come back, as one that was killed: with nothing.
"""

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

import girih
from girih import models
from girih.comm.registry import Entry, LocalRegistry, register, resolver
from girih.comm.service import answers, connect
from girih.data import Batch
from girih.data.batch import Share
from girih.models import needs_of
from girih.services.embedding_server import EmbeddingServer
from girih.services.embedding_worker import EmbeddingWorker
from girih.sparse.halves.remote import RemoteSparse
from girih.sparse.options import StoreOptions
from girih.sparse.protocol import BatchCodec, SparseVerb
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Stats

SECRET = b"secret"


def spec_of(*, eviction=None, admission=None, dim=4, optimizer=None, shards=1):
    """``user`` and ``item``, one id an example each."""
    options = {"dim": dim, "eviction": eviction, "admission": admission}
    tables = [girih.Table(name=name, **options) for name in ("user", "item")] if eviction or admission else []
    schema = girih.Schema(
        [girih.Categorical(name="user", dim=dim), girih.Categorical(name="item", dim=dim)],
        labels="click",
        tables=tables,
    )
    needs = needs_of(models.DNN(schema, hidden=(2,)), schema)
    optimizer = optimizer or girih.optim.SGD(lr=1.0)
    return SparseSpec(
        schema=schema,
        needs=needs,
        optimizer=optimizer,
        first_order_optimizer=None,
        store=StoreOptions(shards=shards),
        seed=0,
    )


def batch_of(users, items):
    size = len(users)
    return Batch(
        ids=np.array([*users, *items], np.int64),
        offsets=np.arange(2 * size + 1, dtype=np.int32),
        numeric=np.empty((size, 0), np.float32),
        labels=np.zeros((size, 1), np.float32),
    )


@contextmanager
def running(role):
    """Runs a role in a thread; gives where it listens."""
    stop, told, address = threading.Event(), threading.Event(), []

    def ready(where):
        address.append(where)
        told.set()

    thread = threading.Thread(target=role.run, args=(ready, stop), daemon=True)
    thread.start()
    assert told.wait(20)
    try:
        yield address[0]
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive()


class Alone:
    """One trainer of several in this process: each speaks to the servers, none waits for another."""

    first = True

    def __init__(self, rank):
        self.rank = rank

    def barrier(self):
        pass

    def broadcast(self, value):
        return value


class Site:
    """One worker, some servers, some trainers (by ``together`` in step)."""

    def __init__(
        self,
        stack,
        spec,
        num_servers=1,
        together=1,
        num_trainers=1,
        prefetch=False,
        staging=None,
        num_senders=None,
        **packets,
    ):
        self.spec, self.packets = spec, BatchCodec.of(spec.schema, spec.needs, **packets)
        self.servers = tuple(
            stack.enter_context(
                running(
                    EmbeddingServer(
                        spec=spec,
                        index=i,
                        num_servers=num_servers,
                        num_contributors=together,
                        address="shm://",
                        secret=SECRET,
                        num_senders=num_senders,
                    )
                )
            )
            for i in range(num_servers)
        )
        self._role = EmbeddingWorker(
            spec=spec, codec=self.packets, index=0, servers=self.servers, shards_each=spec.store.num_shards([]),
            address="shm://", secret=SECRET,
            prefetch=prefetch, resends=num_senders is not None,
        )  # fmt: skip
        self._registry = LocalRegistry()
        self._life = stack.enter_context(ExitStack())
        self.begin_worker(0)
        find_worker = resolver(self._registry, self._role.name, 0)
        self.loader = connect(self.worker, secret=SECRET, resolve=find_worker)
        stack.callback(self.loader.close)
        self.stats = [Stats() for _ in range(num_trainers)]
        self.trainers = [
            RemoteSparse(
                spec,
                self.packets,
                Alone(rank),
                workers=(self.worker,),
                servers=self.servers,
                secret=SECRET,
                registry=self._registry,
                stats=stats,
                staging=None if staging is None else staging(),
            )
            for rank, stats in enumerate(self.stats)
        ]
        for trainer in self.trainers:
            stack.callback(trainer.close)

    def begin_worker(self, life):
        """Begins the worker, or its next life once the one before is gone."""
        self._life.close()
        self._role.incarnation = life
        self.worker = self._life.enter_context(running(self._role))
        register(self._registry, self._role.name, 0, Entry(self.worker, life, 0, ""))

    def keep(self, batch, trainer=0, number=0):
        """Dispatches a batch, as a loader does."""
        source, ids = (1, trainer, number, batch.num_examples), self.packets.pack_ids(batch)

        def store():
            (kept,) = answers([self.loader], SparseVerb.STORE_IDS, source, ids, again=True)
            return 0, kept.fields[0]

        share = Share(num_examples=batch.num_examples, weight=1.0, sample=store(), again=store)
        return replace(batch, ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), share=share)

    def peek(self, batch):
        """float32[B, 2, D], detached."""
        found = self.trainers[0].peek(batch).wait()
        return found.stacked(("user", "item")).detach().numpy().copy()


@contextmanager
def site(spec=None, **options):
    with ExitStack() as stack:
        yield Site(stack, spec or spec_of(), **options)


def give(pulled, gradient):
    """Lets every output of a batch collect a gradient: a number for all examples, or one each."""
    embeddings = pulled.wait()
    gradient = np.broadcast_to(np.asarray(gradient, np.float32), embeddings.blocks[0].values.shape[:1])
    import torch

    for block in embeddings.blocks:
        block.values.grad = (
            torch.from_numpy(gradient.copy())[:, None, None].expand_as(block.values).contiguous()
        )
    return embeddings


__all__ = ["RemoteSparse", "batch_of", "give", "running", "site", "spec_of"]
