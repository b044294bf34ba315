"""Packing and interleaving change when work is done, and not what is learnt: rows, optimizer state and dense parameters.

Sums over a key's examples are formed in the same order whatever group the key's table is in, so rows are the same bits where
the model sees the same numbers. A model that adds up features block by block (DeepFM does) adds them in another order then.
"""

from dataclasses import replace

import pytest
from scenes import play, play_all, write

import girih
from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from runs import difference

pytestmark = pytest.mark.slow

STEPS, HALF = 24, 12
ROWS, DENSE = 2e-5, 3e-5
"""As in ``test_equality.py``."""
UNPACKED = "schedule.packing=false"
TWO = {"synchronous": [], "hybrid": ["staleness=0", "embedding_servers=2"]}
SCHEDULES = {
    "unpacked": [UNPACKED],
    "interleaved": ["schedule.interleaving_groups=2"],
    "unpacked-interleaved": [UNPACKED, "schedule.interleaving_groups=3"],
    "auto": ["schedule.interleaving_groups=auto"],
    "excluded": ["schedule.interleaving_groups=2", "schedule.excluded=['item']"],
}


def scene(name, strategy="local", *overrides, steps=STEPS, config="din", **more):
    return {
        "name": name,
        "config": config,
        "strategy": strategy,
        "options": TWO.get(strategy, []),
        "overrides": [f"train.max_steps={steps}", *overrides],
        **more,
    }


def crossings(strategy):
    """A run as it is, and runs that change their packing half-way."""
    return [
        scene(f"{strategy}-packed", strategy),
        scene(f"{strategy}-unpacked", strategy, UNPACKED),
        scene(f"{strategy}-half-packed", strategy, steps=HALF),
        scene(f"{strategy}-half-unpacked", strategy, UNPACKED, steps=HALF),
        scene(f"{strategy}-then-unpacked", strategy, UNPACKED, load=f"{strategy}-half-packed"),
        scene(f"{strategy}-then-packed", strategy, load=f"{strategy}-half-unpacked"),
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packing"), num_examples=STEPS * 32, held_out=50)


@pytest.fixture(scope="module")
def two(directory):
    scenes = [each for strategy in TWO for each in crossings(strategy)]
    scenes += [scene(f"synchronous-{name}-all", "synchronous", *words) for name, words in SCHEDULES.items()]
    return play_all(directory, scenes, 2)


@pytest.mark.parametrize("name", ["unpacked", "then-unpacked", "then-packed"])
def test_local_learns_the_same_packed_or_not_and_reads_checkpoints_of_either(directory, name):
    if not (directory / "local-packed").exists():
        for each in crossings("local"):
            play(directory, each)
    assert difference(directory / "local-packed", directory / f"local-{name}") == (0, 0)


@pytest.mark.parametrize("strategy", TWO)
@pytest.mark.parametrize("name", ["unpacked", "then-unpacked", "then-packed"])
def test_two_trainers_learn_the_same_packed_or_not_and_read_checkpoints_of_either(
    directory, two, strategy, name
):
    assert two[f"{strategy}-{name}"]["steps"] == STEPS
    assert difference(directory / f"{strategy}-packed", directory / f"{strategy}-{name}") == (0, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_of_groups_changes_nothing(directory, two, name):
    assert difference(directory / "synchronous-packed", directory / f"synchronous-{name}-all") == (0, 0)
    interleaved = two[f"synchronous-{name}-all"]["plan"].get("interleaving") if name != "unpacked" else None
    assert (interleaved is None) == (name == "unpacked")


def test_a_model_that_adds_up_block_by_block_learns_the_same_to_the_order_of_sums(directory):
    for name, words in (("deepfm-packed", ()), ("deepfm-unpacked", (UNPACKED,))):
        play(directory, scene(name, "local", *words, config="deepfm"))
    rows, dense = difference(directory / "deepfm-packed", directory / "deepfm-unpacked")
    assert rows < ROWS
    assert dense < DENSE


def test_substitution_packs_the_tables_of_each_trainer_as_the_plan_says(directory):
    scenes = [
        scene(f"substitution-{name}", "substitution", *words, config="deepfm")
        for name, words in (("packed", ()), ("unpacked", (UNPACKED,)))
    ]
    play_all(directory, scenes, 2)
    rows, dense = difference(directory / "substitution-packed", directory / "substitution-unpacked")
    assert rows < ROWS
    assert dense < DENSE


def test_the_groups_of_a_pinned_plan_are_held_where_tables_can_be_packed_so(directory):
    settings = RunConfig.load(directory / "din.toml", overrides=["train.max_steps=2"])
    plan = settings.planned()
    (group,) = plan.groups
    ours = {"two": ["tags", "item"], "one": ["user"]}

    def pinned(groups):
        edited = tuple({**group, "name": name, "tables": tables} for name, tables in groups.items())
        return replace(settings, plan=replace(plan, groups=edited)).trainer()

    with pinned(ours) as trainer:
        trainer.fit(settings.dataset("train"))
        found = {
            each.spec.name: [table.name for table in each.spec.tables]
            for each in trainer.sparse.groups_of_tables
        }
        assert found == ours
    with (
        pinned({"one": ["user"], "two": ["tags"]}) as trainer,
        pytest.raises(ConfigError, match="table 'item' is in 0 groups, expected one"),
    ):
        trainer.fit(settings.dataset("train"))
    plan = girih.Synchronous().plan(trainer._run.facts)
    edited = replace(plan, schedule={**plan.schedule, "interleaving": [["two"]]})
    with pytest.raises(ConfigError, match="expected each of the groups"):
        edited.check_like(plan)


def test_a_checkpoint_of_another_schedule_gets_a_new_plan(directory):
    words = ["train.max_steps=2"]
    packed = RunConfig.load(directory / "din.toml", overrides=words).planned()
    unpacked = RunConfig.load(directory / "din.toml", overrides=[*words, UNPACKED]).planned()
    assert not unpacked.fits(packed)
    assert len(unpacked.groups) == 3
