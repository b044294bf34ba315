"""A dense server and its copies: in one process, and over two real ones."""

import copy
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import girih
from companions import together
from girih.comm.pinned import FromDevice, ToDevice
from girih.data import Batch
from girih.dense.half import DenseSpec
from girih.dense.halves.parameter_server import ParameterServer, ParameterServerReplica
from girih.dense.halves.replica import Replica
from girih.errors import ConfigError
from girih.models.embeddings import Block, Embeddings
from girih.planner.facts import Facts, ModelFacts
from girih.telemetry.stats import Stats
from support.votes import apply

SECRET = b"of this run"
STEPS = 40
STALENESS = 2
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(3, 1)
        self.aside = nn.Parameter(torch.ones(2))  # takes no part in the loss
        self.scale = 1.0

    def forward(self, numeric, embeddings):
        return self.used(numeric) + embeddings.blocks[0].values.sum(dim=(1, 2))[:, None]

    def loss(self, outputs, batch):
        """The mean of the logits, whose gradient may be spoiled."""
        mean = outputs.mean()
        mean.register_hook(lambda gradient: gradient * self.scale)
        return mean


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=2.0**-6)


def flat_of(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().copy()


def batch_of(step, size=4):
    numeric = np.random.default_rng(step).normal(size=(size, 3)).astype(np.float32)
    return Batch(
        ids=np.empty(0, np.int64),
        offsets=np.zeros(1, np.int32),
        numeric=numeric,
        labels=np.zeros((size, 1), np.float32),
    )


def train(replica, batch, scale=1.0):
    """One step on the mean of the logits; returns the loss that is told, or why it was refused."""
    values = torch.zeros(batch.num_examples, 1, 2, requires_grad=True)
    replica.module.scale = scale
    computed = replica.compute(batch, Embeddings((Block(("user",), values),)))
    facts = apply(computed).facts()
    return str(facts.refused) if facts.refused else facts.loss


class TestDenseServer:
    def test_a_step_is_that_of_the_optimizer_and_gives_all_numbers_back(self):
        server, plain = ParameterServer(DenseSpec(module=Net(), optimizer=adamw, clip_norm=0.5)), Net()
        optimizer = adamw(plain.parameters())
        first, behind = 0, flat_of(plain)
        assert server.newest()[1] == first
        np.testing.assert_array_equal(server.newest()[0].numpy(), behind)
        gradient = np.arange(len(behind), dtype=np.float32)
        for version in range(3):
            plain.aside.grad = None  # no gradient is not a gradient of 0: weight decay leaves it
            at = 2
            for parameter in (plain.used.weight, plain.used.bias):
                parameter.grad = torch.tensor(gradient[at : at + parameter.numel()]).view_as(parameter)
                at += parameter.numel()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            flat, now = server.step(torch.from_numpy(gradient), np.array([0, 1, 1], np.uint8), version)
            assert now == version + 1
            np.testing.assert_array_equal(flat.numpy(), flat_of(plain))
        assert plain.aside.tolist() == [1, 1]
        assert server.staleness_max == 0

    def test_steps_between_a_gradient_and_its_parameters_are_counted(self):
        server = ParameterServer(DenseSpec(module=Net(), optimizer=sgd))
        gradient, given = torch.zeros(6), np.ones(3, np.uint8)
        for version in (0, 1, 1, 0, 4):
            server.step(gradient, given, version)
        assert server.staleness_max == 3

    def test_steps_of_several_threads_are_all_taken_once(self):
        server = ParameterServer(DenseSpec(module=Net(), optimizer=sgd))
        before = server.newest()[0]
        versions = []

        def push():
            for _ in range(50):
                versions.append(server.step(torch.full((6,), 2.0), np.ones(3, np.uint8), 0)[1])

        threads = [threading.Thread(target=push) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(versions) == list(range(1, 201))
        np.testing.assert_allclose(before - server.newest()[0], 200 * 2.0 / 64, rtol=1e-5)


class Alone:
    """The only trainer."""

    first, rank, size = True, 0, 1

    def broadcast(self, value):
        return value

    def barrier(self):
        pass


def alone(**options):
    spec = DenseSpec(module=Net(), optimizer=adamw, **options)
    return ParameterServerReplica(spec, Alone(), staleness=STALENESS, address="shm://", secret=SECRET)


def test_a_trainer_alone_moves_as_a_replica_bit_for_bit():
    stats = Stats()
    served = alone(clip_norm=0.4, stats=stats)
    plain = Replica(DenseSpec(module=Net(), optimizer=adamw, clip_norm=0.4))
    for number in range(10):
        assert train(served, batch_of(number)) == train(plain, batch_of(number))
        np.testing.assert_array_equal(flat_of(served.module), flat_of(plain.module))
    assert (stats.wire_bytes(), served.stats()) == ({}, {"staleness_max": 0})
    state = served.state()
    again = alone(clip_norm=0.4)
    again.restore(copy.deepcopy(state))
    again.sync()
    for each in (served, again):
        train(each, batch_of(11))
    np.testing.assert_array_equal(flat_of(served.module), flat_of(again.module))
    served.close()
    again.close()


def test_it_may_compute_on_gpus_with_rows_in_the_hosts_memory():
    schema = girih.Schema([girih.Categorical(name="user", dim=2)], labels="click")
    model = ModelFacts(name="Net", num_parameters=6)
    facts = Facts(schema=schema, model=model, groups=(), num_trainers=2, seed=0, device="cuda")
    assert girih.Asynchronous().plan(facts).strategy == "asynchronous"
    with pytest.raises(ConfigError, match="'asynchronous' keeps no rows in GPU memory"):
        girih.Asynchronous().plan(replace(facts, rows_on="gpu"))


def by_lanes(parcels):
    """Has an array go the way to a GPU and back, without one."""
    parcels._to, parcels._back = ToDevice(CPU), FromDevice(CPU)


def two(ranks):
    """Both trainers go as fast as they can; then they meet."""
    told = {}
    for name in ("sgd", "adamw"):
        stats = Stats()
        replica = ParameterServerReplica(
            DenseSpec(module=Net(), optimizer=globals()[name], stats=stats),
            ranks,
            staleness=STALENESS,
            address="tcp://127.0.0.1:*",
            secret=SECRET,
        )
        if name == "sgd":
            by_lanes(replica._parcels)
            if replica._server is not None:
                by_lanes(replica._server._parcels)
        told[f"start-{name}"] = flat_of(replica.module).tolist()
        ranks.barrier()
        most = 0
        for number in range(STEPS):
            train(replica, batch_of(2 * number + ranks.rank))
            most = max(most, len(replica._under_way))
        told[f"most-{name}"] = most
        told[f"refused-{name}"] = train(replica, batch_of(0), scale=float("nan"))
        replica.sync()
        told[f"end-{name}"] = flat_of(replica.module).tolist()
        told[f"version-{name}"] = replica._version
        told[f"staleness-{name}"] = replica.stats()["staleness_max"]
        ranks.barrier()
        told[f"sent-{name}"] = stats.wire_bytes()["dense"]
        replica.close()
    return told


@pytest.fixture(scope="module")
def told():
    return together(two)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_every_step_of_both_is_taken_and_both_come_to_the_same_parameters(told, name):
    one, other = told
    assert one[f"start-{name}"] == other[f"start-{name}"]
    assert one[f"end-{name}"] == other[f"end-{name}"]
    assert one[f"version-{name}"] == other[f"version-{name}"] == 2 * STEPS  # a refused step is none
    assert "NaN or infinite" in one[f"refused-{name}"]
    assert one[f"end-{name}"][:2] == [1.0, 1.0]  # what takes no part stays, under weight decay too
    assert 0 < other[f"most-{name}"] <= STALENESS
    assert one[f"staleness-{name}"] > 0


def test_the_sum_of_all_gradients_is_what_moved_them(told):
    """The gradient of the mean logit is the mean input, whatever the parameters were: nothing is lost or doubled."""
    total = sum(batch_of(number).numeric.mean(axis=0) for number in range(2 * STEPS))
    moved = np.array(told[0]["start-sgd"]) - np.array(told[0]["end-sgd"])
    np.testing.assert_allclose(moved[2:5], total / 64, rtol=1e-3, atol=1e-5)
    assert moved[5] == pytest.approx(2 * STEPS / 64, rel=1e-4)


def test_bytes_are_counted_where_they_are_sent(told):
    size = 6 * 4
    one, other = told
    assert other["sent-sgd"] == STEPS * size  # gradients
    assert one["sent-sgd"] == (STEPS + 2) * size  # parameters: after each step, at the start and at the end
