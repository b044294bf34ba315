"""Random service times and uneven keys. A seed decides all of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist

STEP_SPREAD = 0.1
"""Coefficient of variation of the same operation from step to step. The default, because calibrations measure none."""
RUN_SPREAD = 0.12
"""Coefficient of variation of the speed of cores and links from run to run, for the same reason."""
_NORMAL = NormalDist()


@dataclass
class Draws:
    """Draws factors with mean 1.

    Attributes:
        seed: equal seeds give equal factors. step_spread: coefficient of variation of one operation.
    """

    seed: str
    step_spread: float = STEP_SPREAD
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def factor(self, spread: float | None = None, of: float = 1.0) -> float:
        """Returns a log-normal factor with mean 1: the largest of ``of`` factors."""
        spread = self.step_spread if spread is None else spread
        if not spread:
            return 1.0
        sigma = math.sqrt(math.log1p(spread * spread))
        uniform = min(1 - 1e-12, max(1e-12, self._random.random() ** (1 / max(1.0, of))))
        return math.exp(sigma * _NORMAL.inv_cdf(uniform) - sigma * sigma / 2)

    def shares(self, count: int, keys: float, of: float) -> list[float]:
        """Returns the shares of servers in the keys of a step, relative to an even share.

        Hashed keys fall into servers like balls into bins. The coefficient of variation of N servers is √((N − 1) / keys).

        Args:
            count: number of simulated servers. of: number of servers that each of them stands for.
        """
        servers = count * of
        if servers <= 1 or not keys:
            return [1.0] * count
        spread = math.sqrt((servers - 1) / keys)
        return [self.factor(spread, of if number == 0 else 1.0) for number in range(count)]
