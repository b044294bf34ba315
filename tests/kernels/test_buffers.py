"""Memory is used again only when nobody can see it."""

import gc
import random
import threading
from itertools import pairwise

import numpy as np
import pytest

from girih.kernels.buffers import Buffers

LEAST_BYTES = Buffers().least_bytes


def place(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("rows", [0, 1, 1000, 100_000])
def test_arrays_are_as_asked_for_and_aligned(rows):
    buffers = Buffers()
    for dtype in (np.float32, np.int64, np.uint8):
        for _ in range(3):  # new memory, then memory that came back
            array = buffers.take(dtype, rows, 3)
            assert (array.shape, array.dtype) == ((rows, 3), dtype)
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert rows == 0 or place(array) % 64 == 0
            array[:] = 7
    assert buffers.take(np.int32, 5).shape == (5,)


def test_memory_comes_back_with_the_last_view(torch):
    buffers = Buffers()
    array = buffers.take(np.float32, LEAST_BYTES, 3)
    first, part = place(array), torch.from_numpy(array)[3:]
    seen = array[10:20, 1]
    del array
    gc.collect()
    assert place(buffers.take(np.float32, LEAST_BYTES, 3)) != first  # torch still sees it
    del part
    gc.collect()
    assert place(buffers.take(np.int32, LEAST_BYTES, 3)) != first  # numpy does
    del seen
    gc.collect()
    again = [buffers.take(np.int32, LEAST_BYTES, 3) for _ in range(3)]
    assert first in [place(array) for array in again]


def test_sizes_that_vary_little_are_served_by_the_same_memory():
    buffers, seen = Buffers(), set()
    for size in (1000, 1020, 990, 700, 1000, 1010):
        seen.add(place(buffers.take(np.int8, size * LEAST_BYTES)))
    assert len(seen) <= 2  # of two sizes, as they lie about a step


def test_what_is_taken_by_turns_is_always_the_same_memory():
    buffers = Buffers()
    first, second = (buffers.take(np.int8, 2 * LEAST_BYTES) for _ in range(2))
    made_first = place(first)
    del first
    del second
    for num_bytes in (2 * LEAST_BYTES, 2 * LEAST_BYTES - 100, LEAST_BYTES):
        assert place(buffers.take(np.int8, num_bytes)) == made_first
    assert place(buffers.take(np.int8, 3 * LEAST_BYTES)) != made_first
    assert place(buffers.take(np.int8, 2 * LEAST_BYTES)) == made_first


def test_little_more_is_kept_than_was_in_use_together():
    buffers, most = Buffers(), 0
    choose = random.Random(0)
    for _ in range(300):
        sizes = [choose.randrange(LEAST_BYTES, 40 * LEAST_BYTES) for _ in range(4)]
        most = max(most, sum(sizes))
        taken = [buffers.take(np.int8, size) for size in sizes]
        del taken
    kept = sum(len(memory) for free in buffers._free.values() for _, memory in free)
    assert most < kept <= 1.25 * 8 * most  # as much too large may one be
    assert not buffers._lent


def test_arrays_in_use_never_overlap():
    buffers, wrong = Buffers(), []

    def work(number):
        choose = random.Random(number)
        for _ in range(300):
            arrays = [buffers.take(np.int64, choose.choice((10, 9_000, 9_100, 20_000))) for _ in range(4)]
            for n, array in enumerate(arrays):
                array[:] = 10 * number + n
            ends = sorted((place(array), place(array) + array.nbytes) for array in arrays)
            wrong.extend(pair for pair in pairwise(ends) if pair[0][1] > pair[1][0])
            wrong.extend(
                (number, n) for n, array in enumerate(arrays) if not (array == 10 * number + n).all()
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
