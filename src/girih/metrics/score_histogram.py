"""Scores of one label as a histogram: the positive and negative weight at each distinct logit.

Every metric is a function of the histogram. It is sorted and does not depend on the order in which the
examples came, so ranks that merge their scores get the bits that one process would get.

Shapes: B examples, U distinct logits (distinct pairs of group and logit, where there are groups).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ScoreHistogram:
    """Weights and counts, sorted by group, then by logit.

    Attributes:
        ranks: int64[U], the group as a number from 0; all 0 without groups.
        logits: float64[U].
        positives: float64[U], Σ weight · label.
        negatives: float64[U], Σ weight · (1 − label).
        counts: int64[U], number of examples.
    """

    ranks: NDArray[np.int64]
    logits: Floats
    positives: Floats
    negatives: Floats
    counts: NDArray[np.int64]


def tally(
    logits: NDArray[np.float32],
    labels: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
    ranks: NDArray[np.int64] | None = None,
) -> ScoreHistogram:
    """Builds a histogram. A label y between 0 and 1 counts as y positive and 1 − y negative.

    Args:
        logits: float32[B], finite.
        labels: float32[B] in [0, 1].
        weights: float32[B] ≥ 0; None where all are 1.
        ranks: int64[B], each in [0, 2³¹); None where there are no groups.
    """
    keys = _sortable(logits)
    if ranks is not None:
        keys |= ranks.astype(np.uint64) << np.uint64(32)
    if weights is None and bool(np.all((labels == 0) | (labels == 1))):
        # The label rides in the lowest bit: one sort of integers, several times faster than an argsort.
        keys = (keys << np.uint64(1)) | labels.astype(np.uint64)
        keys.sort()
        positive = (keys & np.uint64(1)).astype(np.float64)
        keys >>= np.uint64(1)
        negative = 1.0 - positive
    else:
        # Label and weight break ties, so that sums of fractions do not depend on the order of arrival either.
        order = np.lexsort((labels, keys) if weights is None else (weights, labels, keys))
        keys, label = keys[order], labels[order].astype(np.float64)
        weight = 1.0 if weights is None else weights[order].astype(np.float64)
        positive, negative = weight * label, weight * (1.0 - label)
    starts = run_starts(keys)
    distinct = keys[starts]
    return ScoreHistogram(
        ranks=(distinct >> np.uint64(32)).astype(np.int64),
        logits=_logits_of(distinct).astype(np.float64),
        positives=sum_runs(positive, starts),
        negatives=sum_runs(negative, starts),
        counts=np.diff(starts, append=len(keys)),
    )


def auc(scores: ScoreHistogram) -> float | None:
    """Area under the ROC curve, a tie counting one half; None without both classes. Groups are ignored.

    The histogram must hold each logit once, so it must be made without groups.
    """
    below = np.cumsum(scores.negatives) - scores.negatives
    wins = float(np.sum(scores.positives * (below + scores.negatives / 2)))
    pairs = float(np.sum(scores.positives)) * float(np.sum(scores.negatives))
    return min(wins / pairs, 1.0) if pairs > 0 else None


def auprc(scores: ScoreHistogram) -> float | None:
    """Area under the precision-recall curve as a step function (average precision); None without positives.

    It is Σ (R_i − R_{i−1}) · P_i over descending distinct logits, without interpolation (Davis and Goadrich 2006). The histogram
    must be made without groups.
    """
    positives, negatives = scores.positives[::-1], scores.negatives[::-1]
    relevant = np.cumsum(positives)
    if not len(relevant) or relevant[-1] <= 0:
        return None
    retrieved = relevant + np.cumsum(negatives)
    precision = np.divide(relevant, retrieved, out=np.zeros_like(relevant), where=retrieved > 0)
    return min(float(np.sum(positives * precision)) / float(relevant[-1]), 1.0)


def grouped_aucs(scores: ScoreHistogram) -> tuple[float | None, float | None]:
    """Mean AUC over the groups that have both classes, weighted by examples (GAUC) and with equal weights (uAUC).

    GAUC is the measure of Zhu et al. 2017 (Optimized Cost per Click in Taobao, §6.2). With example weights, a group weighs as much
    as its examples do together. Both are None if no group has both classes.
    """
    starts = run_starts(scores.ranks)
    lengths = np.diff(starts, append=len(scores.ranks))
    below = np.cumsum(scores.negatives) - scores.negatives
    below -= np.repeat(below[starts], lengths)
    wins = sum_runs(scores.positives * (below + scores.negatives / 2), starts)
    positives, negatives = sum_runs(scores.positives, starts), sum_runs(scores.negatives, starts)
    pairs = positives * negatives
    both = pairs > 0
    if not both.any():
        return None, None
    areas = np.minimum(wins[both] / pairs[both], 1.0)
    return float(np.average(areas, weights=(positives + negatives)[both])), float(np.mean(areas))


def run_starts(values: NDArray[np.generic]) -> NDArray[np.int64]:
    """Start indices of the runs of equal values: int64, ascending, the first 0; empty without values."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1]).astype(np.int64)


def sum_runs(values: NDArray[np.generic], starts: NDArray[np.int64]) -> Floats:
    """Sums each run in float64."""
    if len(starts) == 0:
        return np.zeros(0, np.float64)
    sums: Floats = np.add.reduceat(values.astype(np.float64, copy=False), starts)
    return sums


def _sortable(logits: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Unsigned integers that sort as the floats do; -0.0 becomes 0.0."""
    bits = (np.ascontiguousarray(logits) + np.float32(0)).view(np.uint32)
    flip = np.where(bits >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return (bits ^ flip).astype(np.uint64)


def _logits_of(keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    """The inverse of :func:`_sortable`, the group above the low 32 bits dropped."""
    bits = keys.astype(np.uint32)
    flip = np.where(bits >> np.uint32(31), np.uint32(0x80000000), np.uint32(0xFFFFFFFF))
    return (bits ^ flip).view(np.float32)
