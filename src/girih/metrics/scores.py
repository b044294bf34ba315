"""Keeps logits and labels until the metrics are computed.

Shapes: B examples of one call, n examples so far, T labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from girih.errors import ConfigError, DataError, NonFiniteError
from girih.kernels.cpu.arrays import F32, I64
from girih.metrics.custom import Examples, Metric, custom_metrics
from girih.metrics.result import (
    LabelMetrics,
    Metrics,
    grouped_aucs,
    label_metrics,
    ranking,
    regression_metrics,
    tally,
)
from girih.schema import LabelLoss


class Scores:
    """Collects scores, and merges with those of other ranks without loss.

    An example takes 8·T bytes. A weight adds 4 bytes, weights of labels add 4·T, and a group adds 8. Metrics of merged
    scores have the same bits as those of one process that saw all examples, in any order.

    Args:
        losses: the loss of each label, the same as :attr:`girih.Labels.losses`; empty means bce for all labels.
    """

    def __init__(self, losses: Sequence[LabelLoss] = ()) -> None:
        self._losses = tuple(losses)
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
        label_weights: ArrayLike | None = None,
    ) -> None:
        """Adds copies of B examples. If it raises an error, nothing is added.

        Args:
            logits: float32[B, T], or [B] for one label, before the sigmoid; for mse and huber, the predictions.
            labels: the same shape as logits; each in [0, 1] if the loss is bce.
            weights: float32[B] ≥ 0; None if all are 1.
            groups: int64[B], for example users; GAUC averages their AUCs. Give them in every call or in none.
            label_weights: float32[B, T] ≥ 0, multiplied by ``weights``. If a weight is 0, the label is ignored, and
                the example does not count for it. None if all are 1.

        Raises:
            NonFiniteError: a logit is NaN or infinite.
            DataError: a label outside [0, 1], a weight that is negative or not finite.
            ConfigError: shapes differ from each other or from earlier ones; groups for some examples only.
        """
        columns: dict[str, NDArray[Any]] = {"logits": _two_axes(logits), "labels": _two_axes(labels)}
        if weights is not None:
            columns["weights"] = np.array(weights, np.float32)
        if groups is not None:
            columns["groups"] = _integers(groups)
        if label_weights is not None:
            columns["label_weights"] = _two_axes(label_weights)
        _check_shapes(columns)
        _check_values(columns, self._losses)
        self._extend(columns)

    def merge(self, other: Scores) -> None:
        """Adds all examples of another object, which does not change.

        Raises:
            ConfigError: the two differ in labels or in having groups.
        """
        self._extend(other.arrays())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All scores, for :meth:`from_arrays`. Treat them as read-only.

        Returns:
            ``logits`` and ``labels`` float32[n, T]. If given, also ``weights`` float32[n], ``groups`` int64[n] and
            ``label_weights`` float32[n, T]. Empty without examples.
        """
        return {name: self._column(name) for name in self._columns}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, ArrayLike], losses: Sequence[LabelLoss] = ()) -> Scores:
        """Rebuilds scores from :meth:`arrays`, for example those of another rank.

        Raises:
            ConfigError: see :meth:`add`.
        """
        scores = cls(losses)
        if arrays:
            scores.add(**arrays)
        return scores

    def result(
        self, label_names: Sequence[str], rank_at: Sequence[int] = (), metrics: Sequence[Metric] = ()
    ) -> Metrics:
        """Computes the metrics of T labels. Without examples, all are None.

        Args:
            rank_at: the values of k of :func:`girih.metrics.result.ranking`, within groups; empty computes no ranking
                metric.
            metrics: functions that the user defines.

        Raises:
            ConfigError: the number of names is not T, or a name is repeated.
        """
        if not label_names or len(set(label_names)) != len(label_names):
            raise ConfigError(f"label names {list(label_names)}: expected at least one, and no name twice")
        if not self._num_examples:
            return Metrics({name: LabelMetrics(num_examples=0) for name in label_names})
        num_labels = self._column("logits").shape[1]
        if num_labels != len(label_names):
            raise ConfigError(f"{len(label_names)} label names for scores of {num_labels} labels")
        ranks = None
        if "groups" in self._columns:
            ranks = np.unique(self._column("groups"), return_inverse=True)[1].astype(np.int64, copy=False)
        by_label = {}
        for index, name in enumerate(label_names):
            examples = self._of_label(index, ranks)
            custom = custom_metrics(metrics, name, examples)
            by_label[name] = replace(_built_in(examples, rank_at), custom=custom)
        return Metrics(by_label)

    def _of_label(self, index: int, groups: I64 | None) -> Examples:
        """The examples that count for a label."""
        logits, labels = self._column("logits")[:, index], self._column("labels")[:, index]
        weights = self._column("weights") if "weights" in self._columns else None
        if "label_weights" in self._columns:
            own = self._column("label_weights")[:, index]
            there = own > 0
            weights = own if weights is None else own * weights
            logits, labels, weights = logits[there], labels[there], weights[there]
            groups = None if groups is None else groups[there]
            weights = None if (weights == 1).all() else weights
        are_numbers = bool(self._losses) and self._losses[index] != "bce"
        return Examples(logits, labels, weights, groups, are_numbers)

    def _extend(self, columns: dict[str, NDArray[Any]]) -> None:
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
        for name, shape in (("weights", ()), ("label_weights", columns["logits"].shape[1:])):
            if name in self._columns and name not in columns:
                columns = columns | {name: _ones(num_examples, *shape)}
            elif name in columns and name not in self._columns and self._columns:
                self._columns[name] = [_ones(self._num_examples, *shape)]
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        self._num_examples += num_examples

    def _column(self, name: str) -> NDArray[Any]:
        chunks = self._columns[name]
        if len(chunks) > 1:  # only when asked for: growing an array would copy it with each batch
            chunks[:] = [np.concatenate(chunks)]
        return chunks[0]


