"""Shares, and readers that go on, as plain objects: without processes, threads and files."""

import random

import pytest

from girih.comm.rpc import Frame, Reply
from girih.errors import Lost, WireError
from girih.services.loader import BatchReplay, ShareQueues
from girih.sparse.halves.worker_requests import RetryingRequests

NUM_SHARES = 30


@pytest.mark.parametrize("seed", range(10))
def test_each_request_gets_its_share_in_whatever_order_both_come(seed):
    chance, queues, answered = random.Random(seed), ShareQueues(next_number=5), {}
    requests, shares = list(range(5, 5 + NUM_SHARES)), list(range(5, 5 + NUM_SHARES))
    chance.shuffle(requests)
    while requests or shares:
        if shares and (not requests or chance.random() < 0.5):
            queues.ready.append(f"share {shares.pop(0)}")
        else:
            number = requests.pop()
            queues.waiting[number] = f"request {number}"
        answered |= {request: answer for answer, request in queues.match()}
    assert answered == {f"request {n}": f"share {n}" for n in range(5, 5 + NUM_SHARES)}
    assert not queues.ready
    assert not queues.waiting


def test_what_comes_after_the_last_share_is_told_so():
    queues = ShareQueues()
    queues.waiting |= {0: "first", 7: "beyond"}
    queues.last = "over"
    queues.ready.append("share")
    assert queues.match() == [("share", "first"), ("over", "beyond")]
    queues.waiting[1] = "later"
    assert queues.match() == [("over", "later")]


class Scan:
    """A reader of whole numbers up to an end."""

    def __init__(self, first, end):
        self.numbers, self.is_closed = iter(range(first, end)), False

    def __next__(self):
        return next(self.numbers), None

    def close(self):
        self.is_closed = True


class Scans:
    """Readers that begin where they are asked to, and how many did."""

    def __init__(self, end=100):
        self.begun, self.end = [], end

    def reader(self, epoch, start):
        self.begun.append(Scan(start, self.end))
        return self.begun[-1]


def test_a_reader_goes_on_to_a_share_that_is_near_and_another_one_begins_elsewhere():
    scans = Scans()
    replay = BatchReplay(scans)

    def batch(share, trainer=0, number=1):
        return replay.batch(trainer, number, share, 0, share, most_skipped=3)

    assert [batch(share) for share in (4, 5, 7, 10)] == [4, 5, 7, 10]
    assert len(scans.begun) == 1
    assert batch(14) == 14  # too far
    assert batch(13) == 13  # behind it
    assert batch(14, number=2) == 14  # of another pass
    assert [scan.is_closed for scan in scans.begun] == [True, True, True, False]
    assert batch(20, trainer=1) == 20
    replay.pass_by(0, 15)
    assert not scans.begun[3].is_closed
    replay.pass_by(0, 16)
    assert scans.begun[3].is_closed
    replay.close()
    assert all(scan.is_closed for scan in scans.begun)


def test_a_share_that_is_not_there_is_refused():
    scans = Scans(end=3)
    with pytest.raises(WireError, match="share 3 of pass 1: no batch begins there"):
        BatchReplay(scans).batch(0, 1, 3, 0, 3, most_skipped=1)
    assert scans.begun[0].is_closed


class Worker:
    """An embedding worker that forgets everything now and then: its calls wait until the test answers them."""

    def __init__(self):
        self.calls = []

    def call(self, kind, fields, arrays):
        self.calls.append((kind, fields, Reply("worker", kind, lambda _, timeout_s: timeout_s)))
        return self.calls[-1][2]


class AtOnce:
    """Does work as soon as it is submitted."""

    def submit(self, work, *arguments):
        work(*arguments)


def test_a_request_is_made_again_with_its_ids_until_it_is_answered_and_the_next_one_after_it():
    worker, samples = Worker(), iter([(0, 8), (0, 9)])
    requests = RetryingRequests([worker], (0, 7), lambda: next(samples), AtOnce())
    pulled, pushed = requests.ask(1, (5,)), requests.ask(2, (6,))
    for _ in range(2):
        worker.calls[-1][2].finish(Lost("restarted"))
        assert not pulled.done()
    worker.calls[-1][2].finish(Frame(1, (3,)))
    assert pulled.result().fields == (3,)
    worker.calls[-1][2].finish(Frame(2))
    assert pushed.done()
    assert [(kind, fields) for kind, fields, _ in worker.calls] == [
        (1, (7, 5)), (1, (8, 5)), (1, (9, 5)), (2, (9, 6)),
    ]  # fmt: skip


def test_ids_that_cannot_be_had_again_fail_the_request():
    def again():
        raise WireError("the loader is gone")

    worker = Worker()
    pulled = RetryingRequests([worker], (0, 7), again, AtOnce()).ask(1)
    worker.calls[-1][2].finish(Lost("restarted"))
    with pytest.raises(WireError, match="the loader is gone"):
        pulled.result()
