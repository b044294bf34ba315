"""Groups of group servers, averaged by dense servers in the background."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from girih.comm.service import connect
from girih.dense.half import DenseSpec
from girih.dense.halves.replica import Replica
from girih.hierarchical.shadow import Shadow
from girih.services.dense_server import DenseServer
from girih.services.group_server import AveragedWith
from girih.telemetry.stats import Stats
from grouped_site import SECRET, InThread, Net, Site, Together, site
from support.dense_suite import case, sgd
from support.votes import apply, drop

GROUPS, SERVERS, STEPS = 2, 2, 12


@pytest.fixture
def halves():
    """The only trainer of each of two groups; they are made and met by a thread each."""
    with ExitStack() as stack, ThreadPoolExecutor(GROUPS) as pool:
        dense = [
            InThread(
                stack,
                DenseServer(
                    index=index,
                    num_replicas=GROUPS,
                    averaging="easgd",
                    rate=0.4,
                    address="shm://",
                    secret=SECRET,
                ),
            )
            for index in range(2)
        ]
        barrier = threading.Barrier(GROUPS)

        def made(group):
            def averaging(place):
                servers = [each.address for each in dense]
                return AveragedWith(servers=servers, group=group, place=place, every_steps=2)

            site = Site(stack, SERVERS, kind=InThread, averaging=averaging)
            return site.trainer(Together(group, barrier), averaged=True)

        yield list(pool.map(made, range(GROUPS))), pool


def train(half, seed):
    for number in range(STEPS):
        one = case(seed + number)
        apply(half.compute(one.batch, one.embeddings()))


def same(one, two):
    return all(torch.equal(one[name], value) for name, value in two.items())


def test_one_model_is_evaluated_and_saved_while_each_group_keeps_its_own(halves):
    halves, pool = halves
    list(pool.map(train, halves, (0, 100)))
    for half in halves:
        told = half.processes()
        assert all(
            told[f"group-server {place}"]["counters"]["averaging_rounds"] > 0 for place in range(SERVERS)
        )
    assert {"dense-server 0", "dense-server 1"} < halves[0].processes().keys()
    list(pool.map(lambda half: half.sync(), halves))
    models = [half.state()["model"] for half in halves]
    assert same(*models)
    one = case(7)
    outputs = [half.predict(one.batch, one.embeddings()) for half in halves]
    assert torch.equal(*outputs)
    plain = Replica(DenseSpec(module=Net(), optimizer=sgd))
    plain.restore(halves[0].state())
    assert torch.equal(plain.predict(one.batch, one.embeddings()), outputs[0])
    given = [one.embeddings() for _ in halves]  # whose gradients are those of the live parameters
    for half, each in zip(halves, given, strict=True):
        drop(half.compute(one.batch, each))
    assert not torch.equal(*(each.blocks[0].values.grad for each in given))


def test_a_checkpoint_is_every_groups_and_the_centres(halves):
    halves, pool = halves
    list(pool.map(train, halves, (0, 100)))
    plain = Replica(DenseSpec(module=Net(), optimizer=sgd))
    list(pool.map(lambda half: half.restore(plain.state()), halves))
    one, given = case(7), []
    for half in (plain, *halves):
        given.append(one.embeddings())
        drop(half.compute(one.batch, given[-1]))
    assert all(torch.equal(each.blocks[0].values.grad, given[0].blocks[0].values.grad) for each in given[1:])
    list(pool.map(lambda half: half.sync(), halves))
    assert same(halves[1].state()["model"], plain.state()["model"])


class Beside:
    """One of two trainers, of which the other has 3 in every buffer."""

    first, size = True, 2

    def barrier(self):
        pass

    def all_reduce(self, tensor):
        tensor += 3


class Remembering(Net):
    """Keeps a running moment on trainers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moment", torch.ones(2))


def test_moments_that_trainers_keep_are_averaged_over_them():
    with site(1, kind=InThread, net=Remembering) as group:
        half = group.trainer(Beside())
        before = half.module.wide[1].running_mean.clone()
        half.sync()
        assert half.module.moment.tolist() == [2.0, 2.0]
        assert torch.equal(half.module.wide[1].running_mean, before)


def test_rounds_wait_for_a_group_until_all_its_trainers_stand_still():
    with ExitStack() as stack:
        dense = InThread(
            stack,
            DenseServer(index=0, num_replicas=2, averaging="ma", rate=None, address="shm://", secret=SECRET),
        )
        averaging = AveragedWith(servers=[dense.address], group=0, place=0, every_steps=1, trainers=2)
        group = stack.enter_context(site(1, kind=InThread, averaging=lambda place: averaging))
        trainers = [group.trainer(averaged=True) for _ in range(2)]
        other = Shadow(list(Net().parameters()), [connect(dense.address, secret=SECRET)], 1, 1, Stats())
        stack.callback(other.close)
        other.stepped()
        trainers[0].leave()
        train(trainers[1], 0)  # which goes on, and its group with it
        until = time.monotonic() + 20
        while not (rounds := other._stats.counters["averaging_rounds"]):
            assert time.monotonic() < until
            time.sleep(0.001)
        (told,) = other.processes().values()
        assert told["counters"]["rounds"] == rounds == 1
        trainers[1].leave()
        other.stepped()
        while other._stats.counters["averaging_rounds"] == rounds:
            assert time.monotonic() < until
            time.sleep(0.001)
