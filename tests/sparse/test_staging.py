"""Rows and gradients that go between the wire and a device: the same as without, and nothing waits for them but who needs them."""

import threading

import numpy as np
import pytest
import torch

import girih
from girih.comm.group.trainers import Vote
from girih.errors import GirihError
from girih.sparse.halves.staging import Staging
from remote_site import batch_of, give, site, spec_of
from support.votes import push, refuse

CPU = torch.device("cpu")
STALENESS = 4


def staged():
    return Staging(CPU)


def pushed(pulled, step):
    return push(pulled, step)


def pushed_late(pulled, step):
    """As a dense half does whose device decides, and for which the rows refuse nothing."""
    vote = Vote(deferred=True)
    pending = pulled.push(step, 1.0, vote)
    assert vote.error_from(vote.reported.tolist()) is None
    return pending


def dropped_late(pulled, step):
    return pulled.push(step, 1.0, Vote(torch.tensor(True), deferred=True))


def in_flight(staging, push=pushed, drop=lambda pulled, step: refuse(pulled), **packets):
    """Steps of which up to ``STALENESS`` are read ahead; what is read of all keys, and its staleness, in the end."""
    with site(spec_of(optimizer=girih.optim.Adagrad(lr=0.5)), staging=staging, **packets) as here:
        (trainer,) = here.trainers
        batches = [
            batch_of(*np.random.default_rng(number).integers(0, 30, (2, 5 + number % 3)))
            for number in range(15)
        ]
        ahead, found = [], []
        for number, batch in enumerate(batches):
            ahead.append((number, trainer.pull(here.keep(batch))))
            if len(ahead) > STALENESS:
                number, pulled = ahead.pop(0)
                give(pulled, 1 + number)
                # those pulled later were asked for before, and so read rows that this does not move
                pending = (drop if number == 3 else push)(pulled, number + 1)
                pending.wait()
                assert pending.done()
                found.append(pulled.staleness)
        for _, pulled in ahead:
            pulled.discard()
        trainer.sync()
        return here.peek(batch_of(range(30), range(30))), found


@pytest.mark.parametrize("half", [False, True])
def test_several_batches_in_flight_are_those_without_staging(half):
    packets = {"float16_embeddings": half, "float16_gradients": half}
    plain, staleness = in_flight(None, **packets)
    found, same = in_flight(staged, **packets)
    np.testing.assert_array_equal(found, plain)
    assert same == staleness


def test_what_a_device_decides_is_what_a_host_does():
    plain, staleness = in_flight(None)
    found, same = in_flight(staged, pushed_late, dropped_late)
    np.testing.assert_array_equal(found, plain)
    assert same == staleness


def test_gradients_that_are_not_finite_move_nothing_and_are_named():
    with site(staging=staged) as here:
        (trainer,) = here.trainers
        batch = batch_of([1, 2], [1, 2])
        before = here.peek(batch)
        pulled = trainer.pull(here.keep(batch))
        (block,) = give(pulled, 1).blocks
        block.values.grad[1, block.features.index("item"), 2] = float("inf")
        vote = Vote(deferred=True)
        pulled.push(7, 1.0, vote).wait()
        assert (
            str(vote.error_from(vote.reported.tolist()))
            == "the gradient of feature 'item' is NaN or infinite"
        )
        np.testing.assert_array_equal(here.peek(batch), before)
        assert trainer.last_step == 7
        vote.rollback()
        assert trainer.last_step == 0


class Moment:
    """Stands for an event of a GPU, which has not come yet."""

    def __init__(self):
        self.come = threading.Event()

    def query(self):
        return self.come.is_set()

    def synchronize(self):
        assert self.come.wait(30)


@pytest.mark.parametrize("push", [pushed, pushed_late])
def test_a_push_waits_for_no_gradient_and_is_sent_in_order_once_it_has_come(monkeypatch, push):
    with site(staging=staged) as here:
        (trainer,) = here.trainers
        moments = [Moment(), Moment()]
        queue = iter(moments)
        monkeypatch.setattr(trainer.staging.back, "recorded", lambda: next(queue))
        batch = batch_of([1], [1])
        before = here.peek(batch)
        pulled = [trainer.pull(here.keep(batch)) for _ in range(3)]
        for each in pulled:
            give(each, 1)
        pending = [pushed(pulled[0], 1), push(pulled[1], 2), refuse(pulled[2])]
        moments[1].come.set()  # the later one first
        assert not any(each.done() for each in pending)
        np.testing.assert_array_equal(here.peek(batch), before)
        moments[0].come.set()
        for each in pending:
            each.wait()
        np.testing.assert_allclose(before - here.peek(batch), 2, rtol=1e-6)


def test_what_fails_on_the_way_is_raised_where_it_is_waited_for(monkeypatch):
    with site(staging=staged) as here:
        (trainer,) = here.trainers
        pulled = trainer.pull(here.keep(batch_of([1], [1])))
        give(pulled, 1)
        monkeypatch.setattr(trainer.staging.to, "send", lambda arrays: 1 / 0)
        late = trainer.pull(here.keep(batch_of([2], [2])))
        with pytest.raises(ZeroDivisionError):
            late.wait()
        pulled._worker._sample = (0, 10_000)  # which no worker has
        pending = push(pulled, 1)
        with pytest.raises(GirihError, match="sample 10000 is not kept here"):
            pending.wait()
        assert pending.done()
        trainer._pending.clear()


def test_a_refusal_does_not_undo_the_step_of_another_net_that_was_pushed_meanwhile():
    with site() as here:
        (trainer,) = here.trainers
        refused, other = (trainer.pull(here.keep(batch_of([1], [1]))) for _ in range(2))
        for each in (refused, other):
            give(each, 1)
        vote = Vote(torch.tensor(True))
        refused.push(1, 1.0, vote).wait()
        push(other, 1).wait()
        vote.rollback()
        assert trainer.last_step == 1