def _built_in(examples: Examples, rank_at: Sequence[int]) -> LabelMetrics:
    logits, labels, weights, groups, are_numbers = examples
    if are_numbers:
        return regression_metrics(logits, labels, weights)
    grouped = (None, None) if groups is None else grouped_aucs(tally(logits, labels, weights, groups))
    ranked = ranking(logits, labels, groups, rank_at) if rank_at and groups is not None else {}
    return label_metrics(tally(logits, labels, weights), grouped, ranked)


def _ones(*shape: int) -> F32:
    """Returns ones that take no memory until they are concatenated."""
    return np.broadcast_to(np.float32(1), shape)


def _two_axes(values: ArrayLike) -> F32:
    array = np.array(values, np.float32)
    return array[:, None] if array.ndim == 1 else array


def _integers(groups: ArrayLike) -> I64:
    array = np.asarray(groups)
    if array.dtype.kind not in "iu" and array.size:
        raise ConfigError(f"groups of type {array.dtype}: expected int64, the type of ids")
    return np.array(array, np.int64)


def _check_shapes(columns: dict[str, NDArray[Any]]) -> None:
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
    if "label_weights" in columns and columns["label_weights"].shape != shape:
        raise ConfigError(
            f"label_weights of shape {columns['label_weights'].shape}: expected {shape}, the shape of labels"
        )


def _check_values(columns: dict[str, NDArray[Any]], losses: Sequence[LabelLoss]) -> None:
    bad = ~np.isfinite(columns["logits"])
    if bad.any():
        example, label = np.argwhere(bad)[0]
        raise NonFiniteError(
            f"{int(bad.sum())} of {bad.size} logits are NaN or infinite, first in example {example}, "
            f"label {label}; the model has diverged: lower the learning rate, or clip gradients"
        )
    labels = columns["labels"]
    good = (labels >= 0) & (labels <= 1)
    for index, loss in enumerate(losses):
        if loss != "bce":
            good[:, index] = np.isfinite(labels[:, index])
    if "label_weights" in columns:
        good |= columns["label_weights"] == 0
    if not np.all(good):
        raise DataError(f"label {labels[~good][0]}: expected a number from 0 to 1")
    for name, whose in (("weights", "example"), ("label_weights", "label")):
        weights = columns.get(name)
        if weights is not None and not np.all((weights >= 0) & np.isfinite(weights)):
            wrong = weights[~((weights >= 0) & np.isfinite(weights))][0]
            raise DataError(f"{whose} weight {wrong}: expected a finite number of at least 0")
