"""The resulting metrics. An undefined metric is None and never NaN, because JSON has no NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from girih import config
from girih.config.train import DIRECTIONS, RECORDED
from girih.kernels.cpu.arrays import F32, F64, I64, U64


@dataclass(frozen=True, slots=True)
class ScoreHistogram:
    """Scores of one label: weights and counts, sorted by group, then by logit.

    Every metric is a function of the histogram. The histogram does not depend on the order of the examples. So ranks
    that merge their scores get the same bits as one process.

    Attributes:
        ranks: int64[U], the group as a number from 0; all 0 without groups.
        logits: float64[U].
        positives: float64[U], Σ weight · label.
        negatives: float64[U], Σ weight · (1 − label).
        counts: int64[U], number of examples.
    """

    ranks: I64
    logits: F64
    positives: F64
    negatives: F64
    counts: I64


def tally(
    logits: F32,
    labels: F32,
    weights: F32 | None = None,
    ranks: I64 | None = None,
) -> ScoreHistogram:
    """Builds a histogram. A label y between 0 and 1 counts as y positive and 1 − y negative.

    Args:
        logits: float32[B], finite.
        labels: float32[B] in [0, 1].
        weights: float32[B] ≥ 0; None if all are 1.
        ranks: int64[B], each in [0, 2³¹); None without groups.
    """
    keys = _sortable(logits)
    if ranks is not None:
        keys |= ranks.astype(np.uint64) << np.uint64(32)
    if weights is None and bool(np.all((labels == 0) | (labels == 1))):
        # The lowest bit holds the label. One sort of integers is several times faster than an argsort.
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
    """Area under the ROC curve. A tie counts one half. None without both classes. Ignores groups.

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

    GAUC is the measure of Zhu et al. 2017 (Optimized Cost per Click in Taobao, §6.2). With example weights, the weight
    of a group is the sum of its examples' weights. Both are None if no group has both classes.
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


def run_starts(values: NDArray[np.generic]) -> I64:
    """Start indices of the runs of equal values: int64, ascending, the first 0; empty without values."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    return np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1]).astype(np.int64)


def sum_runs(values: NDArray[np.generic], starts: I64) -> F64:
    """Sums each run in float64."""
    if len(starts) == 0:
        return np.zeros(0, np.float64)
    sums: F64 = np.add.reduceat(values.astype(np.float64, copy=False), starts)
    return sums


def _sortable(logits: F32) -> U64:
    """Converts floats to unsigned integers with the same order. -0.0 becomes 0.0."""
    bits = (np.ascontiguousarray(logits) + np.float32(0)).view(np.uint32)
    flip = np.where(bits >> np.uint32(31), np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    return (bits ^ flip).astype(np.uint64)


def _logits_of(keys: U64) -> F32:
    """The inverse of :func:`_sortable`. Drops the group above the low 32 bits."""
    bits = keys.astype(np.uint32)
    flip = np.where(bits >> np.uint32(31), np.uint32(0x80000000), np.uint32(0xFFFFFFFF))
    return (bits ^ flip).view(np.float32)


NUM_BINS = 20

OF_NUMBERS = ("mae", "rmse")
"""Metrics of labels whose loss is mse or huber. All other metrics are for probabilities."""


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Examples of neighbouring predictions.

    Attributes:
        prediction: their mean prediction.
        label: their mean label.
        count: the number of examples.
    """

    prediction: float
    label: float
    count: int


