"""A small net cut by hand, its group servers as processes or threads, and trainers' halves."""

import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, fx, nn

from companions import Companion
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.hierarchical.graph import ServerPart
from girih.hierarchical.group_client import GroupClient
from girih.hierarchical.grouped import GroupedReplica, parts_on, recipe_of
from girih.hierarchical.wire import PLAIN
from girih.services.group_server import GroupServer
from support.dense_suite import DIM, NAMES, NUMERIC, sgd

SECRET = b"of this run"
READY_S = 60


class Spoiled(nn.Module):
    """Its gradient is multiplied by a number, for the tests."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and Spoiled.scale != 1.0:
            x.register_hook(lambda gradient: gradient * Spoiled.scale)
        return x


class Net(nn.Module):
    """Two towers side by side, then a third: ``logits = deep(bottom(numeric) · wide(embeddings))`` and first-order weights."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(len(NUMERIC), 8), nn.ReLU(), nn.Linear(8, 8), Spoiled())
        self.wide = nn.Sequential(nn.Linear(len(NAMES) * DIM, 8), norm(8), nn.ReLU())
        self.deep = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, numeric, embeddings):
        """Logits, float32[B, 1]."""
        one, two = self.bottom(numeric), self.wide(embeddings.concatenated())
        logits = self.deep(torch.cat([one * two, two], dim=1))
        return logits + embeddings.first_order_weights().sum(dim=1, keepdim=True)


class Waiting(nn.Module):
    """Hands on what it is given, late."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x


class Dropping(Net):
    """Its first two towers drop out, one of them late."""

    def __init__(self, late=None):
        super().__init__(nn.Identity)
        for name in ("bottom", "wide"):
            layer, *rest = getattr(self, name)
            parts = layer, Waiting(0.05 if name == late else 0.0), nn.Dropout(0.5), *rest
            setattr(self, name, nn.Sequential(*parts))


class OnTrainer(nn.Module):
    """The same, but for the parameters."""

    def __init__(self, exchange):
        super().__init__()
        self.exchange = exchange

    def forward(self, numeric, embeddings):
        """Logits, float32[B, 1]."""
        stage = [("bottom", [numeric]), ("wide", [embeddings.concatenated()])]
        (one,), (two,) = self.exchange(stage)
        ((logits,),) = self.exchange([("deep", [one * two, two])])
        return logits + embeddings.first_order_weights().sum(dim=1, keepdim=True)


class Cut:
    """The net by parts, spread over some servers."""

    traced = SimpleNamespace(splits=())

    def __init__(self, net, num_servers):
        self.parts = [
            ServerPart(name, number % num_servers, traced(net, name, inputs), inputs, 1)
            for number, (name, inputs) in enumerate((("bottom", 1), ("wide", 1), ("deep", 2)))
        ]

    def trainer(self, exchange):
        """What trainers run."""
        return OnTrainer(exchange)


def traced(net, path, inputs):
    """One module of a net, with the names that its parameters have there."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{number}") for number in range(inputs)]
    joined = graph.call_function(torch.cat, (given, 1)) if inputs > 1 else given[0]
    graph.output((graph.call_module(path, (joined,)),))
    return fx.GraphModule(net, graph)


class InProcess:
    """A group server in a process of its own."""

    def __init__(self, stack, role):
        self.companion = Companion(serve, role)
        stack.callback(self.companion.close)
        assert self.companion.pipe.poll(READY_S), self.companion.printed()
        self.address = self.companion.pipe.recv()


def serve(pipe, role):
    torch.set_num_threads(1)
    role.run(pipe.send, threading.Event())


class InThread:
    """A group server in a thread of this process."""

    def __init__(self, stack, role):
        stop, told = threading.Event(), threading.Event()

        def ready(address):
            self.address = address
            told.set()

        thread = threading.Thread(target=role.run, args=(ready, stop), daemon=True)
        thread.start()
        stack.callback(thread.join, 20)
        stack.callback(stop.set)
        assert told.wait(READY_S)


class Ranks:
    """One trainer of several in this process, none of which waits for another."""

    first, size = True, 1

    def barrier(self):
        pass


class Together:
    """One of several trainers in threads of this process."""

    def __init__(self, rank, barrier):
        self.first, self.barrier = rank == 0, barrier.wait


class Site:
    """One group."""

    def __init__(
        self,
        stack,
        num_servers=1,
        *,
        optimizer=sgd,
        kind=InProcess,
        num_nets=4,
        net=Net,
        averaging=lambda place: None,
        wire=PLAIN,
        **options,
    ):
        self.stack, self.optimizer, self.net, self.wire = stack, optimizer, net, wire
        whole = Replica(self.spec())
        self.cut = Cut(whole.module, num_servers)
        self.servers = [
            kind(
                stack,
                GroupServer(
                    parts=parts_on(self.cut, index),
                    index=index,
                    recipe=recipe_of(whole, self.cut),
                    num_nets=num_nets,
                    address="shm://",
                    secret=SECRET,
                    averaging=averaging(index),
                    wire=wire,
                    **options,
                ),
            )
            for index in range(num_servers)
        ]

    def spec(self, **options):
        """The net, as every trainer has it."""
        return DenseSpec(module=self.net(), optimizer=self.optimizer, **options)

    def trainer(self, ranks=None, averaged=False, **options):
        """A half, the way of one trainer to the group."""
        spec = self.spec(**options)
        whole = Replica(spec)
        cut = Cut(whole.module, len(self.servers))
        group = GroupClient(
            cut.parts,
            [each.address for each in self.servers],
            secret=SECRET,
            wire=self.wire,
            stats=spec.stats,
        )
        half = GroupedReplica(whole, spec, cut, group, ranks or Ranks(), averaged=averaged)
        self.stack.callback(half.close)
        return half


@contextmanager
def site(*arguments, **options):
    with ExitStack() as stack:
        yield Site(stack, *arguments, **options)
