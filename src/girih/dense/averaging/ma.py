"""MA, model averaging: replicas move to their mean (ShadowSync, Zheng et al., arXiv 2003.03477, its MA in the background).

Shapes: R replicas of a round, P numbers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


class MA:
    """x ← (1 − α) x + α x̄ for all replicas x together, where x̄ is their mean.

    Args:
        rate: α; None takes 1, the mean itself.
    """

    together: ClassVar[bool] = True

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        self.rate = np.float32(1.0 if rate is None else rate)

    def begin(self, model: NDArray[np.float32]) -> None:
        """No-op: nothing is kept from one round to the next."""

    def round(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """See :class:`~girih.dense.averaging.algorithm.Averaging`."""
        return self.rate * (self.model(replicas) - replicas)

    def model(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean of the replicas."""
        mean: NDArray[np.float32] = replicas.mean(axis=0)
        return mean