@dataclass(frozen=True, slots=True)
class LabelMetrics:
    """Metrics of one label, over the examples that count for it. Means and sums use the example weights, if any.

    For a label with mse or huber loss, only ``num_examples``, ``mae``, ``rmse`` and the means are defined.

    Attributes:
        num_examples: the number of examples, without weights.
        auc: area under the ROC curve, ties one half; None without both classes.
        auprc: average precision; None without positives.
        logloss: mean −y·log p − (1−y)·log(1−p), natural logarithm, computed from logits.
        normalized_entropy: logloss divided by the entropy of the mean label (He et al. 2014, §3); None if that entropy
            is 0.
        calibration: mean prediction divided by mean label; None if the mean label is 0.
        gauc, uauc: AUC within groups, averaged by examples and with equal weights; None without a group that has both
            classes.
        mean_label: None without examples, or if their weights sum to 0; logloss and mean_prediction are None too then.
        mean_prediction: None under the same conditions as mean_label.
        calibration_curve: up to 20 bins with about equal numbers of examples, by ascending prediction.
        ranking: ``recall@k``, ``ndcg@k`` and ``mrr`` within groups; empty if not configured.
        custom: metrics that the user defines, by name; None if the function failed.
        mae, rmse: the mean absolute error, and the root of the mean squared error; None for a probability.
    """

    num_examples: int
    auc: float | None = None
    logloss: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None
    gauc: float | None = None
    auprc: float | None = None
    uauc: float | None = None
    mean_label: float | None = None
    mean_prediction: float | None = None
    calibration_curve: tuple[CalibrationBin, ...] = ()
    mae: float | None = None
    rmse: float | None = None
    ranking: Mapping[str, float] = field(default_factory=dict)
    custom: Mapping[str, float | None] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Returns a metric by name: a field, or a key of ``ranking`` or ``custom``. None if the metric is undefined."""
        named: Mapping[str, float | None] = {**self.ranking, **self.custom}
        return getattr(self, name) if name in RECORDED else named.get(name)

    def as_dict(self) -> dict[str, object]:
        """Converts to plain values, for JSON."""
        return asdict(self) | {"calibration_curve": [asdict(one) for one in self.calibration_curve]}


@dataclass(frozen=True, slots=True)
class Metrics:
    """Metrics of every label, in the order of the labels.

    Attributes:
        by_label: the name of a label → its metrics.

    Examples:
        ``Trainer.evaluate`` returns metrics. ``summary.json`` has them as a mapping:

        >>> import girih
        >>> metrics = girih.Metrics.from_dict(
        ...     {"clicked": {"num_examples": 1000, "auc": 0.75}}
        ... )
        >>> metrics.auc, metrics.by_label["clicked"].gauc
        (0.75, None)
        >>> print(metrics)
        clicked: auc 0.75000  examples 1,000
    """

    by_label: Mapping[str, LabelMetrics]

    @property
    def first(self) -> LabelMetrics:
        """Metrics of the first label. They decide how good a run is."""
        return next(iter(self.by_label.values()))

    @property
    def auc(self) -> float | None:
        """The first label's AUC, from 0 to 1. None if all examples have the same label."""
        return self.first.auc

    @property
    def logloss(self) -> float | None:
        """The first label's logloss, with the natural logarithm; None without examples."""
        return self.first.logloss

    @property
    def num_examples(self) -> int:
        """Number of examples scored."""
        return self.first.num_examples

    def record(self) -> dict[str, float | None]:
        """The first label's part of a line in ``metrics.jsonl``. Leaves out undefined metrics after the first five."""
        always, first = ("auc", "auprc", "logloss", "normalized_entropy", "calibration"), self.first
        names = dict.fromkeys((*always, *DIRECTIONS, *first.ranking, *first.custom))
        return {name: first.value(name) for name in names if name in always or first.value(name) is not None}

    def as_dict(self) -> dict[str, dict[str, object]]:
        """Maps each label to plain values: ``by_label`` of ``summary.json``."""
        return {name: metrics.as_dict() for name, metrics in self.by_label.items()}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Mapping[str, object]]) -> Metrics:
        """The inverse of :meth:`as_dict`.

        Raises:
            ConfigError: an unknown or invalid entry.
        """
        return cls({name: config.build(LabelMetrics, values, name) for name, values in mapping.items()})

    def __str__(self) -> str:
        lines = []
        for name, metrics in self.by_label.items():
            values = [(key, getattr(metrics, key)) for key in (*DIRECTIONS, "calibration")]
            values += [*metrics.ranking.items(), *metrics.custom.items()]
            shown = "  ".join(f"{key} {value:.5f}" for key, value in values if value is not None)
            lines.append(f"{name}: {shown}{'  ' if shown else ''}examples {metrics.num_examples:,}")
        return "\n".join(lines)


