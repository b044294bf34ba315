"""Whole runs with the hottest rows in GPU memory are those with all rows there, bit for bit."""

import pytest
from test_gpu_training import GPU, settings_of

from girih.errors import ConfigError
from girih.store.gpu.gpu_tiered_state import GpuTieredState
from girih.training.summary import hit_ratio
from support.store_verbs import by_key

STEPS = 6
CHOOSING = ("store.warm_up_steps=1", "store.flush_every_steps=2")
TIERED = ('store.tiers=["gpu","dram"]', "store.hot_rows=8", *CHOOSING)
THREE = ('store.tiers=["gpu","dram","ssd"]', "store.hot_rows=[8,16]", *CHOOSING)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """Slots for the rows of two batches, so that rows come and go."""
    monkeypatch.setattr("girih.store.gpu.gpu_slots._FIRST_STAGED", 4)
    monkeypatch.setattr("girih.store.tiers.slot_memory._FIRST_STAGED", 8)


def state_of(trainer):
    rows = by_key(*(store for _, store in trainer.sparse.stores()))
    dense = {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}
    return rows, dense


def trained(settings, then=None, saved=None):
    """What a run ends with; one that stops half way, and goes on as ``then`` says, where that is given."""
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        if then is None:
            return (
                *state_of(trainer),
                trainer.sparse.stats().store,
                [store.state for _, store in trainer.sparse.stores()],
            )
        trainer.save(saved)
    with then.trainer() as trainer:
        trainer.load(saved, train=then.dataset("train"))
        trainer.fit(then.dataset("train"))
        return state_of(trainer)


@pytest.mark.parametrize(
    "schedule",
    [("schedule.prefetch=true", "schedule.micro_batches=2"), ("schedule.prefetch=false",)],
    ids=["ahead", "in_turn"],
)
def test_a_run_with_tiers_is_one_without_bit_for_bit(log_directory, schedule):
    steps = f"train.max_steps={STEPS}"
    *mine, counters, states = trained(settings_of(log_directory, *TIERED, steps, *schedule))
    *expected, of_one, _ = trained(settings_of(log_directory, GPU, steps, *schedule))
    assert mine == expected
    assert all(isinstance(state, GpuTieredState) for state in states)
    assert {name: counters[name] for name in of_one} == of_one
    shares = hit_ratio(counters)["hit_ratio"]
    assert shares.keys() == {"gpu", "dram"}
    assert 0 < shares["gpu"] < 1
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(("first", "then"), [(TIERED, THREE), ((GPU,), TIERED)], ids=["three", "two"])
def test_a_run_goes_on_in_other_tiers(log_directory, tmp_path, first, then):
    ssd = f"store.ssd_dir='{tmp_path}'"
    half, whole = f"train.max_steps={STEPS // 2}", f"train.max_steps={STEPS}"
    found = trained(
        settings_of(log_directory, *first, half, ssd),
        settings_of(log_directory, *then, whole, ssd),
        tmp_path / "saved",
    )
    *expected, _, _ = trained(settings_of(log_directory, GPU, whole))
    assert list(found) == expected


@pytest.mark.smoke
def test_strategies_with_embedding_servers_refuse_such_tiers(log_directory):
    with pytest.raises(ConfigError, match="'asynchronous' keeps no rows in GPU memory"):
        trained(settings_of(log_directory, *TIERED, "strategy.name=asynchronous"))
