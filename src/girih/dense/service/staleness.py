"""Dense staleness, as group servers measure it: writes of other nets between a net's read and its write (HT §2.2, §3.1.1).

The paper's bound is t × r, trainers of a group times nets of each; nets that wait for nobody can exceed it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

DENSE_STALENESS = "dense staleness"
"""Histogram of a group server, over batches of nets."""


def measured(histogram: Mapping[int, int]) -> dict[str, int]:
    """Median, 99th percentile (the least value that so many batches reach) and maximum of how often each was found."""
    found = Counter(histogram)
    return {
        "dense_staleness_median": _percentile(found, 0.5),
        "dense_staleness_p99": _percentile(found, 0.99),
        "dense_staleness_max": max(found, default=0),
    }


def _percentile(found: Counter[int], share: float) -> int:
    """The nearest rank."""
    rest = math.ceil(share * found.total())
    for value in sorted(found):
        rest -= found[value]
        if rest <= 0:
            return value
    return 0