def label_metrics(
    scores: ScoreHistogram,
    grouped: tuple[float | None, float | None],
    ranked: Mapping[str, float] = MappingProxyType({}),
) -> LabelMetrics:
    """Computes all metrics of one label.

    Args:
        scores: a histogram made without groups.
        ranked: the result of :func:`girih.metrics.result.ranking`.
        grouped: the result of :func:`girih.metrics.result.grouped_aucs` on a histogram made with groups.
    """
    num_examples = int(scores.counts.sum())
    masses = scores.positives + scores.negatives
    mass = float(masses.sum())
    if mass <= 0:
        return LabelMetrics(num_examples=num_examples)
    # log(1 + e^z) is the loss of a negative, and log(1 + e^-z) that of a positive. Neither overflows.
    of_negatives = np.logaddexp(0.0, scores.logits)
    of_positives = np.logaddexp(0.0, -scores.logits)
    predictions = np.exp(-of_positives)
    logloss = float(np.sum(scores.positives * of_positives + scores.negatives * of_negatives)) / mass
    mean_label = float(scores.positives.sum()) / mass
    mean_prediction = float(np.sum(masses * predictions)) / mass
    entropy = _entropy(mean_label)
    return LabelMetrics(
        num_examples=num_examples,
        auc=auc(scores),
        logloss=logloss,
        normalized_entropy=logloss / entropy if entropy > 0 else None,
        calibration=mean_prediction / mean_label if mean_label > 0 else None,
        auprc=auprc(scores),
        gauc=grouped[0],
        uauc=grouped[1],
        mean_label=mean_label,
        mean_prediction=mean_prediction,
        calibration_curve=_calibration_curve(scores, predictions, masses),
        ranking=dict(ranked),
    )


def regression_metrics(predictions: F32, labels: F32, weights: F32 | None) -> LabelMetrics:
    """Computes metrics of a numeric label: float32[n] predictions, labels, and weights (None if all are 1)."""
    wide = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    mass = _sorted_sum(wide)
    if mass <= 0:
        return LabelMetrics(num_examples=len(labels))
    found, given = predictions.astype(np.float64), labels.astype(np.float64)
    errors = np.abs(found - given)
    return LabelMetrics(
        num_examples=len(labels),
        mae=_sorted_sum(wide * errors) / mass,
        rmse=math.sqrt(_sorted_sum(wide * errors**2) / mass),
        mean_label=_sorted_sum(wide * given) / mass,
        mean_prediction=_sorted_sum(wide * found) / mass,
    )


def _sorted_sum(values: F64) -> float:
    """Sums the values independently of their order."""
    return float(np.sort(values).sum())


def _entropy(rate: float) -> float:
    if not 0 < rate < 1:
        return 0.0
    return -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)


def _calibration_curve(scores: ScoreHistogram, predictions: F64, masses: F64) -> tuple[CalibrationBin, ...]:
    """Makes up to NUM_BINS bins. Equal predictions share a bin, so ties make bins unequal and fewer."""
    middles = np.cumsum(scores.counts) - scores.counts / 2
    starts = run_starts((middles * NUM_BINS / scores.counts.sum()).astype(np.int64))
    mass = sum_runs(masses, starts)
    with np.errstate(invalid="ignore", divide="ignore"):  # a bin of weight 0 is dropped below
        prediction = sum_runs(masses * predictions, starts) / mass
        label = sum_runs(scores.positives, starts) / mass
    counts = np.add.reduceat(scores.counts, starts)
    kept = np.flatnonzero(mass > 0)
    return tuple(CalibrationBin(float(prediction[i]), float(label[i]), int(counts[i])) for i in kept)


RELEVANT = 0.5
"""An example with at least this label is relevant."""


def ranking(logits: F32, labels: F32, groups: I64, at: Sequence[int]) -> dict[str, float]:
    """``recall@k`` and ``ndcg@k`` for each k, and ``mrr``: means over the groups that have a relevant example.

    A tie counts against the model: the relevant example is ranked after all others with the same logit. recall@k is
    the share of a group's relevant examples among its first k. NDCG@k is Σ 1/log2(place + 1) of these, divided by the
    largest possible value (Järvelin and Kekäläinen 2002, relevance 0 or 1). MRR is the mean of 1 / (place of the first
    relevant example).

    Args:
        logits, labels: float32[B].
        groups: int64[B].
        at: the values of k.

    Returns:
        The means by name, or nothing if no group has a relevant example.
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
