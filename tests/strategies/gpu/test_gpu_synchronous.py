"""Whole runs of ``synchronous`` with rows in GPU memory: they learn what ``local`` learns with rows in DRAM.

Dense halves are on GPUs where each of the two trainers has one.
"""

import json
from itertools import chain

import pytest
from scenes import play, play_all, write

from girih.app.run_config import RunConfig
from girih.errors import ConfigError
from girih.kernels.gpu import jit
from girih.planner.plan import Plan
from gpu_ranks import kind_of, share_a_gpu
from runs import difference

STEPS, SIZE = 4, 16
ROWS, DENSE = 2e-4, 2e-4
GPU = 'store={tiers=["gpu"]}'
TIERED = 'store={tiers=["gpu","dram"],hot_rows=8,warm_up_steps=1,flush_every_steps=2}'
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
        scene("tiered-din", "din", TIERED, *device),
        scene("tiered-half", "din", TIERED, "schedule.prefetch=true", *HALF, *device),
        scene("tiered-from-gpu", "din", TIERED, *device, load="half-gpu"),
        scene("gpu-from-tiered", "din", GPU, *device, load="tiered-half"),
        scene("gpu-from-local", "din", GPU, *device, load="half-local"),
        scene("gpu-nan", "deepfm", GPU, *device, spoil=("nan", 1, 2), raises=True),
        scene("gpu-inf", "deepfm", GPU, *device, spoil=("infinite", 0, 3), raises=True),
    ]
    if jit.INTERPRETED:
        steps = ["train.max_steps=8", "data.batch_size=8", "train.log_every_steps=2"]
        scenes.append(scene("gpu-waits", "deepfm", GPU, *steps, waits=True))
    (directory / "told.json").write_text(json.dumps(play_all(directory, scenes, 2, kind_of(2))))
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


def test_tiers_below_change_no_bit_and_checkpoints_go_either_way(directory):
    for name in ("tiered-din", "tiered-from-gpu", "gpu-from-tiered"):
        assert difference(directory / "gpu-din", directory / name) == (0, 0), name


def told(directory):
    """What was told of each scene on the first trainer."""
    return json.loads((directory / "told.json").read_text())


def test_what_one_trainer_refuses_ends_the_run_of_all_at_that_step(directory):
    nan, infinite = (told(directory)[name] for name in ("gpu-nan", "gpu-inf"))
    assert (nan["step"], infinite["step"]) == (2, 3)
    assert "step 2: the loss of trainer 1 is nan" in nan["error"] or share_a_gpu(2)
    assert "step 3: the gradient of feature" in infinite["error"]


@pytest.mark.skipif(not jit.INTERPRETED, reason="on GPUs the profiler is to count; see test_gpu_late.py")
def test_no_step_of_two_trainers_waits_but_for_the_number_of_keys_of_a_later_batch(directory):
    """Which the thread that works ahead waits for, on a stream of its own."""
    for by_step in told(directory)["gpu-waits"]["waits"]:
        assert len(by_step) >= 4
        found = list(chain(*by_step))
        others = [each for each in found if not (each.startswith("to_host") and ", in find\n" in each)]
        assert not others, "".join(others)
        assert len(found) <= len(by_step) + 1


@pytest.mark.parametrize("option", ["interleaving_groups=2", 'excluded=["item"]'])
def test_orders_of_groups_are_refused(directory, option):
    overrides = [GPU, f"schedule.{option}"]
    settings = RunConfig.load(directory / "din.toml", overrides=overrides, strategy="synchronous")
    with pytest.raises(ConfigError, match=r"leave it out, or set store\.tiers"):
        settings.trainer()
