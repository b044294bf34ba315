"""Every kind of endpoint in this process, with requests that it expects and a way to see whether its state is as it was."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import fx, nn

import girih
from girih import models
from girih.comm.registry import LocalRegistry, remote
from girih.comm.rpc import Frame, Reply, Request
from girih.comm.rpc.frames import Header, PackedFrame, Status, unpack
from girih.comm.service import as_integer, as_text
from girih.data import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.parameter_server import ParameterServer, ParameterVerb
from girih.errors import RemoteError
from girih.hierarchical import averaging as protocol
from girih.hierarchical import wire
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.optimizer_recipe import OptimizerRecipe
from girih.hierarchical.wire import pack
from girih.models import needs_of
from girih.services import embedding_worker, loader
from girih.services.dense_server import DenseServer
from girih.services.embedding_server import EmbeddingServer
from girih.services.embedding_worker import EmbeddingWorker
from girih.services.group_server import GroupServer
from girih.sparse.options import StoreOptions
from girih.sparse.protocol import NO_TURN, BatchCodec, SparseVerb
from girih.sparse.routing.sorted_keys import SortedKeys
from girih.sparse.spec import SparseSpec

SCHEMA = girih.Schema(
    [girih.Categorical(name="user", dim=4), girih.Categorical(name="item", dim=4), girih.Numeric(name="x")],
    labels="click",
)
SPEC = SparseSpec(
    schema=SCHEMA,
    needs=needs_of(models.DNN(SCHEMA, hidden=(2,)), SCHEMA),
    optimizer=girih.optim.SGD(lr=1.0),
    first_order_optimizer=None,
    store=StoreOptions(shards=1),
    seed=0,
)
CODEC = BatchCodec.of(SCHEMA, SPEC.needs)
LR_SCALE = as_integer(1.0)
WIDTH = SPEC.groups()[0].spec.dim


@dataclass
class Endpoint:
    """One endpoint.

    Attributes:
        handle: takes a request in. settle: returns once nothing is being done.
        state: what requests may change, as something that can be compared.
        samples: requests that it expects.
        lasting: the part of the state that a gradient that is not finite leaves too; None where it leaves all.
    """

    handle: object
    settle: object
    state: object
    samples: list = field(default_factory=list)
    lasting: object = None

    def ask(self, frame, client=7):
        """What a request is answered, None while it is not; errors as the server's thread would tell them."""
        answers = []
        _, received = unpack(
            [np.array(part) for part in PackedFrame(frame).parts(Header(Status.REQUEST, 1, 0, 0))]
        )
        request = Request(received, client, lambda *words: answers.append(words), _take)
        try:
            self.handle(request)
        except Exception as error:
            request.fail(error)
        self.settle()
        assert len(answers) <= 1
        if not answers:
            return None
        status, packed = answers[0]
        return status, unpack(packed.parts(Header(status, 1, 1, 0)))[1]


def _take(dtype, *shape):
    return np.empty(shape, dtype)


def told(frame):
    """The text of a failure."""
    return bytes(frame.arrays[0]).decode(errors="replace")


def digest(*arrays):
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def settled(*pools):
    """Waits for pools of one thread."""
    for pool in pools:
        pool.submit(int).result()


class Counting(dict):
    """What a registry keeps, which counts how often it is changed: to compare all of it after each frame takes long."""

    num_changes = 0

    def __setitem__(self, key, value):
        self.num_changes += 1
        super().__setitem__(key, value)

    def pop(self, key, *default):
        self.num_changes += key in self
        return super().pop(key, *default)


def registry(stack, path):
    held = LocalRegistry()
    held.entries._values = Counting()
    stack.callback(held.close)
    held.set("a", "1")
    samples = [
        Frame(0, (), (as_text(words),))
        for words in (
            ["set", "a", "2"], ["get", "a"], ["check", ["a", "b"]], ["add", "n", 2], ["wait", ["a"]],
            ["compare_set", "a", "2", "1"], ["delete", "a"], ["wait", ["never"]],
        )
    ]  # fmt: skip
    return Endpoint(
        remote._RegistryWork(held).on_request, int, lambda: held.entries._values.num_changes, samples
    )


