"""Twice n steps are n steps, a resumed run, and n more: bit for bit, with dropout.

Rows, their optimizers' state, dense parameters and theirs are compared.
"""

import pytest
from scenes import play, play_all, write

from runs import columns_of, difference, difference_of_rows, latest

pytestmark = pytest.mark.slow

STEPS = 3
CASES = {
    "synchronous": ("synchronous", []),
    "replicated": ("substitution", ['dense="replicated"']),
    "split": ("substitution", ['dense="split"']),
    "hybrid": ("hybrid", ["staleness=0", "embedding_servers=2"]),
}


def scenes_of(name, strategy="local", options=(), dropout=0.1):
    """The whole run, its first half, and its second."""
    common = {"strategy": strategy, "options": options}
    words = ["data.batch_size=16", f"model.dropout={dropout}"]
    ends = {"whole": 2 * STEPS, "first": STEPS, "then": 2 * STEPS}
    made = [
        {**common, "name": f"{part}-{name}", "overrides": [*words, f"train.max_steps={end}"]}
        for part, end in ends.items()
    ]
    made[-1]["load"] = f"first-{name}"
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("resume"), num_examples=16 * 2 * STEPS, held_out=10)


@pytest.fixture(scope="module")
def played(directory):
    """Plays all scenes on so many trainers, once."""
    found = set()

    def on(num_trainers):
        if num_trainers not in found:
            scenes = [s for name, case in CASES.items() for s in scenes_of(f"{name}-{num_trainers}", *case)]
            play_all(directory, scenes, num_trainers)
            found.add(num_trainers)

    return on


def test_local_goes_on_bit_for_bit(directory):
    for scene in (*scenes_of("local"), scenes_of("dry", dropout=0)[0]):
        play(directory, scene)
    assert difference(directory / "whole-local", directory / "then-local") == (0, 0)
    wet, dry = (columns_of(latest(directory / f"whole-{name}")) for name in ("local", "dry"))
    assert difference_of_rows(wet, dry) > 0.01  # dropout matters


@pytest.mark.parametrize("name", CASES)
def test_one_trainer_goes_on_bit_for_bit(directory, name):
    for scene in scenes_of(f"{name}-1", *CASES[name]):
        play(directory, scene)
    assert difference(directory / f"whole-{name}-1", directory / f"then-{name}-1") == (0, 0)


GROUPED = ["servers_per_group=2", "split_fc=false", 'wire_dense_gradients="topk"']


@pytest.fixture(scope="module")
def grouped(directory):
    """A group of one trainer with one net, with dropout on its servers, and gradients of which most are left for later."""
    whole, first, then = scenes_of("grouped", "hierarchical", GROUPED)
    for scene in (whole, first):
        play(directory, scene)
    return then


def test_a_group_goes_on_bit_for_bit(directory, grouped):
    play(directory, grouped)
    assert difference(directory / "whole-grouped", directory / "then-grouped") == (0, 0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("local", {"strategy": "local", "options": []}),
        ("one", {"options": ["servers_per_group=1", *GROUPED[1:]]}),
        ("plain", {"options": GROUPED[:2]}),
    ],
)
def test_what_a_group_had_beside_its_parameters_is_dropped_elsewhere(
    directory, grouped, caplog, name, change
):
    assert play(directory, {**grouped, **change, "name": f"dropped-{name}"})["steps"] == 2 * STEPS
    told = [each for each in caplog.messages if "what top-k has left out are dropped" in each]
    assert len(told) == 1
    assert "step-00000003" in told[0]


@pytest.mark.parametrize("num_trainers", [2, pytest.param(3, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", CASES)
def test_several_trainers_go_on_bit_for_bit(directory, played, name, num_trainers):
    played(num_trainers)
    name = f"{name}-{num_trainers}"
    assert difference(directory / f"whole-{name}", directory / f"then-{name}") == (0, 0)
