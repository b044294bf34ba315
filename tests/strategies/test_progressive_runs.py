"""Progressive validation under every strategy: each example of each step is counted once, by whichever trainer has it."""

import pytest
from scenes import SIZE, play, play_all, write

pytestmark = pytest.mark.slow

STEPS = 30
WANTED = ["train.progressive_validation=true"]
EQUAL = {
    "synchronous": ("synchronous", []),
    "hybrid-0": ("hybrid", ["staleness=0", "embedding_servers=2"]),
    "substitution": ("substitution", []),
    "whole": ("substitution", ['dense="replicated"']),
}
APART = {
    "hybrid-4": ("hybrid", ["staleness=4", "loaders=2"]),
    "asynchronous": ("asynchronous", ["staleness=0"]),
    "hierarchical": ("hierarchical", ["groups=2"]),
    "one-group": ("hierarchical", ["groups=1", "trainers_per_group=2", "servers_per_group=1"]),
    "group-servers": ("hierarchical", ["groups=2", "servers_per_group=1", "nets=2"]),
}
EXAMPLES = STEPS * SIZE


def scenes(config, strategies):
    return [
        {"name": f"{name}-{config}", "config": config, "strategy": strategy, "options": options, "overrides": WANTED}
        for name, (strategy, options) in strategies.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("progressive"), num_examples=EXAMPLES, held_out=101)


@pytest.fixture(scope="module")
def local(directory):
    return {
        config: play(directory, {"name": f"local-{config}", "config": config, "overrides": WANTED})
        for config in ("deepfm", "mmoe")
    }


@pytest.fixture(scope="module")
def two(directory):
    found = [*scenes("deepfm", EQUAL | APART), *scenes("mmoe", EQUAL)]
    return play_all(directory, found, 2)


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("config", ["deepfm", "mmoe"])
def test_strategies_that_equal_local_score_as_local_does(local, two, config, name):
    expected, found = local[config]["progressive"], two[f"{name}-{config}"]["progressive"]
    assert found.keys() == expected.keys()
    for label, told in found.items():
        assert told["num_examples"] == told["num_examples_last_hour"] == EXAMPLES
        assert told["logloss"] == pytest.approx(expected[label]["logloss"], rel=1e-5)
        assert told["auc"] == pytest.approx(expected[label]["auc"], abs=1e-4)


@pytest.mark.parametrize("name", APART)
def test_strategies_apart_from_local_count_each_example_once(local, two, name):
    told, expected = two[f"{name}-deepfm"]["progressive"]["click"], local["deepfm"]["progressive"]["click"]
    assert told["num_examples"] == EXAMPLES
    assert told["logloss"] == pytest.approx(expected["logloss"], abs=0.05)