def server(stack, path, num_contributors=2):
    work = EmbeddingServer(
        spec=SPEC, index=0, num_servers=1, num_contributors=num_contributors, address="shm://", secret=b""
    )
    work.open(stack)
    keys, counts, lengths = np.arange(6), np.ones(6, np.int32), np.array([3, 3])
    gradients = np.full((6, WIDTH), 0.5, np.float32)
    samples = [
        Frame(SparseVerb.LOOKUP, (sample, trainer, 1, 1, 0, 1), (lengths, keys, counts))
        for sample, trainer in ((1, 0), (2, 1), (3, 0))
    ]
    samples += [
        Frame(SparseVerb.UPDATE, (1, 0, 1, 0, 1, LR_SCALE), (gradients,)),
        Frame(SparseVerb.UPDATE, (2, 1, 1, 0, 1, LR_SCALE), (gradients,)),
        Frame(SparseVerb.LOOKUP, (0, 0, 1, 1, 0, 0), (lengths, keys, counts)),
        Frame(SparseVerb.DROP, (3, 0, 1, NO_TURN)),
        Frame(SparseVerb.STATS, (1,)),
    ]

    def state():
        found = []
        for stores in work._shards.stores:
            values = np.empty((len(keys), stores[0].spec.dim), np.float32)
            asked = SortedKeys.received(stores, lengths, keys, counts)
            asked.read(stores, range(len(stores)), 0, values, train=False)
            found.append(digest(values))
        done = {trainer: done.count for trainer, done in work._done.items() if done.count}
        lasting = found, work._shards.rows(), done, work._num_updates
        parts = {turn: sorted(parts.waiting) for turn, parts in work._turns.items() if parts.waiting}
        return lasting, sorted(work._reads), parts

    def settle():
        settled(work._pool, work._writing)
        work._queues.drain()

    return Endpoint(work.handle, settle, state, samples, lasting=lambda state: state[0])


