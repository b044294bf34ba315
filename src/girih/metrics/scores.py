"""Logits and labels, kept until the metrics are computed.

Shapes: B examples of one call, n examples so far, T labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from girih.errors import ConfigError, DataError, NonFiniteError
from girih.metrics.result import LabelMetrics, Metrics, label_metrics
from girih.metrics.score_histogram import gauc, tally

Arrays = dict[str, NDArray[Any]]


class Scores:
    """Collects scores, and merges with those of other ranks without loss.

    An example takes 8·T bytes, and 4 more with a weight, 8 more with a group. Metrics of merged scores
    have the same bits as those of one process that saw all examples, in whatever order.
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[NDArray[Any]]] = {}
        self._num_examples = 0

    @property
    def num_examples(self) -> int:
        """Number of examples so far, n."""
        return self._num_examples

    def add(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> None:
        """Adds copies of B examples; on an error nothing is added.

        Args:
            logits: float32[B, T], or [B] for one label, before the sigmoid.
            labels: of the same shape as logits, each in [0, 1].
            weights: float32[B] ≥ 0; None where all are 1.
            groups: int64[B], for example users; GAUC averages their AUCs. Give them in every call or in none.

        Raises:
            NonFiniteError: a logit is NaN or infinite.
            DataError: a label outside [0, 1], a weight that is negative or not finite.
            ConfigError: shapes differ from each other or from earlier ones; groups for some examples only.
        """
        columns: Arrays = {"logits": _two_axes(logits), "labels": _two_axes(labels)}
        if weights is not None:
            columns["weights"] = np.array(weights, np.float32)
        if groups is not None:
            columns["groups"] = _integers(groups)
        _check_shapes(columns)
        _check_values(columns)
        self._extend(columns)

    def merge(self, other: Scores) -> None:
        """Adds all examples of another object, which is left unchanged.

        Raises:
            ConfigError: the two differ in labels or in having groups.
        """
        self._extend(other.arrays())

    def arrays(self) -> Arrays:
        """All scores, for :meth:`from_arrays`; treat them as read-only.

        Returns:
            ``logits`` and ``labels`` float32[n, T]; where given, ``weights`` float32[n] and ``groups`` int64[n].
            Empty without examples.
        """
        return {name: self._column(name) for name in self._columns}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, ArrayLike]) -> Scores:
        """Rebuilds scores from :meth:`arrays`, for example those of another rank.

        Raises:
            ConfigError: see :meth:`add`.
        """
        scores = cls()
        if arrays:
            scores.add(**arrays)
        return scores

    def result(self, label_names: Sequence[str]) -> Metrics:
        """Computes the metrics of T labels; all are None without examples.

        Raises:
            ConfigError: the number of names is not T, or a name is repeated.
        """
        if not label_names or len(set(label_names)) != len(label_names):
            raise ConfigError(f"label names {list(label_names)}: expected at least one, and no name twice")
        if not self._num_examples:
            return Metrics({name: LabelMetrics(num_examples=0) for name in label_names})
        logits, labels = self._column("logits"), self._column("labels")
        if logits.shape[1] != len(label_names):
            raise ConfigError(f"{len(label_names)} label names for scores of {logits.shape[1]} labels")
        weights = self._column("weights") if "weights" in self._columns else None
        ranks = None
        if "groups" in self._columns:
            ranks = np.unique(self._column("groups"), return_inverse=True)[1].astype(np.int64, copy=False)
        by_label = {}
        for index, name in enumerate(label_names):
            column = (logits[:, index], labels[:, index], weights)
            grouped = None if ranks is None else gauc(tally(*column, ranks))
            by_label[name] = label_metrics(tally(*column), grouped)
        return Metrics(by_label)

    def _extend(self, columns: Arrays) -> None:
        if not columns:
            return
        if self._columns:
            before, now = self._columns["logits"][0].shape[1], columns["logits"].shape[1]
            if before != now:
                raise ConfigError(f"scores of {now} labels added to scores of {before} labels")
            if ("groups" in columns) != ("groups" in self._columns):
                now_or_before = "now and not before" if "groups" in columns else "before and not now"
                raise ConfigError(
                    f"groups were given {now_or_before}; give them for all examples or for none"
                )
        num_examples = len(columns["logits"])
        if "weights" in self._columns and "weights" not in columns:
            columns = columns | {"weights": _ones(num_examples)}
        elif "weights" in columns and "weights" not in self._columns and self._columns:
            self._columns["weights"] = [_ones(self._num_examples)]
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        self._num_examples += num_examples

    def _column(self, name: str) -> NDArray[Any]:
        chunks = self._columns[name]
        if len(chunks) > 1:  # once, when asked for: growing an array with each batch would copy it each time
            chunks[:] = [np.concatenate(chunks)]
        return chunks[0]


def _ones(count: int) -> NDArray[np.float32]:
    """Ones that take no memory until they are concatenated."""
    return np.broadcast_to(np.float32(1), (count,))


def _two_axes(values: ArrayLike) -> NDArray[np.float32]:
    array = np.array(values, np.float32)
    return array[:, None] if array.ndim == 1 else array


def _integers(groups: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(groups)
    if array.dtype.kind not in "iu" and array.size:
        raise ConfigError(f"groups of type {array.dtype}: expected int64, as ids are")
    return np.array(array, np.int64)


def _check_shapes(columns: Arrays) -> None:
    shape = columns["logits"].shape
    if len(shape) != 2 or not shape[1] or columns["labels"].shape != shape:
        raise ConfigError(
            f"logits {shape} and labels {columns['labels'].shape}: expected the same [examples, labels]"
        )
    for name in ("weights", "groups"):
        if name in columns and columns[name].shape != shape[:1]:
            raise ConfigError(
                f"{name} of shape {columns[name].shape}: expected ({shape[0]},), one for each example"
            )


def _check_values(columns: Arrays) -> None:
    bad = ~np.isfinite(columns["logits"])
    if bad.any():
        example, label = np.argwhere(bad)[0]
        raise NonFiniteError(
            f"{int(bad.sum())} of {bad.size} logits are NaN or infinite, first in example {example}, "
            f"label {label}; the model has diverged: lower the learning rate, or clip gradients"
        )
    labels = columns["labels"]
    if not np.all((labels >= 0) & (labels <= 1)):
        wrong = labels[~((labels >= 0) & (labels <= 1))][0]
        raise DataError(f"label {wrong}: expected a number from 0 to 1")
    weights = columns.get("weights")
    if weights is not None and not np.all((weights >= 0) & np.isfinite(weights)):
        wrong = weights[~((weights >= 0) & np.isfinite(weights))][0]
        raise DataError(f"example weight {wrong}: expected a finite number of at least 0")
