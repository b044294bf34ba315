"""Averaging algorithms beside their formulas, number by number."""

import numpy as np
import pytest

from girih.hierarchical.averaging import BY_NAME

START = [1.0, -2.0, 0.5]
ROUNDS = [
    ([3.0, -2.0, 1.5], [0.0, 4.0, 0.5]),
    ([1.0, 1.0, 1.0], [2.0, -3.0, 8.0]),
    ([5.0, 0.0, 0.25], [5.0, 1.0, 0.0]),
]
"""What two replicas have before each of three rounds: what they learned meanwhile is arbitrary."""


def easgd(alpha, rounds):
    """Zhang et al. 2015, Algorithm 1: a replica at a time, x ← x − α (x − x̃), x̃ ← x̃ + α (x − x̃)."""
    center, told = list(START), []
    for replicas in rounds:
        after = []
        for x in replicas:
            elastic = [alpha * (xi - ci) for xi, ci in zip(x, center, strict=True)]
            after.append([xi - e for xi, e in zip(x, elastic, strict=True)])
            center = [ci + e for ci, e in zip(center, elastic, strict=True)]
        told.append(after)
    return told, center


def ma(alpha, rounds):
    """x ← (1 − α) x + α (x¹ + x²) / 2, all together."""
    told = []
    for one, two in rounds:
        mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
        told.append(
            [[(1 - alpha) * xi + alpha * m for xi, m in zip(x, mean, strict=True)] for x in (one, two)]
        )
    return told, [(a + b) / 2 for a, b in zip(*rounds[-1], strict=True)]


def bmuf(alpha, rounds, momentum=0.5):
    """Chen & Huo 2016: G = x̄ − W, Δ ← η Δ + G, W ← W + Δ; with two workers η = 1 − 1/2."""
    whole, update, told = list(START), [0.0] * 3, []
    for one, two in rounds:
        mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
        update = [momentum * u + (m - w) for u, m, w in zip(update, mean, whole, strict=True)]
        whole = [w + u for w, u in zip(whole, update, strict=True)]
        told.append(
            [[(1 - alpha) * xi + alpha * w for xi, w in zip(x, whole, strict=True)] for x in (one, two)]
        )
    return told, [(a + b) / 2 for a, b in zip(*rounds[-1], strict=True)]


@pytest.mark.parametrize("rate", [None, 0.25, 1.0])
@pytest.mark.parametrize(
    ("name", "written_out", "default"), [("easgd", easgd, 0.45), ("ma", ma, 1.0), ("bmuf", bmuf, 1.0)]
)
def test_rounds_are_the_formulas(name, written_out, default, rate):
    algorithm = BY_NAME[name](2, rate)
    algorithm.begin(np.array(START, np.float32))
    expected, model = written_out(default if rate is None else rate, ROUNDS)
    for replicas, after in zip(ROUNDS, expected, strict=True):
        given = np.array(replicas, np.float32)
        if algorithm.together:
            corrections = algorithm.round(given.copy())
        else:
            corrections = np.concatenate([algorithm.round(each[None]) for each in given])
        np.testing.assert_allclose(given + corrections, after, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(algorithm.model(np.array(ROUNDS[-1], np.float32)), model, rtol=1e-6)


def test_easgd_keeps_the_sum_of_replicas_and_centre():
    algorithm = BY_NAME["easgd"](2)
    algorithm.begin(np.array(START, np.float32))
    replicas = np.array(ROUNDS[0], np.float32)
    before = replicas.sum(axis=0) + algorithm.center
    replicas += algorithm.round(replicas)
    np.testing.assert_allclose(replicas.sum(axis=0) + algorithm.center, before, rtol=1e-6)


@pytest.mark.parametrize("name", BY_NAME)
def test_replicas_that_learn_nothing_come_together(name):
    algorithm = BY_NAME[name](3)
    replicas = np.array([[0.0], [6.0], [3.0]], np.float32)
    algorithm.begin(replicas.mean(axis=0))
    for _ in range(60):
        for part in [replicas] if algorithm.together else np.split(replicas, 3):
            part += algorithm.round(part.copy())
    np.testing.assert_allclose(replicas, 3.0, atol=1e-3)
    np.testing.assert_allclose(algorithm.model(replicas), 3.0, atol=1e-3)
