"""Metrics of the user's own on scores: compared with scikit-learn, whatever the order of examples."""

import functools
import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, mean_absolute_error

from girih import TrainOptions
from girih.errors import ConfigError
from girih.metrics import Scores


def brier(labels, predictions, weights):
    return np.average((labels - predictions) ** 2, weights=weights)


def plain_brier(labels, predictions):
    return float(np.mean((labels - predictions) ** 2))


def mean_by_group(labels, predictions, *, groups=None):
    if groups is None:
        return -1.0
    return np.mean(
        [average_precision_score(labels[groups == g], predictions[groups == g]) for g in set(groups)]
    )


def scores_of(logits, labels, losses=(), **more):
    scores = Scores(losses)
    scores.add(logits, labels, **more)
    return scores


def drawn(seed, n=500):
    random = np.random.default_rng(seed)
    logits = np.round(random.normal(size=n), 1).astype(np.float32)  # with ties
    labels = (random.random(n) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return logits, labels, random.uniform(0, 2, n).astype(np.float32)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


@pytest.mark.parametrize("weighted", [False, True])
def test_values_are_those_of_scikit_learn(weighted):
    logits, labels, weights = drawn(1)
    weights = weights if weighted else None
    metrics = (brier, plain_brier, log_loss, brier_score_loss)
    found = scores_of(logits, labels, weights=weights).result(["click"], (), metrics).first
    p = sigmoid(logits)
    expected = brier_score_loss(labels, p, sample_weight=weights)
    assert found.custom == {
        "brier": pytest.approx(expected, rel=1e-12),
        "plain_brier": pytest.approx(brier_score_loss(labels, p), rel=1e-12),
        "log_loss": pytest.approx(log_loss(labels, p, sample_weight=weights), rel=1e-12),
        "brier_score_loss": pytest.approx(expected, rel=1e-12),
    }
    assert found.value("brier") == found.custom["brier"]
    assert found.custom["log_loss"] == pytest.approx(found.logloss, rel=1e-9)


def test_a_metric_sees_the_examples_that_count_for_its_label_and_numbers_as_they_are():
    logits, labels, weights = drawn(2)
    counts = (np.arange(500) % 3 > 0).astype(np.float32)
    scores = scores_of(
        np.stack([logits, logits], 1),
        np.stack([labels, 7 * labels], 1),
        ("bce", "mse"),
        weights=weights,
        label_weights=np.stack([counts, np.ones(500, np.float32)], 1),
    )
    found = scores.result(["click", "spent"], (), (brier, mean_absolute_error)).by_label
    kept = counts > 0
    assert found["click"].custom["brier"] == pytest.approx(
        brier_score_loss(labels[kept], sigmoid(logits[kept]), sample_weight=weights[kept]), rel=1e-6
    )
    assert found["spent"].custom["mean_absolute_error"] == pytest.approx(found["spent"].mae, rel=1e-12)


def test_groups_are_given_to_functions_that_take_them():
    logits, labels, _ = drawn(3)
    users = np.arange(500) % 7 + (1 << 60)
    found = scores_of(logits, labels, groups=users).result(["click"], (), (mean_by_group,)).first.custom
    of_users = [average_precision_score(labels[users == u], logits[users == u]) for u in set(users)]
    assert found["mean_by_group"] == pytest.approx(np.mean(of_users), rel=1e-12)
    assert (
        scores_of(logits, labels).result(["click"], (), (mean_by_group,)).first.custom["mean_by_group"] == -1
    )


def test_the_value_does_not_depend_on_the_order_of_examples_and_functions_may_change_their_arrays():
    def weighted_sum(labels, predictions, weights):  # of which the last bits depend on the order
        labels *= np.arange(len(labels)) * weights
        predictions *= 1.1
        return (labels * predictions).sum()

    logits, labels, weights = drawn(4)
    order = np.random.default_rng(0).permutation(500)
    expected = scores_of(logits, labels, weights=weights).result(["click"], (), (weighted_sum, brier)).first
    halves = [scores_of(logits[each], labels[each], weights=weights[each]) for each in np.split(order, 2)]
    halves[0].merge(halves[1])
    assert halves[0].result(["click"], (), (weighted_sum, brier)).first == expected
    assert scores_of(logits, labels, weights=weights).result(["click"], (), (brier,)).first.custom == {
        "brier": expected.custom["brier"]
    }


def test_a_function_that_fails_costs_its_own_value_and_says_so(caplog):
    def broken(labels, predictions):
        return labels[10_000]

    def undefined(labels, predictions):
        return math.nan

    def several(labels, predictions):
        return predictions

    def huge(labels, predictions):
        return 10**400

    logits, labels, _ = drawn(5)
    found = scores_of(logits, labels).result(["click"], (), (broken, undefined, several, huge, plain_brier))
    assert found.first.custom["plain_brier"] == pytest.approx(brier_score_loss(labels, sigmoid(logits)))
    assert [found.first.value(name) for name in ("broken", "undefined", "several", "huge")] == [None] * 4
    assert found.record().keys().isdisjoint({"broken", "undefined", "several", "huge"})
    lines = [record.getMessage() for record in caplog.records]
    assert "metric broken of label 'click': IndexError" in lines[0]
    assert "test_custom_metrics.py:" in lines[0]
    assert "undefined of label 'click': returned nan; this evaluation goes on without it" in lines[1]
    assert "several of label 'click': returned" in lines[2]
    assert "huge of label 'click': OverflowError" in lines[3]
    none = scores_of(logits[:0], labels[:0]).result(["click"], (), (broken,))
    assert none.first.value("broken") is None
    assert len(caplog.records) == 4


def test_names():
    named = functools.partial(brier)
    for metric in (
        named,
        lambda labels, predictions: 0.0,
        5,
        None,
        [brier],
        "",
        "brier.py:",
        "a.py:b.c",
        "auc",
    ):
        with pytest.raises(ConfigError, match=r"train: metrics: .*: expected path/to/file\.py:function"):
            TrainOptions(metrics=[metric])
    for name in ("auc", "gauc", "logloss", "mrr", "calibration", "step", "split", "num_examples"):
        with pytest.raises(ConfigError, match=r"names other than girih.s: mrr, auc, auprc, calibration"):
            TrainOptions(metrics=[f"mine.py:{name}"])
    assert TrainOptions(metrics=["/of: 2/mine.py:f"]).metric_names == ["f"]
    with pytest.raises(ConfigError, match="train: metrics: brier, brier: expected different names"):
        TrainOptions(metrics=["mine.py:brier", brier])
    with pytest.raises(ConfigError, match="expected a list"):
        TrainOptions(metrics="mine.py:brier")
