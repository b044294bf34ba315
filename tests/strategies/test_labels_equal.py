"""Labels that are missing, masked out, weighted, or numbers: whoever shares the work, the loss is that of the whole step.

A rating is there in 3 examples of a hundred, so most trainers' shares of a step have none of it, and a mean of the trainers'
means would be off by half: the tolerances are those of ``test_equality``.
"""

import pytest
from scenes import STEPS, play, play_all, write

from runs import difference

pytestmark = pytest.mark.slow

ROWS, DENSE = 2e-5, 3e-5
TESTED = 501
HIDDEN = "model={name='wide_deep', hidden=[8]}"
SCENES = [
    {"name": "synchronous", "strategy": "synchronous"},
    {"name": "synchronous-cut", "strategy": "synchronous", "overrides": ["schedule.micro_batches=3"]},
    {"name": "hybrid", "strategy": "hybrid", "options": ["staleness=0", "embedding_workers=2", "loaders=2"]},
    {"name": "substitution", "strategy": "substitution", "overrides": [HIDDEN]},
    {"name": "split", "strategy": "substitution", "options": ["dense='split'"], "overrides": [HIDDEN]},
    {"name": "split-cut", "strategy": "substitution", "options": ["dense='split'"], "overrides": [HIDDEN, "schedule.micro_batches=2"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("labels"), held_out=TESTED)
    for scene in ({"name": "local"}, {"name": "local-plain", "overrides": [HIDDEN]}):
        play(directory, {"config": "labels", **scene})
    return directory


@pytest.fixture(scope="module")
def two(directory):
    return play_all(directory, [{"config": "labels", **scene} for scene in SCENES], 2)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene["name"])
def test_two_trainers_learn_what_one_does(directory, two, scene):
    local = "local-plain" if scene["strategy"] == "substitution" else "local"
    assert two[scene["name"]]["steps"] == STEPS
    rows, dense = difference(directory / local, directory / scene["name"])
    assert rows < ROWS
    assert dense < DENSE


def test_micro_batches_and_an_asynchronous_trainer_alone_learn_what_local_does(directory):
    for name, scene in {
        "cut": {"overrides": ["schedule.micro_batches=5"]},
        "alone": {"strategy": "asynchronous", "options": ["staleness=0"]},
    }.items():
        play(directory, {"name": name, "config": "labels", **scene})
        rows, dense = difference(directory / "local", directory / name)
        assert rows < ROWS, name
        assert dense < DENSE, name


def test_metrics_are_of_what_is_labelled_whoever_scores(two):
    by_label = two["synchronous"]["by_label"]
    counts = {name: metrics["num_examples"] for name, metrics in by_label.items()}
    assert counts["click"] == TESTED
    assert counts["rating"] < 60 < counts["spent"] < counts["buy"] < TESTED
    for name in ("spent", "rating"):
        assert by_label[name]["auc"] is None
        assert by_label[name]["rmse"] >= by_label[name]["mae"] > 0
    assert by_label == two["hybrid"]["by_label"]
