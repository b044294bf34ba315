"""Metrics against scikit-learn, against plain twins, and merged against whole."""

from __future__ import annotations

import itertools
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.config.train import DIRECTIONS
from girih.errors import ConfigError, DataError, NonFiniteError
from girih.metrics import Scores
from girih.metrics.progressive import ProgressiveScores, progressive_metrics
from girih.metrics.result import OF_NUMBERS

# Few distinct logits, so that most examples are tied.
EXAMPLES = st.lists(
    st.tuples(
        st.sampled_from([-3.5, -1.0, -0.0, 0.0, 0.25, 2.0]),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.sampled_from([-7, 0, 2**40]),
    ),
    min_size=1,
    max_size=40,
)
FRACTIONS = st.lists(
    st.tuples(
        st.floats(-20, 20, width=32),
        st.floats(0, 1, width=32),
        st.floats(0.125, 8, width=32),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=40,
)


def naive_auc(logits, labels, weights):
    """All pairs of a positive and a negative, one by one; a fractional label is both."""
    wins = pairs = 0.0
    for (z, y, w), (other_z, other_y, other_w) in itertools.product(
        zip(logits, labels, weights, strict=True), repeat=2
    ):
        mass = float(w) * float(y) * float(other_w) * (1 - float(other_y))
        pairs += mass
        wins += mass * (1.0 if z > other_z else 0.5 if z == other_z else 0.0)
    return wins / pairs if pairs > 0 else None


def naive_gauc(logits, labels, weights, groups):
    total = mass = 0.0
    for group in set(groups):
        member = [group == other for other in groups]
        columns = [list(itertools.compress(column, member)) for column in (logits, labels, weights)]
        area = naive_auc(*columns)
        if area is not None:
            total += area * sum(map(float, columns[2]))
            mass += sum(map(float, columns[2]))
    return total / mass if mass else None


def contents(examples):
    logits, labels, weights, groups = zip(*examples, strict=True)
    return (
        np.array(logits, np.float32),
        np.array(labels, np.float32),
        np.array(weights, np.float32),
        np.array(groups),
    )


def scores_of(*columns):
    scores = Scores()
    scores.add(*columns)
    return scores


def generated(num_examples, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 2, num_examples)
    if ties:
        logits = np.round(logits)
    logits = logits.astype(np.float32)
    labels = (rng.random(num_examples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = rng.gamma(1.0, 1.0, num_examples).astype(np.float32)
    return logits, labels, weights, rng.integers(-20, 20, num_examples)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_scikit_learn_agrees(ties, weighted):
    from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

    logits, labels, weights, _ = generated(20_000, ties=ties)
    weights = weights if weighted else None
    metrics = scores_of(logits, labels, weights).result(["click"]).first
    labels = labels.astype(np.float64)  # scikit-learn computes in the type it is given
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), abs=1e-12)
    precision = average_precision_score(labels, logits, sample_weight=weights)
    assert metrics.auprc == pytest.approx(precision, abs=1e-12)
    predictions = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert metrics.logloss == pytest.approx(log_loss(labels, predictions, sample_weight=weights), rel=1e-12)
    rate = np.average(labels, weights=weights)
    entropy = log_loss(labels, np.full(len(labels), rate), sample_weight=weights)
    assert metrics.normalized_entropy == pytest.approx(metrics.logloss / entropy, rel=1e-12)
    assert metrics.mean_label == pytest.approx(rate, rel=1e-12)
    assert metrics.mean_prediction == pytest.approx(np.average(predictions, weights=weights), rel=1e-12)
    assert metrics.calibration == pytest.approx(metrics.mean_prediction / metrics.mean_label, rel=1e-12)
    assert metrics.num_examples == 20_000


@settings(max_examples=150, deadline=None)
@given(EXAMPLES | FRACTIONS)
def test_all_pairs_agree(examples):
    columns = contents(examples)
    metrics = scores_of(*columns).result(["click"]).first
    for value, naive in ((metrics.auc, naive_auc(*columns[:3])), (metrics.gauc, naive_gauc(*columns))):
        assert (value is None) == (naive is None)
        if naive is not None:
            assert value == pytest.approx(naive, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(EXAMPLES | FRACTIONS, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_parts_merge_to_the_same_bits(examples, random, weighted, grouped):
    def scored(part):
        logits, labels, weights, groups = contents(part)
        return scores_of(logits, labels, weights if weighted else None, groups if grouped else None)

    whole = scored(examples).result(["click"])
    shuffled = random.sample(examples, len(examples))
    merged = Scores()
    while shuffled:
        size = random.randint(1, len(shuffled))
        part = scored(shuffled[:size])
        merged.merge(Scores.from_arrays(part.arrays()) if random.random() < 0.5 else part)
        shuffled = shuffled[size:]
    assert merged.result(["click"]) == whole
    assert merged.num_examples == len(examples)


@settings(max_examples=60, deadline=None)
@given(EXAMPLES)
def test_a_whole_weight_is_so_many_copies(examples):
    examples = [(z, y, float(round(w)), g) for z, y, w, g in examples]
    columns = contents(examples)
    copies = [column.repeat(columns[2].astype(int)) for column in columns]
    metrics = scores_of(*columns).result(["click"]).first
    copied = scores_of(copies[0], copies[1], None, copies[3]).result(["click"]).first
    for name in ("auc", "gauc", "logloss", "calibration", "mean_label"):
        assert getattr(metrics, name) == (
            pytest.approx(getattr(copied, name), rel=1e-12)
            if getattr(copied, name)
            else getattr(copied, name)
        )


def test_a_fractional_label_is_two_weighted_examples():
    from sklearn.metrics import roc_auc_score

    logits, _, weights, groups = generated(500, ties=True)
    labels = np.random.default_rng(1).random(500).astype(np.float32)
    fractional = scores_of(logits, labels, weights, groups).result(["click"]).first
    binary = np.repeat([1.0, 0.0], 500)
    doubled = np.concatenate([weights * labels, weights * (1 - labels)])
    split = scores_of(np.tile(logits, 2), binary, doubled, np.tile(groups, 2)).result(["click"]).first
    for name in ("auc", "gauc", "logloss", "normalized_entropy", "mean_prediction"):
        assert getattr(fractional, name) == pytest.approx(getattr(split, name), rel=1e-6)
    assert fractional.auc == pytest.approx(
        roc_auc_score(binary, np.tile(logits, 2), sample_weight=doubled), abs=1e-6
    )


def test_ranking_is_by_logit_where_the_sigmoid_is_flat():
    metrics = scores_of([40.0, 41.0], [0.0, 1.0]).result(["click"]).first
    assert metrics.auc == 1.0
    assert metrics.logloss == pytest.approx(20.0)


def test_labels_are_apart():
    logits, labels, weights, groups = generated(300)
    both = scores_of(np.stack([logits, -logits], 1), np.stack([labels, labels], 1), weights, groups)
    result = both.result(["click", "buy"])
    assert result.by_label["click"] == scores_of(logits, labels, weights, groups).result(["x"]).first
    assert result.by_label["buy"].auc == pytest.approx(1 - result.auc, abs=1e-12)
    assert result.first is result.by_label["click"]
    assert (result.auc, result.logloss) == (result.first.auc, result.first.logloss)
    assert set(result.record()) == {
        "auc",
        "auprc",
        "logloss",
        "normalized_entropy",
        "calibration",
        "gauc",
        "uauc",
    }
    assert str(result).count("\n") == 1
    assert set(DIRECTIONS) - set(OF_NUMBERS) <= set(result.record())


def test_calibration_curve_has_equal_bins_of_ascending_prediction():
    logits, labels, _, _ = generated(20_010)
    metrics = scores_of(logits, labels).result(["click"]).first
    curve = metrics.calibration_curve
    assert len(curve) == 20
    assert sum(one.count for one in curve) == 20_010
    assert {one.count for one in curve} <= {1000, 1001}
    assert [one.prediction for one in curve] == sorted(one.prediction for one in curve)
    assert all(abs(one.prediction - one.label) < 0.07 for one in curve)  # labels were drawn from these logits
    assert sum(one.label * one.count for one in curve) == pytest.approx(labels.sum())
    order = np.argsort(logits)[:1000]
    assert curve[0].label == pytest.approx(labels[order].mean(), abs=2e-3)


def test_equal_predictions_share_a_bin():
    curve = scores_of([0.0] * 90 + [1.0] * 10, [0.0, 1.0] * 50).result(["click"]).first.calibration_curve
    assert [(one.prediction, one.label, one.count) for one in curve] == [
        (0.5, 0.5, 90),
        (pytest.approx(1 / (1 + math.exp(-1))), 0.5, 10),
    ]


def test_what_is_undefined_is_none_and_json_has_no_nan():
    nothing = Scores().result(["click"])
    assert nothing.first.num_examples == 0
    no_weight = scores_of([1.0, 2.0], [0.0, 1.0], [0.0, 0.0]).result(["click"])
    assert no_weight.first.num_examples == 2
    for metrics in (nothing.first, no_weight.first):
        assert {metrics.auc, metrics.logloss, metrics.normalized_entropy, metrics.calibration} == {None}
        assert metrics.mean_label is None
        assert metrics.calibration_curve == ()
    clicks = scores_of([1.0, 2.0], [1.0, 1.0], None, [1, 1]).result(["click"]).first
    assert (clicks.auc, clicks.gauc, clicks.normalized_entropy) == (None, None, None)
    assert clicks.logloss > 0
    assert clicks.calibration < 1
    no_clicks = scores_of([1.0], [0.0]).result(["click"]).first
    assert (no_clicks.auc, no_clicks.calibration, no_clicks.mean_label) == (None, None, 0.0)
    for metrics in (nothing, no_weight):
        json.dumps([metrics.record(), metrics.as_dict()], allow_nan=False)
    assert "gauc" not in scores_of([1.0, 2.0], [0.0, 1.0]).result(["click"]).record()


@pytest.mark.parametrize("weighted", [False, True])
def test_aucs_of_users_are_means_of_scikit_learn(weighted):
    from sklearn.metrics import roc_auc_score

    logits, labels, weights, users = generated(3000, ties=True)
    weights = weights if weighted else None
    metrics = scores_of(logits, labels, weights, users).result(["click"]).first
    areas, masses = [], []
    for user in np.unique(users):
        own = users == user
        if len(set(labels[own])) == 2:
            mine = None if weights is None else weights[own]
            areas.append(roc_auc_score(labels[own].astype(float), logits[own], sample_weight=mine))
            masses.append(own.sum() if mine is None else mine.sum(dtype=float))
    assert metrics.uauc == pytest.approx(np.mean(areas), abs=1e-12)
    assert metrics.gauc == pytest.approx(np.average(areas, weights=masses), abs=1e-9)
    assert abs(metrics.uauc - metrics.gauc) > 1e-6


def test_precision_without_positives_is_undefined():
    metrics = scores_of([0.1, 0.2], [0, 0]).result(["click"]).first
    assert metrics.auprc is None
    assert scores_of([0.1, 0.2], [0, 1]).result(["click"]).first.auprc == 1.0


def test_gauc_leaves_out_groups_of_one_class():
    logits = [0.1, 0.9, 0.5, 0.2, 0.3, 0.4, 0.9]
    labels = [0, 1, 1, 0, 1, 1, 1]
    groups = [1, 1, 2, 3, 3, 3, 2]  # group 1 is in order, group 2 has no negative, group 3 is in order
    assert scores_of(logits, labels, None, groups).result(["click"]).first.gauc == 1.0
    swapped = [0.9, 0.1, *logits[2:]]
    assert scores_of(swapped, labels, None, groups).result(["click"]).first.gauc == pytest.approx(3 / 5)


def test_weights_may_come_and_go():
    logits, labels, weights, _ = generated(90)
    scores = Scores()
    scores.add(logits[:30], labels[:30])
    scores.add(logits[30:60], labels[30:60], weights[30:60])
    scores.add(logits[60:], labels[60:])
    weights[:30] = weights[60:] = 1
    assert scores.result(["click"]) == scores_of(logits, labels, weights).result(["click"])


def test_a_copy_is_taken():
    logits = np.array([0.0, 1.0], np.float32)
    scores = scores_of(logits, [0.0, 1.0])
    logits[:] = [1.0, 0.0]
    assert scores.result(["click"]).auc == 1.0


def test_arrays_go_over_the_wire_as_they_are():
    logits, labels, weights, groups = generated(10)
    arrays = scores_of(logits, labels, weights, groups).arrays()
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "logits": ("float32", (10, 1)),
        "labels": ("float32", (10, 1)),
        "weights": ("float32", (10,)),
        "groups": ("int64", (10,)),
    }
    assert Scores().arrays() == {}
    assert Scores.from_arrays({}).num_examples == 0
    empty = Scores.from_arrays(scores_of(np.zeros((0, 2)), np.zeros((0, 2))).arrays())
    empty.merge(scores_of(np.zeros((3, 2)), np.ones((3, 2))))
    assert empty.num_examples == 3


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        (([math.nan, 0.0], [0, 1]), NonFiniteError, "1 of 2 logits are NaN or infinite, first in example 0"),
        (([0.0, math.inf], [0, 1]), NonFiniteError, "example 1"),
        (([0.0, 0.0], [0, 2]), DataError, "label 2.0: expected a number from 0 to 1"),
        (([0.0, 0.0], [0, math.nan]), DataError, "label nan"),
        (([0.0, 0.0], [0, 1], [1, -1]), DataError, "weight -1.0"),
        (([0.0, 0.0], [0, 1], [1, math.inf]), DataError, "weight inf"),
        (([0.0, 0.0], [0, 1, 1]), ConfigError, r"logits \(2, 1\) and labels \(3, 1\)"),
        (([0.0, 0.0], [0, 1], [1]), ConfigError, r"weights of shape \(1,\)"),
        (([0.0, 0.0], [0, 1], None, [1]), ConfigError, r"groups of shape \(1,\)"),
        (([0.0, 0.0], [0, 1], None, [1.5, 2.0]), ConfigError, "groups of type float64: expected int64"),
        (([[0.0, 1.0]], [[0, 1]]), ConfigError, "2 labels added to scores of 1"),
        (([0.0], [1], None, [3]), ConfigError, "groups were given now and not before"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_nothing_is_added(columns, error, message):
    scores = scores_of([0.0, 1.0], [0.0, 1.0])
    with pytest.raises(error, match=message):
        scores.add(*columns)
    assert scores.num_examples == 2
    assert scores.result(["click"]).auc == 1.0


def test_wrong_names_are_refused():
    scores = scores_of([0.0, 1.0], [0.0, 1.0])
    with pytest.raises(ConfigError, match="2 label names for scores of 1"):
        scores.result(["click", "buy"])
    with pytest.raises(ConfigError, match="no name twice"):
        scores.result(["click", "click"])
    with pytest.raises(ConfigError, match="groups were given before and not now"):
        scores_of([0.0], [1], None, [3]).add([0.0], [1])


def test_a_million_scores_take_no_time():
    from sklearn.metrics import roc_auc_score

    logits, labels, _, groups = generated(1_000_000)
    scores = Scores()
    for start in range(0, len(logits), 4096):
        part = slice(start, start + 4096)
        scores.add(logits[part], labels[part], None, groups[part])
    began = time.perf_counter()
    metrics = scores.result(["click"])
    assert (
        time.perf_counter() - began < 5
    )  # 0.3 s on two cores; a Python loop over examples would take minutes
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)


def test_labels_that_do_not_count_are_left_out_and_numbers_have_errors():
    rng = np.random.default_rng(5)
    logits, click = rng.normal(size=(200, 3)).astype(np.float32), rng.integers(0, 2, 200)
    labels = np.stack([click, rng.integers(0, 2, 200), rng.gamma(2.0, size=200)], axis=1).astype(np.float32)
    counts = (rng.random((200, 3)) < 0.5) * rng.random((200, 3))
    labels[counts == 0] = 99.0  # not looked at
    weights = rng.random(200).astype(np.float32)
    losses = ("bce", "bce", "huber")
    whole, parts = Scores(losses), [Scores(losses), Scores(losses)]
    whole.add(logits, labels, weights, label_weights=counts)
    for part, rows in zip(parts, (slice(70), slice(70, None)), strict=True):
        part.add(logits[rows], labels[rows], weights[rows], label_weights=counts[rows])
    parts[1].merge(Scores.from_arrays(parts[0].arrays(), losses))
    found = whole.result(["a", "b", "c"])
    assert parts[1].result(["a", "b", "c"]) == found
    for index, name in enumerate("ab"):
        there = counts[:, index] > 0
        alone = Scores()
        own = (counts[:, index].astype(np.float32) * weights)[there]
        alone.add(logits[there, index], labels[there, index], own)
        assert alone.result([name]).by_label[name] == found.by_label[name]
    there, share = counts[:, 2] > 0, (counts[:, 2] * weights)[counts[:, 2] > 0]
    errors = np.abs(logits[there, 2] - labels[there, 2])
    number = found.by_label["c"]
    assert number.num_examples == there.sum()
    assert number.mae == pytest.approx(np.average(errors, weights=share), rel=1e-6)
    assert number.rmse == pytest.approx(np.average(errors**2, weights=share) ** 0.5, rel=1e-6)
    assert number.auc is number.logloss is number.calibration is None
    with pytest.raises(DataError, match=r"label 99.0: expected a number from 0 to 1"):
        Scores().add(logits, labels, weights)
    assert Scores(losses).result(["a", "b", "c"]).by_label["c"].mae is None


def test_progressive_counts_are_of_labels_that_count():
    logits = np.array([[1.0, 3.0], [-1.0, 5.0], [2.0, 0.0]], np.float32)
    labels = np.array([[1.0, 1.0], [0.0, 9.0], [0.0, 0.0]], np.float32)
    counts = np.array([[1.0, 1.0], [1.0, 2.0], [0.0, 0.0]], np.float32)
    scores = ProgressiveScores(2, losses=("bce", "mse"))
    scores.add(logits, labels, label_weights=counts)
    found = progressive_metrics(scores.counts(), ["a", "b"], ("bce", "mse"))
    assert found["a"]["auc"] == 1
    assert found["a"]["num_examples"] == found["b"]["num_examples_last_hour"] == 2
    assert found["b"]["mae"] == pytest.approx((2 + 2 * 4) / 3)
    assert found["b"]["rmse"] == pytest.approx(((4 + 2 * 16) / 3) ** 0.5)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_progressive_counts_are_those_of_an_evaluation(weighted, counted):
    """An example that weighs nothing is counted, one that does not count for a label is not."""
    rng = np.random.default_rng(11)
    logits = rng.normal(size=(200, 2)).astype(np.float32)
    labels = np.stack([rng.random(200) < 0.3, rng.normal(size=200)], axis=1).astype(np.float32)
    weights = rng.choice([0.0, 0.5, 2.0], 200).astype(np.float32) if weighted else None
    counts = rng.choice([0.0, 1.0, 3.0], (200, 2)).astype(np.float32) if counted else None
    losses, names = ("bce", "mse"), ["a", "b"]
    progressive, evaluated = ProgressiveScores(2, losses=losses), Scores(losses)
    progressive.add(logits, labels, weights, counts)
    evaluated.add(logits, labels, weights, label_weights=counts)
    told, exact = progressive_metrics(progressive.counts(), names, losses), evaluated.result(names).by_label
    for index, name in enumerate(names):
        there = 200 if counts is None else np.count_nonzero(counts[:, index])
        assert told[name]["num_examples"] == exact[name].num_examples == there
    assert told["a"]["logloss"] == pytest.approx(exact["a"].logloss, rel=1e-6)
    assert abs(told["a"]["auc"] - exact["a"].auc) <= told["a"]["auc_error"] + 1e-9
    assert told["b"]["mae"] == pytest.approx(exact["b"].mae, rel=1e-6)
    assert told["b"]["rmse"] == pytest.approx(exact["b"].rmse, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_ranking_is_that_of_plain_loops_and_ties_count_against_the_model(seed):
    rng = np.random.default_rng(seed)
    logits, groups = rng.integers(0, 8, 150).astype(np.float32), rng.integers(-3, 9, 150)
    labels = (rng.random(150) < 0.2).astype(np.float32)
    scores = Scores()
    scores.add(logits, labels, groups=groups)
    found = scores.result(["click"], (1, 3, 10)).first.ranking
    expected = {name: [] for name in found}
    for group in set(groups.tolist()):
        of_group = sorted(
            zip(-logits[groups == group], labels[groups == group], strict=True)
        )  # ties: label 0 first
        places = [place for place, (_, label) in enumerate(of_group, 1) if label]
        if not places:
            continue
        expected["mrr"].append(1 / places[0])
        for k in (1, 3, 10):
            first = [place for place in places if place <= k]
            expected[f"recall@{k}"].append(len(first) / len(places))
            ideal = sum(1 / math.log2(place + 1) for place in range(1, min(k, len(places)) + 1))
            expected[f"ndcg@{k}"].append(sum(1 / math.log2(place + 1) for place in first) / ideal)
    assert found == pytest.approx({name: np.mean(values) for name, values in expected.items()}, rel=1e-12)
    assert scores.result(["click"]).first.ranking == {}
