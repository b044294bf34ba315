"""The background reader: order, errors, and threads that end."""

import gc
import threading
import time

import pytest

from girih.data.read_ahead import read_ahead


def no_threads():
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(thread.name == "girih-read-ahead" for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("depth", [1, 2, 100])
def test_items_come_in_order(depth):
    assert list(read_ahead(iter(range(50)), depth)) == list(range(50))
    assert no_threads()


def test_it_reads_up_to_depth_ahead_and_no_further():
    read = []

    def source():
        for item in range(100):
            read.append(item)
            yield item

    with read_ahead(source(), depth=3) as ahead:
        assert next(ahead) == 0
        deadline = time.monotonic() + 5
        while len(read) < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(read) == 5  # one consumed, three in the queue, one waiting to enter it
    assert no_threads()


def test_errors_come_after_the_items_before_them():
    def source():
        yield 1
        yield 2
        raise ValueError("broken")

    ahead = read_ahead(source(), depth=10)
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(ahead)
    assert list(ahead) == []
    assert no_threads()


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_closing_early_stops_the_thread_and_closes_the_source(consumed):
    closed = threading.Event()

    def source():
        try:
            item = 0
            while True:
                yield item
                item += 1
        finally:
            closed.set()

    ahead = read_ahead(source(), depth=2)
    for _ in range(consumed):
        next(ahead)
    ahead.close()
    assert closed.is_set()
    assert no_threads()
    assert list(ahead) == []
    ahead.close()


def test_dropping_the_last_reference_stops_the_thread():
    ahead = read_ahead(iter(int, 1), depth=2)
    next(ahead)
    del ahead
    gc.collect()
    assert no_threads()


def test_it_overlaps_reading_with_work():
    def slow():
        for item in range(10):
            time.sleep(0.02)
            yield item

    begin = time.monotonic()
    for _ in read_ahead(slow(), depth=2):
        time.sleep(0.02)
    assert time.monotonic() - begin < 0.38
