"""Times of a GPU and ids by a Zipf law, for gpu.py and the modules beside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.kernels.gpu import jit

HEAD_START = 60_000_000
"""Cycles for which the device is kept busy, so that the host runs ahead. A first batch claims pinned memory, which takes long."""


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the device's time that some work takes."""
    if jit.INTERPRETED:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end)


def wait_for_device() -> None:
    """Returns when the device is done with all work so far."""
    if not jit.INTERPRETED:
        torch.cuda.synchronize()


def zipf(rng: np.random.Generator, exponent: float, rows: int, size: int) -> NDArray[np.int64]:
    """Ids by a Zipf law over ``rows`` ranks; the device searches them, which takes a CPU seconds for a benchmark."""
    draws = torch.from_numpy(rng.random(size)).to(jit.device())
    ids = torch.searchsorted(_ends(exponent, rows), draws, right=False).clamp_(max=rows - 1)
    return np.asarray(ids.cpu().numpy())


def distinct(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sorted ids, each once; sorted by the device."""
    return np.asarray(torch.unique(torch.from_numpy(ids).to(jit.device())).cpu().numpy())


@cache
def _ends(exponent: float, rows: int) -> Tensor:
    """float64[rows] on the device: the share of ids up to each rank."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return torch.from_numpy(np.cumsum(weights / weights.sum())).to(jit.device())
