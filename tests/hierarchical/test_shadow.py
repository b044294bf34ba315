"""Averaging in the background, with dense servers behind real sockets: it never blocks training, and meetings wait for it."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

from girih.comm.group import TrainerGroup
from girih.comm.service import connect
from girih.dense.half import DenseSpec
from girih.errors import ConfigError, RemoteError
from girih.hierarchical.averaging import BY_NAME, EASGD, MA, ranges
from girih.hierarchical.hogwild import HogwildReplica
from girih.hierarchical.shadow import Shadow
from girih.services.dense_server import DenseServer
from girih.telemetry.stats import Stats
from support.dense_suite import sgd

SECRET = b"of this run"
MOST_S = 30


@pytest.fixture
def serve():
    """Starts dense servers in threads; returns a function that makes a replica's averaging of some parameters."""
    stop, shadows, threads = threading.Event(), [], []

    def begin(num_replicas, num_servers, averaging, rate=None):
        addresses = []
        for index in range(num_servers):
            told = threading.Event()
            server = DenseServer(
                index=index,
                num_replicas=num_replicas,
                averaging=averaging,
                rate=rate,
                address="shm://",
                secret=SECRET,
            )
            run = (lambda address, told=told: (addresses.append(address), told.set()), stop)
            threads.append(threading.Thread(target=server.run, args=run))
            threads[-1].start()
            assert told.wait(MOST_S)

        def shadow(replica, parameters, every_steps=1):
            servers = [connect(address, secret=SECRET) for address in addresses]
            shadows.append(Shadow(parameters, servers, replica, every_steps, Stats()))
            return shadows[-1]

        return shadow

    yield begin
    for each in shadows:
        each.close()
    stop.set()
    for thread in threads:
        thread.join(MOST_S)
        assert not thread.is_alive()


def parameters(*numbers):
    return [nn.Parameter(torch.tensor([[n, n + 1]])) for n in numbers]


def flat(given):
    return torch.cat([each.detach().reshape(-1) for each in given]).numpy().copy()


def until(condition):
    end = time.monotonic() + MOST_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def rounds_of(shadow):
    return shadow._stats.counters["averaging_rounds"]


def step_and_average(shadow):
    before = rounds_of(shadow)
    shadow.stepped()
    until(lambda: rounds_of(shadow) > before)


def meet(*shadows):
    found = {}
    threads = [threading.Thread(target=lambda s=s: found.update({s: s.meet()[0]})) for s in shadows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MOST_S)
    return [found[each] for each in shadows]


