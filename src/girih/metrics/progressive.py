"""Progressive validation: the training forward pass of each batch also scores it, before its update.

Scores are counted in bins of logits, so that memory does not grow with the stream. AUC treats examples of one bin as
ties. So AUC is wrong by at most half the share of pairs that are in one bin; this bound is reported. Logloss is exact.

Shapes: B examples of a call, T labels, K bins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from girih.kernels.cpu.arrays import F32, F64
from girih.schema import LabelLoss

NUM_BINS = 1 << 16
MOST_LOGIT = 16.0  # the outermost bins also count logits of larger absolute value
PERIOD_S = 300.0
NUM_PERIODS = 12  # the periods of the last hour, with the current one
_SUMS = 3  # Σ weight · loss, Σ weight, number of examples


class ProgressiveScores:
    """Counts of scores, of the whole run and of its last hour. Several threads may add to them.

    Args:
        num_labels: T.
        clock: returns seconds of the wall clock, which defines the hour.
        losses: the loss of each label; empty means bce for all labels. For mse and huber, there are no bins, only sums
            of errors: Σ weight · error² replaces logloss, and Σ weight · |error| is in the first bin.
    """

    def __init__(
        self, num_labels: int, clock: Callable[[], float] = time.time, losses: Sequence[LabelLoss] = ()
    ) -> None:
        self._num_labels, self._clock = num_labels, clock
        self._losses = tuple(losses) or ("bce",) * num_labels
        self._lock = threading.Lock()
        self._whole = self._empty()
        self._periods: dict[int, F64] = {}

    def add(
        self,
        logits: F32,
        labels: F32,
        weights: F32 | None = None,
        label_weights: F32 | None = None,
    ) -> None:
        """Adds B examples. Leaves out examples with a logit that is NaN or infinite.

        Args:
            logits, labels: float32[B, T].
            weights: float32[B]; None if all are 1. Examples with weight 0 count, as in :class:`girih.metrics.Scores`.
            label_weights: float32[B, T], multiplied by ``weights``; an example with 0 does not count for the label.
                None if all are 1.
        """
        good = np.isfinite(logits).all(axis=1)
        own = [None if each is None else each[good].astype(np.float64) for each in (weights, label_weights)]
        added = self._counted(logits[good].astype(np.float64), labels[good].astype(np.float64), *own)
        with self._lock:
            period = int(self._clock() // PERIOD_S)
            for old in [each for each in self._periods if each <= period - NUM_PERIODS]:
                del self._periods[old]
            self._whole += added
            self._periods[period] = self._periods.get(period, 0.0) + added

    def counts(self) -> F64:
        """float64[2, T, 2K + 3], of the whole run and of the last hour. Trainers add them up."""
        with self._lock:
            first = int(self._clock() // PERIOD_S) - NUM_PERIODS
            hour = sum((each for period, each in self._periods.items() if period > first), self._empty())
            return np.stack([self._whole, hour])

    def restore(self, whole: F64 | None) -> None:
        """Restores the counts of a run so far; None starts with empty counts. The hour always starts empty."""
        with self._lock:
            self._whole = self._empty() if whole is None else np.array(whole).reshape(self._empty().shape)
            self._periods = {}

    def _empty(self) -> F64:
        return np.zeros((self._num_labels, 2 * NUM_BINS + _SUMS))

    def _counted(self, logits: F64, labels: F64, weights: F64 | None, label_weights: F64 | None) -> F64:
        found = self._empty()
        own = np.ones(logits.shape) if label_weights is None else label_weights
        present = own > 0
        own = own if weights is None else own * weights[:, None]
        bins = np.clip((logits + MOST_LOGIT) * (NUM_BINS / (2 * MOST_LOGIT)), 0, NUM_BINS - 1).astype(
            np.int64
        )
        losses = np.logaddexp(0.0, logits) - labels * logits
        for label in range(self._num_labels):
            y, weight = labels[:, label], own[:, label]
            if self._losses[label] != "bce":
                errors = np.abs(logits[:, label] - y)
                found[label, 0] = weight @ errors
                found[label, -_SUMS:] = weight @ errors**2, weight.sum(), present[:, label].sum()
                continue
            found[label, :NUM_BINS] = np.bincount(bins[:, label], weight * y, NUM_BINS)
            found[label, NUM_BINS:-_SUMS] = np.bincount(bins[:, label], weight * (1.0 - y), NUM_BINS)
            found[label, -_SUMS:] = weight @ losses[:, label], weight.sum(), present[:, label].sum()
        return found


def progressive_metrics(
    counts: F64, label_names: Sequence[str], losses: Sequence[LabelLoss] = ()
) -> dict[str, dict[str, object]]:
    """Maps each label to metrics of the whole run, and of its last hour (``_last_hour``). Undefined metrics are None.

    Args:
        counts: float64[2, T, 2K + 3], of one trainer or the sum of all.
        losses: the loss of each label, the same as in :class:`ProgressiveScores`.
    """
    found = {}
    for label, name in enumerate(label_names):
        metrics = _metrics if not losses or losses[label] == "bce" else _errors
        whole, hour = (metrics(each[label]) for each in counts)
        found[name] = whole | {f"{key}_last_hour": value for key, value in hour.items()}
    return found


def _errors(counts: F64) -> dict[str, object]:
    squares, weight, num_examples = counts[-_SUMS:].tolist()
    return {
        "mae": float(counts[0]) / weight if weight > 0 else None,
        "rmse": (squares / weight) ** 0.5 if weight > 0 else None,
        "num_examples": int(num_examples),
    }


def _metrics(counts: F64) -> dict[str, object]:
    positives, negatives = counts[:NUM_BINS], counts[NUM_BINS:-_SUMS]
    loss, weight, num_examples = counts[-_SUMS:].tolist()
    pairs = float(positives.sum() * negatives.sum())
    below = np.cumsum(negatives) - negatives
    ties = float(positives @ negatives)
    return {
        "auc": float(positives @ below + ties / 2) / pairs if pairs > 0 else None,
        "auc_error": ties / 2 / pairs if pairs > 0 else None,
        "logloss": loss / weight if weight > 0 else None,
        "num_examples": int(num_examples),
    }
