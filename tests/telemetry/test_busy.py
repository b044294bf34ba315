"""What counts as work of a process, and what as waiting; by threads that sleep for known times."""

import pickle
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum

import pytest

from girih.comm.service import Service, connect
from girih.data.read_ahead import ReadAhead
from girih.telemetry.busy import Busy, awaited, holding, waiting
from girih.telemetry.stats import Stats

SECRET = b"of this run"
TICK_S = 0.2  # of which 0.6 are what a busy machine may add


def about(seconds):
    return pytest.approx(seconds, abs=0.6 * TICK_S)


def test_work_counts_but_for_its_waits():
    busy = Busy()
    time.sleep(TICK_S)
    with busy.working():
        time.sleep(2 * TICK_S)
        assert busy.seconds() == about(2 * TICK_S)  # while it is under way
        with waiting(), waiting():  # the inner one adds nothing
            time.sleep(3 * TICK_S)
            assert busy.seconds() == about(2 * TICK_S)
        time.sleep(TICK_S)
    time.sleep(TICK_S)
    assert busy.seconds() == about(3 * TICK_S)
    with waiting():  # of a thread that does no work
        assert busy.seconds() == about(3 * TICK_S)


def test_what_fails_is_over():
    busy = Busy()

    def fails():
        with busy.working():
            with pytest.raises(KeyError), waiting():
                raise KeyError
            time.sleep(TICK_S)
            raise StopIteration

    with pytest.raises(StopIteration):
        fails()
    time.sleep(2 * TICK_S)
    assert busy.seconds() == about(TICK_S)


def test_several_threads_count_by_their_shares_and_a_moment_never_twice():
    def work(busy, share, seconds):
        with busy.working(share):
            time.sleep(seconds)

    for share, expected in ((0.5, 3), (1.0, 4)):
        busy = Busy()
        with ThreadPoolExecutor(2) as pool:
            pool.submit(work, busy, share, 2 * TICK_S)
            pool.submit(work, busy, share, 4 * TICK_S)
        assert busy.seconds() == about(expected * TICK_S)


def test_a_wait_for_a_helper_is_work_while_the_helper_works():
    busy, helper = Busy(), Busy()

    def help_out():
        with helper.working():
            time.sleep(3 * TICK_S)
            with waiting():  # for another process
                time.sleep(2 * TICK_S)

    with ThreadPoolExecutor(1) as pool, busy.working(0.5):
        future = pool.submit(help_out)
        time.sleep(TICK_S)
        awaited(future, helper)
    assert busy.seconds() == about(1.5 * TICK_S)
    assert helper.seconds() == about(3 * TICK_S)


def test_a_lock_that_another_thread_holds_is_waited_for():
    busy, lock = Busy(), threading.Lock()
    lock.acquire()
    threading.Timer(3 * TICK_S, lock.release).start()
    with busy.working(), holding(lock):
        assert lock.locked()
        time.sleep(TICK_S)
    assert not lock.locked()
    assert busy.seconds() == about(TICK_S)


def test_it_never_falls_whoever_reads_it():
    busy, over, read = Busy(), threading.Event(), []

    def work(share):
        while not over.is_set():
            with busy.working(share), waiting():
                pass

    threads = [threading.Thread(target=work, args=(1 / 3,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + 10 * TICK_S
    while time.monotonic() < until_s:
        read.append(busy.seconds())
    over.set()
    for thread in threads:
        thread.join()
    assert read == sorted(read)
    settled = busy.seconds()
    time.sleep(2 * TICK_S)
    assert busy.seconds() == pytest.approx(settled, abs=1e-6)  # thirds add up to nothing


def test_a_process_has_its_own():
    stats = Stats()
    with stats.busy.working():
        time.sleep(TICK_S)
    assert stats.reading()["busy_s"] == about(TICK_S)
    assert pickle.loads(pickle.dumps(stats)).reading()["busy_s"] == 0.0


def test_a_service_works_on_requests_and_not_while_it_asks_others():
    """Two real services: one works, the other one waits for its answer."""
    stats, stop = [Stats(), Stats()], threading.Event()
    clients, told = [], []

    def ask(request):
        time.sleep(TICK_S)
        clients[0].call(1).wait()
        request.reply()

    def answer(request):
        time.sleep(3 * TICK_S)
        request.reply()

    class Verb(IntEnum):
        ASK = 1

    class Server(Service):
        verbs = Verb

        def __init__(self, verb, stats):
            super().__init__(index=0, address="shm://", secret=SECRET, stats=stats)
            self.on_ask = verb

    with ThreadPoolExecutor(2) as pool:
        for own, verb in zip(stats, (answer, ask), strict=True):
            listening: Future[str] = Future()
            pool.submit(Server(verb, own).run, listening.set_result, stop)
            clients.append(connect(listening.result(20), secret=SECRET))
        told = [clients[1].call(1) for _ in range(2)]
        for each in told:
            each.wait()
        stop.set()
    for client in clients:
        client.close()
    assert [own.busy.seconds() for own in stats] == [about(6 * TICK_S), about(2 * TICK_S)]


def test_reading_ahead_is_work_of_who_waits_for_it_unless_it_waits_itself():
    def items():
        for _ in range(3):
            time.sleep(TICK_S)
            with waiting():  # for records that have yet to come
                time.sleep(2 * TICK_S)
            yield None

    busy = Busy()
    with busy.working(), ReadAhead(items(), 1) as ahead:
        assert len(list(ahead)) == 3
    assert busy.seconds() == about(3 * TICK_S)
