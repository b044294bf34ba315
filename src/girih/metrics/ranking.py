"""Metrics of the order within groups, as of what each user was shown: recall@k, NDCG@k, MRR.

Shapes: B examples, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from girih.metrics.score_histogram import run_starts

RELEVANT = 0.5
"""The label from which an example is relevant."""


def ranking(
    logits: NDArray[np.float32], labels: NDArray[np.float32], groups: NDArray[np.int64], at: Sequence[int]
) -> dict[str, float]:
    """``recall@k`` and ``ndcg@k`` for each k, and ``mrr``: means over the groups that have a relevant example.

    A tie counts against the model: the relevant example comes after all of its logit. recall@k is the share of a group's
    relevant examples among its first k; NDCG@k is Σ 1/log2(place + 1) of these over the most that it could be (Järvelin and
    Kekäläinen 2002, relevance 0 or 1); MRR is the mean of 1 / (place of the first relevant one).

    Args:
        logits, labels: float32[B]. groups: int64[B]. at: the ks.

    Returns:
        Empty without a group that has a relevant example.
    """
    relevant = labels >= RELEVANT
    order = np.lexsort((relevant, -logits, groups))
    relevant, groups = relevant[order], groups[order]
    starts = run_starts(groups)
    lengths = np.diff(starts, append=len(groups))
    places = np.arange(1, len(groups) + 1) - np.repeat(starts, lengths)
    group_of = np.repeat(np.arange(len(starts)), lengths)[relevant]
    places = places[relevant]
    counts = np.bincount(group_of, minlength=len(starts))
    some = counts > 0
    if not some.any():
        return {}
    counts = counts[some]
    found = {}
    for k in at:
        first = places <= k
        hits = np.bincount(group_of[first], minlength=len(starts))[some]
        gains = np.bincount(group_of[first], 1 / np.log2(places[first] + 1.0), minlength=len(starts))[some]
        ideal = np.cumsum(1 / np.log2(np.arange(2.0, k + 2)))[np.minimum(counts, k) - 1]
        found[f"recall@{k}"] = float(np.mean(hits / counts))
        found[f"ndcg@{k}"] = float(np.mean(gains / ideal))
    firsts = places[run_starts(group_of)]
    return found | {"mrr": float(np.mean(1 / firsts))}
