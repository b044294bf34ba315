"""Ends and edges: empty shares, data that ends, evaluation, early stopping, resuming, steps that are refused."""

import json

import pytest
from scenes import play, play_all, write

from runs import difference, latest

pytestmark = pytest.mark.slow

ROWS, DENSE = 2e-5, 3e-5  # see test_equality.py
TAIL = 161  # examples, so that the last batch has one
MOST_ROWS_AHEAD = 4 * 12  # batches of one example that are read ahead, and ids of an example
SMALL = ["data.batch_size=16"]
HYBRID = ["staleness=0", "embedding_servers=2"]
EVALUATED = [*SMALL, "train.evaluate_every_steps=3"]


def scene(name, config="deepfm", strategy="synchronous", options=(), overrides=(), **more):
    options = [*HYBRID, *options] if strategy == "hybrid" else list(options)
    return {
        "name": name,
        "config": config,
        "strategy": strategy,
        "options": options,
        "overrides": [*SMALL, *overrides],
        **more,
    }


EMPTY = [
    scene(
        f"{strategy}-{config}-{size}",
        config,
        strategy,
        overrides=[f"data.batch_size={size}", "train.max_steps=20"],
    )
    for strategy in ("synchronous", "hybrid", "asynchronous")
    for config, size in (("din", 16), ("din", 1), ("weighted", 16))
]
STOPPING = 'train.early_stopping={metric="auc", patience=0, min_delta=0.5}'
PLATEAU = 'train.lr_schedule={name="ReduceLROnPlateau", factor=0.1, patience=0, threshold=0.5}'
ENDS = {
    "early": ["train.evaluate_every_steps=2", STOPPING, "train.epochs=2"],
    "plateau": ["train.evaluate_every_steps=3", PLATEAU, "train.epochs=2"],
    "most": ["train.max_steps=7", "train.evaluate_every_steps=4"],
    "epochs": ["train.epochs=3"],
}
ENDING = [
    scene(f"{name}-{strategy}", "deepfm", strategy, overrides=overrides, valid=True)
    for strategy in ("synchronous", "hybrid")
    for name, overrides in ENDS.items()
]
RAGGED = scene(
    "ragged", "deepfm", "asynchronous", ["staleness=3"], ["train.epochs=2"], valid=True, slow_rank=1
)
SCORED = [
    scene(f"scored-{strategy}-{config}", config, strategy, load=f"base-{config}", compress=False)
    for strategy in ("synchronous", "hybrid", "asynchronous")
    for config in ("deepfm", "din")
]
HALVES = [
    scene(f"first-{strategy}", "deepfm", strategy, overrides=["train.max_steps=4"])
    for strategy in ("synchronous", "hybrid")
]
RESUMED = [
    scene(f"then-{after}", "deepfm", after, load=f"first-{before}")
    for before, after in (("hybrid", "hybrid"), ("synchronous", "synchronous"))
] + [scene("across", "deepfm", "synchronous", load="first-hybrid")]
WHOLE = [scene(f"whole-{strategy}", "deepfm", strategy) for strategy in ("synchronous", "hybrid")]
SKIP, STOP = ['train.on_nonfinite="skip"'], ['train.on_nonfinite="stop"']
REFUSED = [
    scene(f"refused-{strategy}-{kind}", "deepfm", strategy, overrides=SKIP, spoil=[kind, 1, 3])
    for strategy in ("synchronous", "hybrid", "asynchronous")
    for kind in ("nan", "inf")
] + [
    scene(
        f"stopped-{strategy}",
        "deepfm",
        strategy,
        overrides=STOP,
        spoil=["nan", 1, 3],
        raises="NonFiniteError",
    )
    for strategy in ("synchronous", "hybrid")
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("edges"), num_examples=TAIL, held_out=101)
    for config in ("deepfm", "din"):
        play(directory, scene(f"base-{config}", config, "local"))
    return directory


@pytest.fixture(scope="module")
def two(directory):
    scenes = [*ENDING, *SCORED, *HALVES, *RESUMED, *WHOLE, *REFUSED, RAGGED]
    return play_all(directory, scenes, 2)


@pytest.fixture(scope="module")
def three(directory):
    return play_all(directory, EMPTY, 3)


@pytest.fixture(scope="module")
def alone(directory):
    """Plays a scene in this process, once whatever it is compared with; returns its summary."""
    found = {}

    def play_once(scene):
        if scene["name"] not in found:
            found[scene["name"]] = play(directory, scene)
        return found[scene["name"]]

    return play_once