def test_ranges_cover_all_numbers_once():
    for size, count in ((10, 3), (2, 5), (0, 2), (7, 7)):
        parts = ranges(size, count)
        assert [n for part in parts for n in range(part.start, part.stop)] == list(range(size))
        assert max(part.stop - part.start for part in parts) <= -(-size // count)


def test_elastic_averaging_over_several_servers_is_that_of_one_vector(serve):
    make = serve(2, 3, "easgd", 0.25)
    one, two = parameters(1.0, 4.0), parameters(-3.0, 0.0)
    shadows = make(0, one), make(1, two)
    reference = EASGD(2, 0.25)
    reference.begin(flat(one))
    shadows[0].begin()
    for _ in range(3):
        for shadow, own in zip(shadows, (one, two), strict=True):
            expected = flat(own) + reference.round(flat(own)[None])[0]
            step_and_average(shadow)
            np.testing.assert_array_equal(flat(own), expected)
    before = flat(one)
    for model in meet(*shadows):
        np.testing.assert_array_equal(model, reference.center)
    np.testing.assert_array_equal(flat(one), before)
    sent = shadows[0]._stats.wire_bytes()["dense"]
    assert sent == (1 + 3 + 1) * flat(one).nbytes  # what began, three rounds, a meeting
    assert sum(p["counters"]["rounds"] for p in shadows[0].processes().values()) == 3 * 6


def test_rounds_begin_every_so_many_steps(serve):
    shadow = serve(1, 1, "easgd")(0, parameters(1.0), every_steps=3)
    shadow.begin()
    for _ in range(3):
        shadow.stepped()
        shadow.stepped()
        assert not shadow._is_due()
        step_and_average(shadow)
    assert rounds_of(shadow) == 3


def test_a_slow_server_does_not_hold_up_steps_and_what_they_learn_meanwhile_stays(serve, monkeypatch):
    """A round that takes as long as a thousand steps; every number of this replica moves by one in each of them."""
    begun, go_on, original = threading.Event(), threading.Event(), EASGD.round

    def slow(self, replicas):
        begun.set()
        assert go_on.wait(MOST_S)
        return original(self, replicas)

    monkeypatch.setattr(EASGD, "round", slow)
    own = parameters(0.0)
    shadow = serve(1, 1, "easgd", 0.5)(0, own)
    shadow.begin()
    shadow.stepped()
    assert begun.wait(MOST_S)
    with torch.no_grad():
        for _ in range(1000):
            own[0].add_(1.0)
            shadow.stepped()
    assert rounds_of(shadow) == 0  # all of them while one round was under way
    go_on.set()
    until(lambda: rounds_of(shadow) >= 1)
    meet(shadow)
    assert flat(own)[0] > 400  # the centre, which was at 0, has pulled once or twice


@pytest.mark.parametrize("averaging", ["ma", "bmuf"])
def test_a_round_of_all_waits_for_the_last_one_and_a_meeting_ends_it(serve, averaging):
    make = serve(2, 2, averaging)
    one, two = parameters(0.0), parameters(8.0)
    first, second = make(0, one), make(1, two)
    first.begin()
    first.stepped()
    time.sleep(0.05)
    assert rounds_of(first) == 0
    second.stepped()
    until(lambda: rounds_of(first) == rounds_of(second) == 1)
    together = BY_NAME[averaging](2)
    together.begin(np.array([0.0, 1.0], np.float32))
    start = np.array([[0.0, 1.0], [8.0, 9.0]], np.float32)
    np.testing.assert_allclose(np.stack([flat(one), flat(two)]), start + together.round(start))
    for _ in range(2):  # a replica waits for the other, which comes to the meeting instead
        first.stepped()
        models = meet(first, second)
        np.testing.assert_array_equal(models[0], models[1])
        np.testing.assert_allclose(models[0], (flat(one) + flat(two)) / 2)


@pytest.mark.parametrize("averaging", ["ma", "bmuf"])
def test_a_round_that_one_has_left_moves_nothing(serve, averaging):
    make = serve(2, 2, averaging)
    one, two = parameters(0.0), parameters(8.0)
    first, second = make(0, one), make(1, two)
    first.begin()
    first.stepped()
    second.leave()  # before it waits for who still trains
    until(lambda: rounds_of(first) == 1)
    np.testing.assert_array_equal(flat(one), [0.0, 1.0])
    assert all(told["counters"].get("rounds", 0) == 0 for told in first.processes().values())
    meet(first, second)
    first.stepped()
    second.stepped()
    until(lambda: rounds_of(first) == 2 and rounds_of(second) == 1)
    together = BY_NAME[averaging](2)
    together.begin(np.array([0.0, 1.0], np.float32))
    start = np.array([[0.0, 1.0], [8.0, 9.0]], np.float32)
    np.testing.assert_allclose(np.stack([flat(one), flat(two)]), start + together.round(start))


def test_a_meeting_takes_the_mean_of_buffers_whatever_the_algorithm(serve):
    make = serve(2, 2, "easgd")
    shadows = make(0, parameters(0.0)), make(1, parameters(8.0))
    shadows[0].begin()
    moments = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)], [torch.tensor([3.0, 2.0, 1.0])]
    found = [None, None]

    def met(number):
        found[number] = shadows[number].meet(moments[number])[1]

    thread = threading.Thread(target=met, args=(1,))
    thread.start()
    met(0)
    thread.join(MOST_S)
    assert [each.tolist() for each in found] == [[2.0, 2.0, 2.0]] * 2


def test_what_goes_wrong_in_a_round_of_all_is_told_to_all(serve, monkeypatch):
    def fail(self, replicas):
        raise ValueError("no room")

    monkeypatch.setattr(MA, "round", fail)
    make = serve(2, 1, "ma")
    shadows = [make(number, parameters(1.0)) for number in range(2)]
    shadows[0].begin()
    for each in shadows:
        each.stepped()
    until(lambda: all(each._failure is not None for each in shadows))
    for each in shadows:
        with pytest.raises(RemoteError, match="no room"):
            each.stepped()


def test_parameters_of_other_numbers_than_float32_are_refused_by_name():
    spec = DenseSpec(module=nn.ModuleDict({"tower": nn.Linear(2, 1).double()}), optimizer=sgd)
    with pytest.raises(ConfigError, match=r"'tower\.weight' is float64; expected float32.* groups = 1"):
        HogwildReplica(spec, TrainerGroup(), nets=1, servers=[None])


def test_what_goes_wrong_in_a_round_is_raised_by_the_next_step(serve, monkeypatch):
    def fail(self, replicas):
        raise ValueError("no room")

    monkeypatch.setattr(EASGD, "round", fail)
    shadow = serve(1, 1, "easgd")(0, parameters(1.0))
    shadow.begin()
    shadow.stepped()
    until(lambda: shadow._failure is not None)
    with pytest.raises(RemoteError, match="no room"):
        shadow.stepped()
