"""Whole runs of ``synchronous`` with rows in GPU memory: they learn what ``local`` learns with rows in DRAM.

Dense halves are on GPUs where each of the two trainers has one.
"""

import pytest
from scenes import play, play_all, write

from girih.config.file import RunConfig
from girih.errors import ConfigError
from girih.planner.plan import Plan
from gpu_ranks import kind_of, share_a_gpu
from runs import difference

STEPS, SIZE = 4, 16
ROWS, DENSE = 2e-4, 2e-4
GPU = 'store={tiers=["gpu"]}'
CONFIGS = ("din", "weighted")
"""A sequence with weights of examples, and bags with weights of ids."""
HALF = [f"train.max_steps={STEPS // 2}"]


def scene(name, config, *overrides, strategy="synchronous", **more):
    short = [f"train.max_steps={STEPS}", f"data.batch_size={SIZE}", *overrides]
    short += ['data.test="train.svm"'] if config == "weighted" else []  # whose other one is long
    return {"name": name, "config": config, "strategy": strategy, "overrides": short, **more}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(
        tmp_path_factory.mktemp("gpu_synchronous"), num_examples=STEPS * SIZE, size=SIZE, held_out=SIZE
    )
    play(directory, scene("half-local", "din", *HALF, strategy="local"))
    for config in CONFIGS:
        play(directory, scene(f"local-{config}", config, strategy="local"))
    device = ["train.device=cpu"] if share_a_gpu(2) else []
    scenes = [
        scene("gpu-din", "din", GPU, *device),
        scene("gpu-weighted", "weighted", GPU, "schedule.prefetch=true", "schedule.micro_batches=2", *device),
        scene("half-gpu", "din", GPU, *HALF, *device),
        scene("gpu-from-local", "din", GPU, *device, load="half-local"),
    ]
    play_all(directory, scenes, 2, kind_of(2))
    return directory


@pytest.mark.parametrize("config", CONFIGS)
def test_two_trainers_learn_what_local_learns(directory, config):
    plan = Plan.read(directory / f"gpu-{config}" / "plan.json")
    assert {group["device"] for group in plan.groups} == {"gpu"}
    rows, dense = difference(directory / f"local-{config}", directory / f"gpu-{config}")
    assert rows < ROWS
    assert dense < DENSE


def test_a_checkpoint_of_two_goes_on_in_dram_and_one_of_local_on_two(directory):
    play(directory, scene("local-from-gpu", "din", strategy="local", load="half-gpu"))
    for name in ("local-from-gpu", "gpu-from-local"):
        rows, dense = difference(directory / "local-din", directory / name)
        assert rows < ROWS, name
        assert dense < DENSE, name


@pytest.mark.parametrize("option", ["interleaving_groups=2", 'excluded=["item"]'])
def test_orders_of_groups_are_refused(directory, option):
    overrides = [GPU, f"schedule.{option}"]
    settings = RunConfig.load(directory / "din.toml", overrides=overrides, strategy="synchronous")
    with pytest.raises(ConfigError, match=r"leave it out, or set store\.tiers"):
        settings.trainer()
