"""Algorithms that average replicas (EASGD, MA, BMUF).

They are arithmetic on flat parameters. The module also lists the requests to dense servers. It does not import torch.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import ClassVar

import numpy as np

from girih.kernels.cpu.arrays import F32


class MA:
    """x ← (1 − α) x + α x̄ for all replicas x together, where x̄ is their mean.

    Args:
        rate: α; None takes 1, the mean itself.
    """

    together: ClassVar[bool] = True

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        self.rate = np.float32(1.0 if rate is None else rate)

    def begin(self, model: F32) -> None:
        """Starts with the same parameters, float32[P], on all replicas. MA keeps no state between rounds."""

    def round(self, replicas: F32) -> F32:
        """Runs one round on float32[R, P]. Returns the numbers to add to each replica's parameters, float32[R, P]."""
        return self.rate * (self.model(replicas) - replicas)

    def model(self, replicas: F32) -> F32:
        """The model to evaluate and save, float32[P], from replicas float32[R, P]. Changes nothing.

        It is their mean, because the global model of BMUF lacks the updates since the last round.
        """
        mean: F32 = replicas.mean(axis=0)
        return mean


class BMUF(MA):
    """G = x̄ − W, Δ ← η Δ + ζ G, W ← W + Δ, and x ← (1 − α) x + α W for all replicas x together, with their mean x̄.

    This is the classical block momentum. The block learning rate ζ is 1 and the block momentum η is 1 − 1 /
    ``num_replicas``, as in Chen and Huo.

    Args:
        rate: α; None takes 1, the global model itself.

    Attributes:
        whole: W, the global model, float32[P].
        update: Δ, of the last round, float32[P].
    """

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        super().__init__(num_replicas, rate)
        self.momentum = np.float32(1 - 1 / num_replicas)
        self.whole = self.update = np.empty(0, np.float32)

    def begin(self, model: F32) -> None:
        """See :class:`MA`. The momentum starts at 0."""
        self.whole, self.update = model.copy(), np.zeros_like(model)

    def round(self, replicas: F32) -> F32:
        """See :class:`MA`."""
        self.update *= self.momentum
        self.update += self.model(replicas) - self.whole
        self.whole += self.update
        return self.rate * (self.whole - replicas)


MOVING_RATE = 0.9
"""β: with one round of each replica, the centre moves by this part to their mean. Zhang et al.: α = β / replicas."""


class EASGD:
    """x ← x − α (x − x̃) and x̃ ← x̃ + α (x − x̃), for one replica x after the other. x̃ is the centre.

    Both change by the same amount, so the sum of all replicas and the centre stays the same.

    Args:
        rate: α; None takes 0.9 / ``num_replicas``.

    Attributes:
        center: x̃, float32[P].
    """

    together: ClassVar[bool] = False

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        self.rate = np.float32(MOVING_RATE / num_replicas if rate is None else rate)
        self.center = np.empty(0, np.float32)

    def begin(self, model: F32) -> None:
        """See :class:`MA`."""
        self.center = model.copy()

    def round(self, replicas: F32) -> F32:
        """See :class:`MA`."""
        corrections = np.empty_like(replicas)
        for replica, correction in zip(replicas, corrections, strict=True):
            np.multiply(self.center - replica, self.rate, out=correction)
            self.center -= correction
        return corrections

    def model(self, replicas: F32) -> F32:
        """Returns the centre."""
        return self.center.copy()


Averaging = EASGD | MA
"""An algorithm with its state between rounds. If ``together``, a round needs all replicas, otherwise one."""
BY_NAME: dict[str, type[Averaging]] = {"easgd": EASGD, "ma": MA, "bmuf": BMUF}
"""Algorithms by their name in ``[strategy]``. Each takes the number of replicas and the elastic rate, or None."""


class DenseVerb(IntEnum):
    """Requests, with the integers and arrays of each.

    - BEGIN: (vector,); float32[P], the parameters of all replicas → ().
    - AVERAGE: (replica, vector); float32[P], its parameters → (); float32[P], the numbers to add to them: zeros if
      some replicas have left.
    - LEAVE: (replica, vector): rounds do not wait for this replica until all replicas have met → ().
    - MEET: (replica, vector); float32[P], its parameters, float32[Q], its buffers → (), once all replicas have met;
      float32[P], the model to evaluate and save, float32[Q], the mean of the buffers.
    - STATS: (with spans) → text.
    """

    BEGIN = 1
    AVERAGE = 2
    LEAVE = 3
    MEET = 4
    STATS = 5


def ranges(num_numbers: int, num_servers: int) -> list[slice]:
    """The range of the flat parameters of each server, in order. The lengths are about equal."""
    bounds = [num_numbers * place // num_servers for place in range(num_servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
