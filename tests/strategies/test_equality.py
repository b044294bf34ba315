"""Variants of strategies that have the same results: rows with their optimizer state, dense parameters, metrics, features.

They are compared after 20 steps, 200 in ``make test-all``. Dropout is off, and so is batch norm where it is not named. A rating is in 3
examples of a hundred, so most trainers' shares of a step have none, and a mean of the trainers' means would be wrong by half.
"""

import numpy as np
import pytest
from matrix import DENSE, ROWS, VARIANTS, Runs, Workload, cells
from scenes import SIZE, STEPS, counted, play, write

from girih.errors import ConfigError
from girih.models import Retrieval
from girih.strategies import BY_NAME
from runs import columns_of, difference, difference_of_rows, latest

FLOAT16_RMS = 0.03
"""Root of the mean square of what differs between rows that travelled as float16 and rows that did not, by the largest number
of a column: 0.007 was seen."""
HELD_OUT = 301
PROGRESSIVE = "train.progressive_validation=true"
MODELS = ("deepfm", "din", "mmoe", "star", "weighted")
BATCH_NORM = (
    "model={name='deepfm', hidden=[16, 8], batch_norm=true}",
    "train.global_batch_norm=true",
    "dense_optimizer={name='sgd', lr=0.1}",  # biases before batch norm have no gradient but noise, which Adam scales up
    "data.batch_size=27",  # unequal shares
)
STEPWISE = ("model.dropout=0.1", "train.lr_schedule={name='ExponentialLR', gamma=0.95, interval='step'}")
WIDE = "model={name='wide_deep', hidden=[8]}"
TOWERS = "name='retrieval', user=['user', 'tags', 'history'], item_id='item', tower_dim=4, hidden=[8], similarity='cosine', temperature=0.2"
"""Cosines: with dot products the last bias of the item's tower adds the same to all scores of a user, so that its gradient is
nothing but rounding, which Adam scales up."""
IN_BATCH = {
    # 71 examples a step leave one for the last step of 20, so that one trainer has none
    "softmax": (f"model={{{TOWERS}}}", "data.batch_size=71"),
    "bpr": (f"model={{{TOWERS}, loss='bpr'}}",),
}
WORKLOADS = {
    **{model: Workload(model) for model in ("din", "star", "weighted")},
    **{model: Workload(model, (PROGRESSIVE,)) for model in ("deepfm", "mmoe")},
    "batch-norm": Workload(overrides=BATCH_NORM, tolerance=(5e-5, 3e-5)),
    "lamb": Workload(overrides=("dense_optimizer={name='lamb', lr=0.01}",)),
    "stepwise": Workload(overrides=STEPWISE),
    "bfloat16": Workload(overrides=("train.precision=bfloat16", "train.clip_norm=0.01")),
    "lru": Workload(
        overrides=("tables=[{name='user', eviction={name='lru', max_rows=40}}]", "store.shards=1")
    ),
    "labels": Workload("labels"),
    "labels-cut": Workload("labels", ("schedule.micro_batches=3",), like="labels"),
    "wide-labels": Workload("labels", (WIDE,)),
    "wide-labels-cut": Workload("labels", (WIDE, "schedule.micro_batches=2"), like="wide-labels"),
    **{name: Workload("din", overrides) for name, overrides in IN_BATCH.items()},
    "four-trainers": Workload("din", trainers=4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(write(tmp_path_factory.mktemp("equality"), held_out=HELD_OUT), WORKLOADS)


def is_equal(variant):
    return not variant.unequal


@pytest.mark.parametrize(("variant", "workload"), cells(WORKLOADS, is_equal))
def test_rows_and_parameters_equal_the_reference(runs, variant, workload):
    (rows, dense), (most_rows, most_dense) = runs.difference(variant, workload)
    assert rows <= most_rows
    assert dense <= most_dense  # running moments of batch norm too


@pytest.mark.parametrize(("variant", "workload"), cells(WORKLOADS))
def test_the_summary_equals_the_reference(runs, variant, workload):
    summary, (reference, is_exact) = runs.of(variant, workload).summary, runs.reference(variant, workload)
    expected = reference.summary
    assert summary["steps"] == expected["steps"] or variant.unequal
    assert summary["steps"] >= (STEPS if workload != "softmax" else 1)
    assert summary["staleness_max"] <= variant.staleness
    assert summary["lost_updates"] == summary["kept"] == 0
    if variant.unequal:
        assert summary["num_examples"] == expected["num_examples"]
        assert summary["num_rows"] == expected["num_rows"]
        return
    for name in ("num_examples", "num_rows", "features"):
        assert summary[name] == expected[name], name
    assert summary["store"].get("evicted") == expected["store"].get("evicted")
    if is_exact:
        for name in ("auc", "logloss", "by_label"):
            assert summary[name] == expected[name], name


@pytest.mark.parametrize(("variant", "workload"), cells("deepfm mmoe"))
def test_progressive_validation_counts_each_example_once(runs, variant, workload):
    scores, expected = (
        runs.of(each, workload).summary["progressive"] for each in (variant, VARIANTS["local"])
    )
    assert scores.keys() == expected.keys()
    for label, score in scores.items():
        assert score["num_examples"] == score["num_examples_last_hour"] == STEPS * SIZE
        if variant.unequal:
            assert score["logloss"] == pytest.approx(expected[label]["logloss"], abs=0.05)
        else:
            assert score["logloss"] == pytest.approx(expected[label]["logloss"], rel=1e-5)
            assert score["auc"] == pytest.approx(expected[label]["auc"], abs=1e-4)


@pytest.mark.parametrize("model", ["deepfm", "din"])
def test_features_are_counted_as_in_the_files(runs, model):
    features = {name: (name, name) for name in ("user", "item", "tags")}
    if model == "din":
        features["history"] = ("history", "item")
    expected = counted(runs.directory, features)
    assert 0 < expected["user"]["unseen"] < 1
    assert runs.of(VARIANTS["local"], model).summary["features"] == expected


def test_a_bounded_table_evicts_rows(runs):
    assert runs.of(VARIANTS["local"], "lru").summary["store"]["evicted"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_comparison_sees_a_dimension_that_is_wrong_by_a_hundredth(runs, model):
    columns = columns_of(latest(runs.of(VARIANTS["local"], model).path))
    assert difference_of_rows(columns, columns) == 0
    for name, (ids, values) in columns.items():
        for dimension in np.flatnonzero(values.any(axis=0)):
            wrong = values.copy()
            wrong[:, dimension] *= 1.01
            assert difference_of_rows(columns, columns | {name: (ids, wrong)}) > 100 * ROWS, name


@pytest.mark.parametrize(("variant", "workload"), cells("din", lambda variant: "float16" in variant.unequal))
def test_rows_that_travel_as_float16_are_near_those_that_do_not(runs, variant, workload):
    half, whole = runs.of(variant, workload), runs.of(VARIANTS["local"], workload)
    near = columns_of(latest(half.path))
    for name, (ids, values) in columns_of(latest(whole.path)).items():
        np.testing.assert_array_equal(near[name][0], ids)
        relative = (near[name][1] - values) / np.abs(values).max(axis=0)
        assert 0 < np.sqrt(np.square(relative).mean()) < FLOAT16_RMS
    assert half.summary["auc"] == pytest.approx(whole.summary["auc"], abs=0.01)


@pytest.mark.slow
def test_metrics_are_of_the_labelled_examples(runs):
    by_label = runs.of(VARIANTS["local"], "labels").summary["by_label"]
    counts = {name: metrics["num_examples"] for name, metrics in by_label.items()}
    assert counts["click"] == HELD_OUT
    assert counts["rating"] < 40 < counts["spent"] < counts["buy"] < HELD_OUT
    for name in ("spent", "rating"):
        assert by_label[name]["auc"] is None
        assert by_label[name]["rmse"] >= by_label[name]["mae"] > 0


@pytest.mark.parametrize("strategy", BY_NAME)
def test_a_loss_over_the_items_of_a_step_is_refused_by_strategies_that_do_not_support_it(runs, strategy):
    scene = {
        "name": f"refused-{strategy}",
        "config": "din",
        "strategy": strategy,
        "overrides": IN_BATCH["bpr"],
    }
    listed = ", ".join(Retrieval.loss_strategies)
    if strategy in Retrieval.loss_strategies:
        scene["overrides"] = [*IN_BATCH["bpr"], "schedule.micro_batches=2"]
        message = r"micro_batches = 2: the loss of Retrieval needs a whole batch"
    else:
        message = f"{strategy}: the loss of Retrieval supports {listed} only"
    with pytest.raises(ConfigError, match=message):
        play(runs.directory, scene)


@pytest.mark.parametrize(("variant", "workload"), cells("dien"))
def test_dien_equals_local_except_for_the_negatives_that_each_trainer_draws_in_its_share(
    runs, variant, workload
):
    trained = {
        (each.name, auxiliary): runs.train(
            {
                "name": f"{each}-{workload}-{auxiliary}",
                "config": "din",
                "strategy": each.strategy,
                "overrides": [f'model={{name="dien", hidden=[8], auxiliary={auxiliary}}}'],
            },
            each.trainers,
        )
        for auxiliary in (0.0, 1.0)
        for each in (VARIANTS["local"], variant)
    }
    rows, dense = difference(trained["local", 0.0].path, trained[variant.name, 0.0].path)
    assert rows < ROWS
    assert dense < DENSE
    rows, dense = difference(trained["local", 1.0].path, trained[variant.name, 1.0].path)
    assert dense > DENSE
    aucs = [trained[variant.name, auxiliary].summary["auc"] for auxiliary in (0.0, 1.0)]
    assert aucs[0] == pytest.approx(aucs[1], abs=0.1)


@pytest.mark.parametrize(("variant", "workload"), cells("long"))
def test_trainers_that_do_not_wait_for_each_other_learn_as_much(runs, variant, workload):
    epochs = [f"train.epochs={max(3, 180 // STEPS)}"]
    scene = {"config": "din", "strategy": variant.strategy, "options": variant.options, "overrides": epochs}
    expected = runs.train({"name": f"local-{workload}", "config": "din", "overrides": epochs}).summary
    summary = runs.train({"name": f"{variant}-{workload}", **scene}, variant.trainers).summary
    assert summary["num_examples"] == expected["num_examples"]
    assert summary["num_rows"] == expected["num_rows"]
    assert summary["auc"] == pytest.approx(expected["auc"], abs=0.03)
