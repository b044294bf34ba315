"""Memory is used again only when nobody can see it."""

import threading
from itertools import pairwise

import numpy as np
import torch

from girih.sparse.buffers import Buffers


def place(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_with_the_last_view():
    buffers = Buffers()
    array = buffers.take(np.float32, 1000, 3)
    assert (array.shape, array.dtype, place(array) % 64) == ((1000, 3), np.float32, 0)
    first, part = place(array), torch.from_numpy(array)[3:]
    del array
    assert place(buffers.take(np.float32, 1000, 3)) != first  # torch still sees it
    del part
    again = [buffers.take(np.float32, 1000, 3) for _ in range(2)]
    assert first in [place(array) for array in again]


def test_arrays_in_use_never_overlap():
    buffers, taken = Buffers(), []

    def take():
        for size in (10, 1000, 77, 1000):
            taken.append(buffers.take(np.int64, size))

    threads = [threading.Thread(target=take) for _ in range(30)]  # more than are kept
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = sorted((place(array), place(array) + array.nbytes) for array in taken)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
