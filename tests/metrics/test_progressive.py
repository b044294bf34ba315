"""Progressive scores beside the exact metrics."""

import numpy as np
import pytest

from girih.metrics import Scores
from girih.metrics.progressive import ProgressiveScores, progressive_metrics


def test_metrics_are_within_the_error_they_tell_and_add_up_over_trainers() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(-2, 1, (5000, 1)).astype(np.float32)
    labels = (rng.random((5000, 1)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    exact = Scores()
    exact.add(logits, labels)
    trainers = [ProgressiveScores(1), ProgressiveScores(1)]
    for place, part in enumerate(np.array_split(np.arange(5000), 10)):
        trainers[place % 2].add(logits[part], labels[part], None)
    told = progressive_metrics(trainers[0].counts() + trainers[1].counts(), ["click"])["click"]
    expected = exact.result(["click"])
    assert abs(told["auc"] - expected.auc) <= told["auc_error"] < 1e-3
    assert told["logloss"] == pytest.approx(expected.logloss, rel=1e-6)
    assert told["num_examples"] == told["num_examples_last_hour"] == 5000


def test_the_last_hour_forgets_what_came_before_it_and_the_whole_does_not() -> None:
    now = [0.0]
    scores = ProgressiveScores(1, clock=lambda: now[0])
    ones = np.ones((4, 1), np.float32)
    scores.add(ones, ones, None)
    now[0] = 3601.0
    scores.add(ones[:1], ones[:1], None)
    told = progressive_metrics(scores.counts(), ["click"])["click"]
    assert (told["num_examples"], told["num_examples_last_hour"]) == (5, 1)
    assert told["auc"] is None
