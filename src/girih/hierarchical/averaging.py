"""Algorithms that average replicas (EASGD, MA, BMUF), as arithmetic on flat parameters, and the requests to dense servers that carry it out. No torch."""

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
        """Begins anew, float32[P]: all replicas have these parameters. Nothing is kept from one round to the next here."""

    def round(self, replicas: F32) -> F32:
        """One round, float32[R, P]; returns float32[R, P], what each replica is to add to its parameters."""
        return self.rate * (self.model(replicas) - replicas)

    def model(self, replicas: F32) -> F32:
        """The model that is evaluated and saved, float32[P], while the replicas have float32[R, P]; nothing moves.

        It is their mean: the global model of BMUF lacks what they learned since the last round.
        """
        mean: F32 = replicas.mean(axis=0)
        return mean


class BMUF(MA):
    """G = x̄ − W, Δ ← η Δ + ζ G, W ← W + Δ, and x ← (1 − α) x + α W for all replicas x together, where x̄ is their mean.

    This is the classical block momentum. As Chen and Huo have it, the block learning rate ζ is 1 and the block momentum η is
    1 − 1 / ``num_replicas``.

    Args:
        rate: α; None takes 1, the global model itself.

    Attributes:
        whole: W, the global model, float32[P]. update: Δ, of the last round, float32[P].
    """

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        super().__init__(num_replicas, rate)
        self.momentum = np.float32(1 - 1 / num_replicas)
        self.whole = self.update = np.empty(0, np.float32)

    def begin(self, model: F32) -> None:
        """See :class:`MA`; the momentum begins at 0."""
        self.whole, self.update = model.copy(), np.zeros_like(model)

    def round(self, replicas: F32) -> F32:
        """See :class:`MA`."""
        self.update *= self.momentum
        self.update += self.model(replicas) - self.whole
        self.whole += self.update
        return self.rate * (self.whole - replicas)


MOVING_RATE = 0.9
"""β, by which the centre moves to the mean of all replicas in as many rounds as there are; Zhang et al. set α = β / replicas."""


class EASGD:
    """x ← x − α (x − x̃) and x̃ ← x̃ + α (x − x̃), for one replica x after the other; x̃ is the centre.

    Both move by the same numbers, so that the sum of all replicas and the centre stays what it is.

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
        """The centre."""
        return self.center.copy()


Averaging = EASGD | MA
"""One algorithm, with what it keeps of the rounds so far. ``together``: whether a round takes the parameters of all replicas; else each
replica has rounds of its own."""
BY_NAME: dict[str, type[Averaging]] = {"easgd": EASGD, "ma": MA, "bmuf": BMUF}
"""Algorithms by their name in ``[strategy]``: each is made of the number of replicas and the elastic rate, or None."""


class DenseVerb(IntEnum):
    """Requests, with the integers and arrays of each:

    BEGIN: (vector,); float32[P], the parameters of all replicas → ().
    AVERAGE: (replica, vector); float32[P], its parameters → (); float32[P], what it is to add to them: zeros where some have left.
    LEAVE: (replica, vector): rounds do not wait for it, until all replicas have met → ().
    MEET: (replica, vector); float32[P], its parameters, float32[Q], its buffers → (), once all replicas have met; float32[P], the
        model to evaluate and save, float32[Q], the mean of the buffers.
    STATS: (with spans) → text.
    """

    BEGIN = 1
    AVERAGE = 2
    LEAVE = 3
    MEET = 4
    STATS = 5


def ranges(num_numbers: int, num_servers: int) -> list[slice]:
    """The range of the flat parameters of each server: of near-equal length, in order."""
    bounds = [num_numbers * place // num_servers for place in range(num_servers + 1)]
    return [slice(begin, end) for begin, end in pairwise(bounds)]
