"""Queues of work for shards: the order on each shard, what a caller waits for, and errors."""

import logging
import threading
from concurrent.futures import Future

import pytest

from girih.sparse.routing.shard_queues import ShardQueues
from girih.telemetry.stats import Stats


@pytest.fixture
def queues():
    made = []

    def make(num_shards, num_threads):
        made.append(ShardQueues(num_shards, num_threads, Stats()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ended(queues, do, awaited=None, **options):
    """Puts work; gives a future of its error, or of None."""
    future = Future()
    awaited = range(len(queues.parts)) if awaited is None else awaited
    queues.put("work", do, future.set_result, awaited, **options)
    return future


@pytest.mark.parametrize(
    ("num_shards", "num_threads", "sizes"),
    [(1, 8, [1]), (3, 8, [1, 1, 1]), (416, 8, [52] * 8), (5, 2, [2, 3])],
)
def test_a_few_threads_share_any_number_of_shards(queues, num_shards, num_threads, sizes):
    parts = queues(num_shards, num_threads).parts
    assert [len(part) for part in parts] == sizes
    assert [shard for part in parts for shard in part] == list(range(num_shards))


def test_each_shard_works_in_the_order_of_requests_whoever_is_slow(queues):
    own, held = queues(6, 3), [threading.Event() for _ in range(20)]
    seen = [[] for _ in range(6)]

    def work(number):
        def do(shards):
            if shards.start == 2 * (number % 3):
                held[number].wait(20)
            for shard in shards:
                seen[shard].append(number)

        return do

    futures = [ended(own, work(number)) for number in range(20)]
    for event in reversed(held):
        event.set()
    own.drain()
    assert [future.result(0) for future in futures] == [None] * 20
    assert seen == [list(range(20))] * 6


def test_a_caller_waits_for_its_parts_alone(queues):
    own, gate = queues(2, 2), threading.Event()
    slow = ended(own, lambda shards: shards.start == 1 and gate.wait(20))
    quick = ended(own, lambda shards: None, [0])
    both, none = ended(own, lambda shards: None), ended(own, lambda shards: None, [])
    assert quick.result(20) is None
    assert none.done()
    assert not slow.done()
    assert not both.done()
    assert own.num_waiting == 2
    gate.set()
    own.drain()
    assert both.done()
    assert own.num_waiting == 0
    assert own.is_idle


def test_small_work_is_done_at_once_only_if_nothing_is_before_it(queues):
    own, gate, threads = queues(2, 2), threading.Event(), []

    def note(shards):
        threads.append(threading.current_thread())

    assert ended(own, note, at_once=True).done()
    assert threads == [threading.current_thread()] * 2
    ended(own, lambda shards: gate.wait(20))
    later = ended(own, note, at_once=True)
    assert not later.done()
    gate.set()
    later.result(20)
    assert threading.current_thread() not in threads[2:]


def test_the_error_of_the_first_part_is_told_and_others_are_logged(queues, caplog):
    own = queues(4, 4)

    def fail(shards):
        if shards.start:
            raise ValueError(str(shards.start))

    assert str(ended(own, fail).result(20)) == "1"
    assert str(ended(own, fail, [3, 2]).result(20)) == "2"
    with caplog.at_level(logging.ERROR):
        assert ended(own, fail, [0]).result(20) is None
        own.drain()
    assert "work failed" in caplog.text
    assert ended(own, lambda shards: None).result(20) is None


def test_time_counts_from_the_first_part_to_the_last_and_once(queues):
    own = queues(3, 3)
    for _ in range(2):
        ended(own, lambda shards: None)
        own.drain()
    assert sum(own._stats.spans.read()["work"]["counts"]) == 2
    assert own._stats.busy.seconds() > 0
