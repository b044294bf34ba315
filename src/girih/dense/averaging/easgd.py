"""EASGD: replicas and a centre pull at each other (Zhang, Choromanska, LeCun: "Deep learning with elastic averaging SGD",
NeurIPS 2015, Algorithm 1; in the background as in ShadowSync, Zheng et al., arXiv 2003.03477).

Shapes: R replicas of a round, P numbers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

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

    def begin(self, model: NDArray[np.float32]) -> None:
        """See :class:`~girih.dense.averaging.algorithm.Averaging`."""
        self.center = model.copy()

    def round(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """See :class:`~girih.dense.averaging.algorithm.Averaging`."""
        corrections = np.empty_like(replicas)
        for replica, correction in zip(replicas, corrections, strict=True):
            np.multiply(self.center - replica, self.rate, out=correction)
            self.center -= correction
        return corrections

    def model(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """The centre."""
        return self.center.copy()
