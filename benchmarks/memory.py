"""What memory allows: random cache lines a second, the yardstick beside the sparse half.

A line is 64 bytes. Reads go to random lines of an array of huge pages that is far larger than any cache,
prefetched as far ahead as serves best: no program that has to read such lines can be faster.
"""

from __future__ import annotations

import mmap
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu.system import LINE_BYTES, prefetch

AHEAD = (8, 16, 32, 64)


@numba.njit(nogil=True)
def read_lines(lines: NDArray[np.int64], order: NDArray[np.int32], ahead: int) -> int:
    """Sums the first word of each line in the order given: ``lines`` int64[L, 8], ``order`` int32[N]."""
    total = 0
    for i in range(len(order)):
        if i + ahead < len(order):
            prefetch(lines, order[i + ahead])
        total += lines[order[i], 0]
    return total


def random_lines_per_s(num_threads: int, size_bytes: int = 2 << 30, num_reads: int = 1 << 20) -> float:
    """Random cache lines a second that ``num_threads`` threads read together; the best distance's median."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    lines = np.frombuffer(memory, np.int64).reshape(-1, LINE_BYTES // 8)
    lines[:, 0] = 1  # touched, so that pages are really there
    rng = np.random.default_rng(0)
    orders = [rng.integers(0, len(lines), num_reads, dtype=np.int32) for _ in range(num_threads)]
    read_lines(lines, orders[0][:64], 8)
    with ThreadPoolExecutor(num_threads) as pool:

        def seconds(ahead: int) -> float:
            start = time.perf_counter()
            list(pool.map(lambda order: read_lines(lines, order, ahead), orders))
            return time.perf_counter() - start

        best = min(statistics.median(seconds(ahead) for _ in range(5)) for ahead in AHEAD)
    return num_threads * num_reads / best


def lines_of_step(num_unique: int, dim: int, state: int) -> int:
    """Cache lines that one step over a growing table cannot avoid, each counted once.

    A key's place in the index (1), its metadata (1: that it was used must be noted), and its row of
    ``dim`` embedding columns and ``state`` columns of the optimizer. What the forward pass read is counted
    as still in the cache for the update; dedup, the pooled output and its gradient are not counted.
    """
    return num_unique * (2 + -(-4 * (dim + state) // LINE_BYTES))
