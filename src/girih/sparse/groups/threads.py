"""Work cut into parts that run side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
FEW_IDS = 8192  # fewer are done by one thread before another one is awake


def each(pool: ThreadPoolExecutor | None, num_parts: int, work: Callable[[int], T], num_ids: int) -> list[T]:
    """Does the parts side by side, the first one here; those of a small batch, or without a pool, in turn."""
    if pool is None or num_ids < FEW_IDS:
        return [work(part) for part in range(num_parts)]
    others = [pool.submit(work, part) for part in range(1, num_parts)]
    try:
        first = work(0)
    finally:  # whatever happens, nobody works on after this
        wait(others)
    return [first, *(other.result() for other in others)]