@contextmanager
def calling(service, client):
    """Has a service that is opened meanwhile call a client of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "connect_all", lambda *names, **options: [client])
        yield


class Calls(ExitStack):
    """A client of an endpoint of this process."""

    def __init__(self, endpoint):
        super().__init__()
        self._endpoint = endpoint

    def call(self, kind, fields=(), arrays=()):
        reply = Reply("in this process", kind, lambda _, timeout_s: timeout_s)
        answered = self._endpoint.ask(Frame(kind, tuple(fields), tuple(arrays)), client=1)
        if answered is None:
            reply.finish(RemoteError("waits for others"))
        elif answered[0] == Status.REPLY:
            reply.finish(answered[1])
        else:
            reply.finish(RemoteError(told(answered[1])))
        return reply


def worker(stack, path):
    servers = server(stack, path, 1)
    work = EmbeddingWorker(
        spec=SPEC, codec=CODEC, index=0, servers=("shm://",), shards_each=1, address="shm://", secret=b"", prefetch=True
    )  # fmt: skip
    with calling(embedding_worker, Calls(servers)):
        work.open(stack)
    batch = Batch(
        ids=np.array([1, 2, 3, 4, 5, 6]),
        offsets=np.arange(7, dtype=np.int32),
        numeric=np.empty((3, 0), np.float32),
        labels=np.zeros((3, 1), np.float32),
    )
    ids = CODEC.pack_ids(batch)
    outputs = CODEC.pack_gradients([np.full((3, 2, 4), 0.5, np.float32)])
    samples = [
        Frame(SparseVerb.STORE_IDS, (0, 0, 0, 3), ids),
        Frame(SparseVerb.PULL, (1, 0, 1, 1, 0)),
        Frame(SparseVerb.PEEK, (3,), ids),
        Frame(SparseVerb.PUSH, (1, 0, 1, 0, 1, LR_SCALE), outputs),
        Frame(SparseVerb.STORE_IDS, (0, 0, 1, 3), ids),
        Frame(SparseVerb.PULL, (2, 0, 2, 1, 0)),
        Frame(SparseVerb.DROP, (2, 0, 1, NO_TURN)),
        Frame(SparseVerb.DROP_IDS, (0, 0, 0)),
        Frame(SparseVerb.STATS, (0,)),
    ]

    def state():
        return sorted(work._samples), [s.source for s in work._samples.values()], servers.state()

    def settle():
        for _ in range(3):  # answers of servers are worked on behind
            settled(work._pool)

    return Endpoint(work.handle, settle, state, samples, lasting=lambda state: state[-1][0])


def a_loader(stack, path):
    log = {"user": range(8), "item": range(8), "x": [0.5] * 8, "click": [0, 1] * 4}
    pq.write_table(pa.table(log), path / "log.parquet")
    data = replace(girih.read_parquet(path / "log.parquet", SCHEMA, batch_size=4), read_ahead=2)

    def call(kind, *words):
        reply = Reply("in this process", kind, lambda _, timeout_s: timeout_s)
        reply.finish(Frame(kind, (1,)))
        return reply

    work = loader.Loader(
        data=data, codec=CODEC, index=0, trainers=(0, 1), num_trainers=2, workers=("shm://",), address="shm://", secret=b""
    )  # fmt: skip
    with calling(loader, nullcontext(SimpleNamespace(call=call))):
        work.open(stack)
    begin = as_text({"epoch": 0, "position": None})
    samples = [
        Frame(SparseVerb.BEGIN, (1, 0), (begin,)), Frame(SparseVerb.NEXT, (1, 0, 0)), Frame(SparseVerb.NEXT, (1, 1, 0)),
        Frame(SparseVerb.STORE_AGAIN, (1, 0, 0), (begin,)), Frame(SparseVerb.RESUME, (1, 0, 0), (begin,)),
        Frame(SparseVerb.END, (1, 0, 1)), Frame(SparseVerb.END, (1, 1, 1)), Frame(SparseVerb.STATS, (0,)),
    ]  # fmt: skip
    return Endpoint(work.handle, partial(settled, work._pool), lambda: sorted(work._passes), samples)


def averaging(stack, path):
    work = DenseServer(index=0, num_replicas=2, averaging="easgd", rate=None, address="shm://", secret=b"")
    work.open(stack)
    own, beside = np.ones(5, np.float32), np.zeros(2, np.float32)
    of = protocol.DenseVerb
    samples = [Frame(of.BEGIN, (0,), (own,))]
    samples += [Frame(of.AVERAGE, (replica, 0), (own,)) for replica in (0, 1)]
    samples += [Frame(of.LEAVE, (replica, 0)) for replica in (0, 1)]
    samples += [Frame(of.MEET, (replica, 0), (own, beside)) for replica in (0, 1)]
    samples += [Frame(of.STATS, (1,))]

    def state():
        return {
            number: (
                sorted(v.round.waiting),
                sorted(v.round.absent),
                sorted(v.meeting.waiting),
                _numbers_of(v.algorithm),
            )
            for number, v in work._vectors.items()
        }

    return Endpoint(work.handle, partial(settled, work._pool), state, samples)


def _numbers_of(algorithm):
    return [digest(each) for each in vars(algorithm).values() if isinstance(each, np.ndarray)]


def group(stack, path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output((graph.call_module("net", (given,)),))
    whole = nn.Module()
    whole.net = net
    part = ServerPart("net", 0, fx.GraphModule(whole, graph), 1, 1)
    recipe = OptimizerRecipe.of(torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.5), whole)
    work = GroupServer(parts=[part], index=0, recipe=recipe, num_nets=1, address="shm://", secret=b"")
    work.open(stack)
    work._pool = stack.enter_context(ThreadPoolExecutor(1))
    x, gradient = pack([torch.ones(2, 3)], _take), pack([torch.ones(2, 2)], _take)
    of = wire.GroupVerb
    entries = work._live_parts.entries(with_optimizer=False)
    told = as_text([(name, key, True, None) for name, key, _ in entries])
    saved = told, *pack([value for *_, value in entries], _take)
    needs, options = np.ones(1, np.int8), as_text(([{"lr": 0.1, "momentum": 0.5}], 1.0))
    samples = [
        Frame(of.FORWARD, (0, 1, 0, 0, 1), (needs, *x)), Frame(of.BACKWARD, (0, 1, 0), tuple(gradient)),
        Frame(of.NORMS, (0, 1)), Frame(of.APPLY, (0, 1), (options,)), Frame(of.FORWARD, (0, 2, 0, 0, 1), (needs, *x)),
        Frame(of.DISCARD, (0, 2)), Frame(of.FORWARD, (0, 3, 0, 0, 0), (needs, *x)), Frame(of.STATE, (0, 1)), Frame(of.RESTORE, (1,), saved),
        Frame(of.EXTRA_STATE, (0,)), Frame(of.STATS, (0,)), Frame(of.LEAVE), Frame(of.MEET),
    ]  # fmt: skip

    def state():
        entries = work._live_parts.entries(with_optimizer=True)
        told = [
            (name, key, digest(v.numpy()) if isinstance(v, torch.Tensor) else v) for name, key, v in entries
        ]
        batches = {
            key: (batch.read_at, sorted(batch.calls), _gradients_of(batch.net.named))
            for key, batch in work._batches._batches.items()
        }
        return told, batches, work._batches._num_begun, work._batches._num_done

    return Endpoint(work.handle, partial(settled, work._pool), state, samples)


def _gradients_of(named):
    return {name: digest(each.grad.numpy()) for name, each in named.items() if each.grad is not None}


def parameters(stack, path):
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    spec = DenseSpec(module=module, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
    held = ParameterServer(spec)
    held.open(stack)
    samples = [
        Frame(ParameterVerb.NEWEST),
        Frame(ParameterVerb.STEP, (0,), (np.ones(8, np.float32), np.ones(2, np.uint8))),
        Frame(ParameterVerb.STEP, (1,), (np.ones(8, np.float32), np.array([1, 0], np.uint8))),
    ]

    def state():
        return digest(held.newest()[0].numpy()), held.version, held.staleness_max

    return Endpoint(held.handle, partial(settled, held._pool), state, samples)


KINDS = {
    "registry": registry, "embedding-server": partial(server, num_contributors=1), "embedding-server of two": server, "embedding-worker": worker, "loader": a_loader,
    "dense-server": averaging, "group-server": group, "parameter-server": parameters,
}  # fmt: skip


def opened(kind, path):
    """An endpoint of a kind, and what ends it."""
    stack = ExitStack()
    return KINDS[kind](stack, path), stack
