"""Metrics that users define: functions of all examples that count for a label.

girih calls a metric as ``function(labels, predictions)``, both float64[n]. If the function has parameters of these
names, it also gets ``weights`` or ``sample_weight`` (float64[n], 1 if the data have none) and ``groups`` (int64[n],
the number of each example's group; None without ``gauc_by``). The examples are sorted, so that the value does not
depend on the number of trainers.

Shapes: n examples that count for the label.
"""

from __future__ import annotations

import inspect
import logging
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.config.train import metric_name
from girih.config.user_code import blame
from girih.errors import ConfigError, kind_of
from girih.kernels.cpu.arrays import F32, I64

_LOG = logging.getLogger(__name__)

Metric = Callable[..., object]


class Examples(NamedTuple):
    """The examples that count for a label. Weights are None if all are 1, and groups are None if there are none.

    If the loss of the label is mse or huber, logits and predictions are the same numbers.
    """

    logits: NDArray[Any]
    labels: NDArray[Any]
    weights: F32 | None
    groups: I64 | None
    are_numbers: bool


def custom_metrics(
    metrics: Sequence[Metric], label: str, examples: Examples, *, strict: bool = False
) -> dict[str, float | None]:
    """The value of each metric for a label. If the function fails, the value is None, and a warning gives the reason.

    Raises:
        ConfigError: a function fails, and ``strict`` is set.
    """
    values: dict[str, float | None] = {}
    for metric in metrics if len(examples.labels) else ():
        name = metric_name(metric)
        try:
            values[name] = _value(metric, examples)
        except ConfigError as error:
            text = f"metric {name} of label {label!r}: {error}"
            if strict:
                raise ConfigError(
                    f"train: {text}; expected a finite number for random examples, from a function of labels and predictions, and of weights and groups (with gauc_by) if these are its parameters"
                ) from error
            values[name] = None
            _LOG.warning("%s; this evaluation goes on without it", text)
    return values


def random_examples(loss: str, gauc_by: str | None) -> Examples:
    """Random examples for a trial call of a metric, for a label with this loss."""
    logits, labels = np.random.default_rng(0).normal(size=(2, 200))
    logits, labels = (logits, labels > 0) if loss == "bce" else (abs(logits), abs(labels))
    return Examples(logits, labels, None, None if gauc_by is None else np.arange(200) // 10, loss != "bce")


def _value(metric: Metric, examples: Examples) -> float:
    """Calls a metric with copies of the arrays, which it may change."""
    keys = (examples.groups, examples.weights, examples.labels, examples.logits)
    order = np.lexsort([key for key in keys if key is not None])
    logits, labels = (array[order].astype(np.float64) for array in examples[:2])
    predictions = logits if examples.are_numbers else np.exp(-np.logaddexp(0.0, -logits))
    weights = np.ones(len(order)) if examples.weights is None else examples.weights[order].astype(np.float64)
    groups = None if examples.groups is None else examples.groups[order]
    options = {"weights": weights, "sample_weight": weights, "groups": groups}
    code = getattr(getattr(metric, "func", metric), "__code__", None)
    try:
        known = inspect.signature(metric).parameters
        value = metric(labels, predictions, **{key: options[key] for key in options if key in known})
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    except Exception as error:
        raise ConfigError(blame(error, getattr(code, "co_filename", None))) from error
    raise ConfigError(f"returned {value if isinstance(value, float | None) else kind_of(value)}")
