"""Whole runs with rows in GPU memory: they learn what the same run learns with rows in DRAM."""

import os

import numpy as np
import pytest
import torch

import girih
from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from girih.planner.facts import Facts, ModelFacts
from girih.store.gpu.gpu_state import GpuState
from girih.strategies.strategy import note_on_rows
from support.store_verbs import by_key

STEPS = int(os.environ.get("GIRIH_STEPS", "12"))
GPU = 'store.tiers=["gpu"]'
CPU = 'store.tiers=["dram"]'


def settings_of(directory, *overrides):
    common = (
        "model.dropout=0.0",
        "train.device=cpu",
        "data.batch_size=32",
        f"train.max_steps={STEPS}",
        "train.epochs=10",
    )
    return RunConfig.load(directory / "config.toml", overrides=(*common, *overrides))


def trained(settings):
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        rows = by_key(*(store for _, store in trainer.sparse.stores()))
        dense = {name: tensor.cpu().numpy() for name, tensor in trainer.model.state_dict().items()}
        return rows, dense, trainer.evaluate(settings.dataset("valid"))


def assert_same(mine, expected):
    (rows, dense, score), (other_rows, other_dense, other_score) = mine, expected
    assert rows.keys() == other_rows.keys()
    for key, columns in other_rows.items():
        for name, value in columns.items():
            np.testing.assert_allclose(rows[key][name], value, rtol=2e-3, atol=2e-4, err_msg=f"{key} {name}")
    for name, value in other_dense.items():
        np.testing.assert_allclose(dense[name], value, rtol=2e-3, atol=2e-4, err_msg=name)
    assert score.auc == pytest.approx(other_score.auc, abs=1e-3)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param((), marks=pytest.mark.smoke),
        ("schedule.prefetch=true", "schedule.micro_batches=2"),
        ("schedule.packing=false",),
    ],
    ids=["as_it_is", "ahead", "unpacked"],
)
def test_deepfm_learns_the_same_on_a_gpu(log_directory, schedule):
    assert_same(
        trained(settings_of(log_directory, GPU, *schedule)),
        trained(settings_of(log_directory, CPU, *schedule)),
    )


@pytest.mark.parametrize("order", [(GPU, CPU), (CPU, GPU)], ids=["gpu_then_cpu", "cpu_then_gpu"])
def test_a_checkpoint_goes_on_on_the_other_device(log_directory, tmp_path, order):
    whole = f"train.max_steps={2 * STEPS}"
    with (settings := settings_of(log_directory, order[0])).trainer() as trainer:
        trainer.fit(settings.dataset("train"))
        trainer.save(tmp_path / "saved")
    with (settings := settings_of(log_directory, whole, order[1])).trainer() as trainer:
        trainer.load(tmp_path / "saved", train=settings.dataset("train"))
        trainer.fit(settings.dataset("train"))
        assert trainer.state.step == 2 * STEPS
        for _, store in trainer.sparse.stores():
            assert isinstance(store.state, GpuState) == (order[1] == GPU)
        mine = by_key(*(store for _, store in trainer.sparse.stores()))
    expected, _, _ = trained(settings_of(log_directory, CPU, whole))
    assert mine.keys() == expected.keys()
    for key, columns in expected.items():
        for name, value in columns.items():
            np.testing.assert_allclose(mine[key][name], value, rtol=2e-3, atol=2e-4, err_msg=f"{key} {name}")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("strategy.name=substitution",), "keeps no rows in GPU memory"),
        (("store.shards=2",), "takes neither arena nor several shards"),
    ],
)
def test_what_has_no_rows_on_a_gpu_says_so(log_directory, overrides, message):
    with pytest.raises(ConfigError, match=message):
        trained(settings_of(log_directory, GPU, *overrides))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("device", "strategy", "options", "told"),
    [
        ("cuda", girih.Local(), {"shards": 2}, "because of store.shards:"),
        (
            "cuda",
            girih.Synchronous(),
            {"shards": 2, "arena": "heap"},
            "because of store.shards and store.arena:",
        ),
        ("cuda", girih.Local(), {}, None),
        ("cuda", girih.Local(), {"shards": 2, "tiers": ("dram",)}, None),
        ("cuda", girih.Hybrid(), {"shards": 2}, None),
        ("cpu", girih.Local(), {"shards": 2}, None),
    ],
)
def test_an_option_that_keeps_rows_in_the_hosts_memory_is_named(device, strategy, options, told):
    schema = girih.Schema([girih.Categorical(name="user", dim=2)], labels="click")
    model = ModelFacts(name="Net", num_parameters=6)
    facts = Facts(schema=schema, model=model, groups=(), num_trainers=1, seed=0, device=device)
    note = note_on_rows(strategy, facts, girih.StoreOptions(**options))
    assert note is None if told is None else told in note


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_a_run_on_cuda_says_why_its_rows_are_not_there(log_directory, caplog):
    settings = settings_of(log_directory, "train.device=cuda", "store.shards=2")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), epochs=0)
        assert not any(isinstance(store.state, GpuState) for _, store in trainer.sparse.stores())
    assert "rows stay in host memory" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_steps_that_cuda_graphs_replay_learn_the_same(log_directory):
    """Batches of 32, which graphs replay, and the shorter one that ends each epoch."""
    longer = ("train.max_steps=200", "data.shuffle_rows=1")
    mine = trained(settings_of(log_directory, *longer, "train.device=cuda", "train.compile=true"))
    assert_same(mine, trained(settings_of(log_directory, *longer, "train.device=cuda")))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
def test_local_on_cuda_keeps_its_rows_there(log_directory):
    settings = settings_of(log_directory, "train.device=cuda")
    with settings.trainer() as trainer:
        trainer.fit(settings.dataset("train"), epochs=0)
        assert all(isinstance(store.state, GpuState) for _, store in trainer.sparse.stores())
    assert_same(trained(settings), trained(settings_of(log_directory, CPU)))
