"""What variants of strategies do at the beginnings, ends and edges of runs.

Runs read 161 examples, 16 at a time, so that the last step has one example and the shares of other trainers are empty. They are saved
amid an epoch, resumed, stopped early, evaluated, spread over tiers, and disturbed by numbers that are not finite.
"""

import pytest
from matrix import VARIANTS, Runs, Workload, cells
from scenes import write

from runs import columns_of, difference, difference_of_rows, latest

SIZE, NUM_EXAMPLES, HELD_OUT = 16, 161, 101
STEPS, SAVED_STEP = 11, 4
MOST_ROWS_AHEAD = 4 * 12
"""Batches of one example that are read ahead, and ids of an example."""
SAVES = ("checkpoint.every_steps=4",)
DROPOUT = ("model.dropout=0.1", *SAVES)
TIERS = (
    'store.tiers=["dram","ssd"]',
    "store.hot_rows=15",
    "store.warm_up_steps=2",
    "store.flush_every_steps=3",
)
EARLY_STOP = 'train.early_stopping={metric="auc", patience=0, min_delta=0.5}'
PLATEAU = 'train.lr_schedule={name="ReduceLROnPlateau", factor=0.1, patience=0, threshold=0.5}'
ENDS = {
    "early-stop": ("train.evaluate_every_steps=2", EARLY_STOP, "train.epochs=2"),
    "plateau": ("train.epochs=2", "train.evaluate_every_steps=3", PLATEAU),
    "max-steps": ("train.max_steps=7", "train.evaluate_every_steps=4"),
}
SPOILS = [("nan", 1, 3), ("inf", 1, 6)]
"""A number that is not finite, the trainer that meets it, and the step."""
WORKLOADS = {
    "plain": Workload(overrides=SAVES),
    "interrupted": Workload(overrides=DROPOUT),
    "resumed": Workload(overrides=DROPOUT, resumes="interrupted", from_step=SAVED_STEP),
    "tiered": Workload(overrides=(*DROPOUT, *TIERS), scene={"staged": 8}),
    "tiered-resumed": Workload(
        overrides=(*DROPOUT, *TIERS), scene={"staged": 8}, resumes="tiered", from_step=SAVED_STEP
    ),
    **{name: Workload(overrides=overrides, scene={"valid": True}) for name, overrides in ENDS.items()},
    "ragged": Workload(overrides=("train.epochs=2",), scene={"valid": True, "slow_rank": 1}),
    "evaluated-deepfm": Workload(resumes="plain", resumes_of="local"),
    "din": Workload("din"),
    "evaluated-din": Workload("din", resumes="din", resumes_of="local"),
    "skipped": Workload(overrides=('train.on_nonfinite="skip"',), scene={"spoil": SPOILS}),
    "stopped": Workload(
        overrides=('train.on_nonfinite="stop"',), scene={"spoil": SPOILS[:1], "raises": True}
    ),
    "tail-16": Workload("din", trainers=3),
    "tail-1": Workload("din", ("data.batch_size=1", "train.max_steps=20"), trainers=3),
    "tail-weighted": Workload("weighted", trainers=3),
}
LOCAL = VARIANTS["local"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lifecycle")
    return Runs(write(directory, num_examples=NUM_EXAMPLES, size=SIZE, held_out=HELD_OUT), WORKLOADS)


def is_equal(variant):
    return not variant.unequal


def assert_equal_to_reference(runs, variant, workload):
    (rows, dense), (most_rows, most_dense) = runs.difference(variant, workload)
    assert rows <= most_rows
    assert dense <= most_dense


@pytest.mark.parametrize(("variant", "workload"), cells("resumed"))
def test_a_resumed_run_equals_an_uninterrupted_one(runs, variant, workload):
    """Amid an epoch, with dropout."""
    resumed, whole = runs.of(variant, workload), runs.of(variant, "interrupted")
    assert resumed.summary["steps"] == whole.summary["steps"] == STEPS
    assert difference(whole.path, resumed.path) == (0, 0)


@pytest.mark.parametrize(
    ("variant", "workload"), cells("interrupted", lambda variant: variant.exact and variant.trainers == 1)
)
def test_one_trainer_with_dropout_equals_the_reference(runs, variant, workload):
    assert_equal_to_reference(runs, variant, workload)


@pytest.mark.slow
def test_dropout_changes_rows(runs):
    dropout, plain = (columns_of(latest(runs.of(LOCAL, each).path)) for each in ("interrupted", "plain"))
    assert difference_of_rows(dropout, plain) > 0.01


@pytest.mark.parametrize(("variant", "workload"), cells("plain", lambda variant: variant.continued_by))
def test_another_strategy_goes_on_from_a_checkpoint(runs, variant, workload):
    place = runs.of(variant, workload).path / "checkpoints" / f"step-{SAVED_STEP:08d}"
    other = VARIANTS[variant.continued_by]
    scenes = {
        each.name: {
            **runs.scene(f"{variant}-continued-by-{each}", each, WORKLOADS[workload]),
            "load": place,
        }
        for each in (other, LOCAL)
    }
    continued = runs.train(scenes[other.name], other.trainers)
    assert continued.summary["num_examples"] == NUM_EXAMPLES
    assert difference(runs.of(other, workload).path, continued.path) == (0, 0)
    rows, dense = difference(runs.train(scenes[LOCAL.name]).path, continued.path)
    most_rows, most_dense = WORKLOADS[workload].tolerance
    assert rows < most_rows
    assert dense < most_dense


@pytest.mark.parametrize(("variant", "workload"), cells("tiered tiered-resumed"))
def test_a_run_with_tiers_equals_one_in_memory(runs, variant, workload):
    tiered, memory = runs.of(variant, workload), runs.of(variant, "interrupted")
    # Under staleness, timing decides how many of these rows are still in memory.
    assert tiered.summary["hit_ratio"]["ssd"] > (0 if variant.unequal else 0.02)
    assert tiered.summary["lost_updates"] == memory.summary["lost_updates"] == 0
    for name in ("steps", "num_rows"):
        assert tiered.summary[name] == memory.summary[name]
    if variant.unequal:
        assert tiered.summary["logloss"] == pytest.approx(memory.summary["logloss"], abs=0.02)
    else:
        assert difference(memory.path, tiered.path) == (0, 0)


@pytest.mark.parametrize(("variant", "workload"), cells(ENDS))
def test_a_run_ends_at_the_same_step_as_local(runs, variant, workload):
    run, local = runs.of(variant, workload), runs.of(LOCAL, workload)
    for name in ("steps", "epochs", "stopped_early", "checkpoint_step", "num_examples", "num_rows"):
        assert run.summary[name] == local.summary[name], name
    assert run.summary["auc"] == pytest.approx(local.summary["auc"], abs=1e-4)
    assert_equal_to_reference(runs, variant, workload)
    assert run.summary["stopped_early"] == (workload == "early-stop")


@pytest.mark.parametrize(("variant", "workload"), cells(ENDS))
def test_records_equal_those_of_local(runs, variant, workload):
    records, expected = runs.of(variant, workload).records, runs.of(LOCAL, workload).records
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    for one, other in zip(records, expected, strict=True):
        for name in ("loss", "auc", "logloss", "lr_scale"):
            assert (one.get(name) is None) == (other.get(name) is None)
            if one.get(name) is not None:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert any(record.get("lr_scale", 1) < 1 for record in records) == (workload == "plateau")


@pytest.mark.parametrize(("variant", "workload"), cells("evaluated-deepfm evaluated-din"))
def test_an_evaluation_spread_over_trainers_equals_that_of_one_process(runs, variant, workload):
    summary, expected = (runs.of(each, workload).summary for each in (variant, LOCAL))
    assert summary["steps"] == expected["steps"] == STEPS
    assert summary["auc"] == pytest.approx(expected["auc"], abs=1e-9)
    assert summary["logloss"] == pytest.approx(expected["logloss"], rel=1e-7)


@pytest.mark.parametrize(("variant", "workload"), cells("skipped", is_equal))
def test_persia_defect_2_all_trainers_skip_a_step_that_one_refuses(runs, variant, workload):
    summary = runs.of(variant, workload).summary
    assert summary["refused_steps"] == len(SPOILS)
    assert summary["steps"] == runs.of(variant, "plain").summary["steps"]
    assert_equal_to_reference(runs, variant, workload)


@pytest.mark.parametrize(("variant", "workload"), cells("skipped", lambda variant: variant.unequal))
def test_a_trainer_out_of_step_skips_its_own_steps_alone(runs, variant, workload):
    summary = runs.of(variant, workload).summary
    assert summary["steps"] == STEPS
    assert 0 < summary["auc"] < 1
    assert summary["refused_steps"] == 0  # of the first trainer


@pytest.mark.parametrize(("variant", "workload"), cells("stopped"))
def test_all_trainers_stop_at_the_step_that_one_refuses(runs, variant, workload):
    stop = runs.of(variant, workload).summary
    assert stop["step"] == 3
    assert "NaN or infinite" in stop["error"] or "is nan" in stop["error"]


@pytest.mark.parametrize(("variant", "workload"), cells("tail-16 tail-1 tail-weighted"))
def test_trainers_with_an_empty_share_take_part(runs, variant, workload):
    summary, local = (runs.of(each, workload).summary for each in (variant, LOCAL))
    assert summary["num_examples"] == (20 if workload == "tail-1" else NUM_EXAMPLES)
    assert summary["steps"] == local["steps"]
    if workload == "tail-1" and variant.reads_ahead:  # ended amid an epoch
        assert local["num_rows"] <= summary["num_rows"] <= local["num_rows"] + MOST_ROWS_AHEAD
    else:
        assert summary["num_rows"] == local["num_rows"]
    if not variant.unequal:
        assert_equal_to_reference(runs, variant, workload)


@pytest.mark.parametrize(("variant", "workload"), cells("ragged"))
def test_trainers_that_run_out_of_data_at_different_times_end_together(runs, variant, workload):
    summary = runs.of(variant, workload).summary
    assert summary["epochs"] == 2
    assert summary["num_examples"] == 2 * NUM_EXAMPLES


@pytest.mark.parametrize(
    ("variant", "workload"), cells([name for name in WORKLOADS if name not in ("stopped", "din")])
)
def test_nothing_is_kept_or_lost_and_staleness_is_bounded(runs, variant, workload):
    summary = runs.of(variant, workload).summary
    assert summary["kept"] == summary["lost_updates"] == 0
    assert summary["staleness_max"] <= variant.staleness
