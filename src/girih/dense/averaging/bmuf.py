"""BMUF: the mean of replicas moves a global model, with momentum over rounds, and the replicas move to it (Chen, Huo: "Scalable
training of deep learning machines by incremental block training with intra-block parallel optimization and blockwise
model-update filtering", ICASSP 2016, §2; in the background as in ShadowSync, Zheng et al., arXiv 2003.03477).

Shapes: R replicas of a round, P numbers.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


class BMUF:
    """G = x̄ − W, Δ ← η Δ + ζ G, W ← W + Δ, and x ← (1 − α) x + α W for all replicas x together, where x̄ is their mean.

    This is the classical block momentum. As Chen and Huo have it, the block learning rate ζ is 1 and the block momentum η is
    1 − 1 / ``num_replicas``.

    Args:
        rate: α; None takes 1, the global model itself.

    Attributes:
        whole: W, the global model, float32[P]. update: Δ, of the last round, float32[P].
    """

    together: ClassVar[bool] = True

    def __init__(self, num_replicas: int, rate: float | None = None) -> None:
        self.rate = np.float32(1.0 if rate is None else rate)
        self.momentum = np.float32(1 - 1 / num_replicas)
        self.whole = self.update = np.empty(0, np.float32)

    def begin(self, model: NDArray[np.float32]) -> None:
        """See :class:`~girih.dense.averaging.algorithm.Averaging`; the momentum begins at 0."""
        self.whole, self.update = model.copy(), np.zeros_like(model)

    def round(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """See :class:`~girih.dense.averaging.algorithm.Averaging`."""
        self.update *= self.momentum
        self.update += self.model(replicas) - self.whole
        self.whole += self.update
        return self.rate * (self.whole - replicas)

    def model(self, replicas: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean of the replicas: the global model lacks what they learned since the last round."""
        mean: NDArray[np.float32] = replicas.mean(axis=0)
        return mean
