"""Streams of ids: fresh every batch, unclipped, with a known share of new ones.

Shapes: F features, B examples, M ids a bag; ids are feature-major, int64[F · B · M].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Shape:
    """What all contestants work on: F tables of ``rows`` rows, B examples, M ids a bag."""

    features: int
    batch: int
    rows: int
    """Of each table, when timing starts: static tables have no more."""
    bag: int = 1

    @property
    def num_ids(self) -> int:
        """N, of one batch."""
        return self.features * self.batch * self.bag

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64[F · B + 1]."""
        return np.arange(self.features * self.batch + 1) * self.bag


class Stream:
    """Batches of ids.

    Args:
        kind: "zipf": ranks as drawn, however large; those beyond ``rows`` are new or nearly so. "clipped": the same
            modulo ``rows``, so that none is new. "uniform": any of the first ``rows`` ids alike, but for a share
            ``new`` that never was before.
    """

    def __init__(
        self, shape: Shape, kind: str, *, zipf: float = 1.2, new: float = 0.01, seed: int = 0
    ) -> None:
        self.shape, self.kind, self.zipf, self.new = shape, kind, zipf, new
        self._rng = np.random.default_rng(seed)
        self._next_new = (1 << 40) + (seed << 30)  # no other stream's

    def next(self) -> NDArray[np.int64]:
        """The ids of one more batch; 0 to ``rows - 1`` are known."""
        size = self.shape.num_ids
        if self.kind != "uniform":
            ids = self._rng.zipf(self.zipf, size) - 1
            return ids if self.kind == "zipf" else static(ids, self.shape.rows)
        ids = self._rng.integers(0, self.shape.rows, size)
        fresh = np.flatnonzero(self._rng.random(size) < self.new)
        ids[fresh] = self._next_new + np.arange(len(fresh))
        self._next_new += len(fresh)
        return ids


def static(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Ids as static tables can take them: modulo their rows."""
    return ids % rows


def num_unique(ids: NDArray[np.int64], features: int) -> int:
    """Keys, that is pairs of feature and id, that differ."""
    return sum(len(np.unique(part)) for part in ids.reshape(features, -1))