@pytest.mark.parametrize("config", ["din-16", "din-1", "weighted-16"])
def test_trainers_with_an_empty_share_take_part(directory, three, config):
    name, size = config.split("-")
    local = play(
        directory,
        scene(f"local-{config}", name, "local", overrides=[f"data.batch_size={size}", "train.max_steps=20"]),
    )
    for strategy in ("synchronous", "hybrid", "asynchronous"):
        summary = three[f"{strategy}-{config}"]
        assert summary["num_examples"] == (20 if size == "1" else TAIL)
        assert summary["steps"] == local["steps"]
        if size == "1" and strategy != "synchronous":  # ended in the middle: what was read ahead has rows
            assert local["num_rows"] <= summary["num_rows"] <= local["num_rows"] + MOST_ROWS_AHEAD
        else:
            assert summary["num_rows"] == local["num_rows"]
    rows, dense = difference(directory / f"local-{config}", directory / f"synchronous-{config}")
    assert rows < ROWS
    assert dense < DENSE
    assert difference(directory / f"hybrid-{config}", directory / f"synchronous-{config}") == (0, 0)


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_runs_end_where_local_ends(directory, two, alone, name, strategy):
    local = alone(scene(f"local-{name}", "deepfm", "local", overrides=ENDS[name], valid=True))
    summary = two[f"{name}-{strategy}"]
    for fact in ("steps", "epochs", "stopped_early", "checkpoint_step", "num_examples", "num_rows"):
        assert summary[fact] == local[fact], fact
    assert summary["auc"] == pytest.approx(local["auc"], abs=1e-4)
    rows, dense = difference(directory / f"local-{name}", directory / f"{name}-{strategy}")
    assert rows < ROWS
    assert dense < DENSE
    mine, theirs = (
        [json.loads(line) for line in (directory / run / "metrics.jsonl").read_text().splitlines()]
        for run in (f"{name}-{strategy}", f"local-{name}")
    )
    assert [r["step"] for r in mine] == [r["step"] for r in theirs]
    for one, other in zip(mine, theirs, strict=True):
        for fact in ("loss", "auc", "logloss", "lr_scale"):
            assert (one.get(fact) is None) == (other.get(fact) is None)
            if one.get(fact) is not None:
                assert one[fact] == pytest.approx(other[fact], rel=1e-4), fact
    if name == "early":
        assert summary["stopped_early"]
    if name == "plateau":
        assert mine[-1].get("lr_scale", 0) < 1 or any(r.get("lr_scale", 1) < 1 for r in mine)


@pytest.mark.parametrize("name", [each["name"] for each in SCORED])
def test_an_evaluation_spread_over_trainers_is_that_of_one_process(two, alone, name):
    config = name.rsplit("-", 1)[1]
    local = alone(scene(f"local-scored-{config}", config, "local", load=f"base-{config}"))
    assert two[name]["steps"] == local["steps"]
    assert two[name]["auc"] == pytest.approx(local["auc"], abs=1e-9)
    assert two[name]["logloss"] == pytest.approx(local["logloss"], rel=1e-7)


@pytest.mark.parametrize("strategy", ["hybrid", "synchronous"])
def test_a_run_resumed_amid_an_epoch_goes_on_at_the_right_batch(directory, two, strategy):
    assert latest(directory / f"first-{strategy}").name.endswith("4")
    assert two[f"then-{strategy}"]["steps"] == two[f"whole-{strategy}"]["steps"]
    assert difference(directory / f"whole-{strategy}", directory / f"then-{strategy}") == (0, 0)


def test_a_run_goes_on_under_another_strategy(directory, two):
    assert two["across"]["num_examples"] == TAIL
    assert difference(directory / "whole-synchronous", directory / "across") == (0, 0)
    play(directory, scene("across-local", "deepfm", "local", load="first-hybrid"))
    rows, dense = difference(directory / "across-local", directory / "across")
    assert rows < ROWS
    assert dense < DENSE


@pytest.mark.parametrize("kind", ["nan", "inf"])
@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_persia_defect_2_what_one_trainer_refuses_all_refuse(directory, two, alone, strategy, kind):
    summary = two[f"refused-{strategy}-{kind}"]
    assert summary["refused_steps"] == 1
    assert summary["steps"] == two[f"whole-{strategy}"]["steps"]
    alone(scene(f"local-{kind}", "deepfm", "local", overrides=SKIP, spoil=[kind, 0, 3]))
    rows, dense = difference(directory / f"local-{kind}", directory / f"refused-{strategy}-{kind}")
    assert rows < ROWS
    assert dense < DENSE


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_trainer_out_of_step_refuses_its_own(two, kind):
    summary = two[f"refused-asynchronous-{kind}"]
    assert summary["steps"] == two["whole-hybrid"]["steps"]
    assert 0 < summary["auc"] < 1
    assert summary["refused_steps"] == 0  # of the first trainer


@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_all_trainers_stop_at_the_same_step(two, strategy):
    told = two[f"stopped-{strategy}"]
    assert told["step"] == 3
    assert "NaN or infinite" in told["error"] or "is nan" in told["error"]


def test_trainers_that_run_out_of_data_at_different_times_end_together(two):
    assert two["ragged"]["epochs"] == 2
    assert two["ragged"]["num_examples"] == 2 * TAIL
    assert two["ragged"]["staleness_max"] <= 3


def test_workers_keep_nothing_that_nobody_will_pull(two, three):
    for name, summary in {**two, **three}.items():
        assert summary.get("kept", 0) == 0, name
