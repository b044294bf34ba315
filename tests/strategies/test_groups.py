"""Hierarchical training with group servers (HT §3): the net is traced, tagged and cut, its parts are run by servers."""

import os
import signal
import time

import pyarrow.parquet as pq
import pytest
from scenes import play, play_all, write

from girih.app.run_config import RunConfig
from girih.planner.calibration import LINKS, Calibration, CodecSpeed, Link
from girih.planner.plan import Plan
from runs import dense_of, difference, latest, train

pytestmark = pytest.mark.slow

EXACT = {}
"""Of ``local``."""
FEW = "data.test=few.parquet"
"""For runs whose parameters are compared, and not how well they predict."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("groups"), held_out=1001)
    pq.write_table(pq.read_table(directory / "test.parquet").slice(0, 101), directory / "few.parquet")
    return directory


@pytest.mark.parametrize(
    ("config", "num_servers", "tagging", "split_fc", "most"),
    [
        ("deepfm", 2, "refined", "false", 0),
        ("din", 1, "rules", '"auto"', 0),
        # gradients of what several parts read are summed in another order
        pytest.param("mmoe", 3, "none", "false", 3e-5, marks=pytest.mark.heavy),
        ("star", 2, "rules", "false", 3e-6),  # 0 on Intel's processors, 6e-7 on AMD's
        ("weighted", 2, "none", "false", 3e-5),  # which refinement has on one server
        ("deepfm", 2, "refined", '"auto"', 2e-5),
        ("deepfm", 3, "refined", "true", 2e-5),
        pytest.param("mmoe", 2, "rules", "true", 2e-5, marks=pytest.mark.heavy),
    ],
)
def test_one_trainer_with_one_net_equals_local(directory, config, num_servers, tagging, split_fc, most):
    few = {"overrides": [FEW] if config != "weighted" else []}
    if not (directory / f"local-{config}").exists():
        play(directory, {"name": f"local-{config}", "config": config, **few})
    name = f"one-{config}-{num_servers}-{split_fc.strip(chr(34))}"
    scene = {"name": name, "config": config, "strategy": "hierarchical", **few}
    options = [f"servers_per_group={num_servers}", f'tagging="{tagging}"', f"split_fc={split_fc}"]
    summary = play(directory, {**scene, "options": options})
    assert summary["dense_staleness"] == {"median": 0, "p99": 0, "max": 0}
    assert summary["wire_bytes"]["activations"] > 0
    assert max(difference(directory / f"local-{config}", directory / scene["name"])) <= most


def test_gradients_are_clipped_by_the_norm_of_all_parts(directory):
    words = [FEW, "train.max_steps=6", "train.clip_norm=0.02"]
    play(directory, {"name": "free", "overrides": words[:2]})
    play(directory, {"name": "clipped", "overrides": words})
    scene = {"strategy": "hierarchical", "overrides": words}
    for name, split, most in (("whole", "false", 0), ("parts", "true", 2e-5)):
        options = ["servers_per_group=2", f"split_fc={split}"]
        play(directory, {**scene, "name": f"clipped-{name}", "options": options})
        assert max(difference(directory / "clipped", directory / f"clipped-{name}")) <= most
    assert max(difference(directory / "clipped", directory / "free")) > 0.01


def test_checkpoints_know_no_splits(directory):
    """A run with layers in two parts goes on with three, and under ``local``; both come out where it does in one go."""
    grouped = {"strategy": "hierarchical", "options": ["servers_per_group=2", "split_fc=true"]}
    play(directory, {**grouped, "name": "whole", "overrides": [FEW, "train.max_steps=6"]})
    play(directory, {**grouped, "name": "half", "overrides": [FEW, "train.max_steps=3"]})
    then = {"load": "half", "overrides": [FEW, "train.max_steps=6"]}
    three = [*grouped["options"][1:], "servers_per_group=3"]
    play(directory, {**grouped, **then, "name": "three", "options": three})
    play(directory, {**then, "name": "local-then"})
    for name in ("three", "local-then"):
        assert max(difference(directory / "whole", directory / name)) < 1e-5
    models = [set(dense_of(latest(directory / name))) for name in ("whole", "local-then")]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("activations", "gradients"),
    [("int8", "topk"), ("bfloat16", "bfloat16")],
)
@pytest.mark.heavy
def test_fewer_bits_learn_nearly_as_much(directory, activations, gradients):
    overrides = ["train.epochs=3"]
    if not (directory / "exact").exists():
        EXACT.update(play(directory, {"name": "exact", "overrides": overrides}))
    name, options = f"wire-{activations}", ["servers_per_group=2", f'wire_activations="{activations}"']
    scene = {"name": name, "strategy": "hierarchical", "overrides": overrides}
    summary = play(directory, {**scene, "options": [*options, f'wire_dense_gradients="{gradients}"']})
    assert summary["auc"] == pytest.approx(EXACT["auc"], abs=0.03)


AUTO = [
    "strategy.servers_per_group=2",
    'strategy.wire_activations="auto"',
    'strategy.wire_dense_gradients="auto"',
]


@pytest.mark.parametrize(
    ("bytes_per_s", "expected", "told"),
    [
        (1e4, ("bfloat16", "topk"), "examples/s predicted, "),  # rows are so narrow that int8 is no smaller
        (1e12, ("float32", "float32"), "which does not pay"),
        (None, ("float32", "float32"), "how fast this machine packs is not known"),
    ],
)
def test_a_plan_chooses_codecs_by_links_and_cores(directory, bytes_per_s, expected, told):
    settings = RunConfig.load(directory / "deepfm.toml", overrides=AUTO, strategy="hierarchical")
    calibration = None
    if bytes_per_s is not None:
        speeds = dict.fromkeys(("float32", "bfloat16", "int8", "topk"), CodecSpeed(1e-9, 1e-9))
        links = dict.fromkeys(LINKS, Link(1e-5, bytes_per_s))
        calibration = Calibration(trainers=2, machine={"cores": 4}, links=links, codecs=speeds)
    plan = settings.planned(calibration)
    assert (plan.wire["activations"], plan.wire["dense_gradients"]) == expected
    assert told in plan.predicted["wire"]["why"]
    assert Plan.from_dict(plan.to_dict()) == plan


def test_trainers_and_nets_of_a_group_share_one_copy(directory):
    options = ["trainers_per_group=2", "servers_per_group=2", "nets=2"]
    (summary,) = play_all(
        directory, [{"name": "group", "strategy": "hierarchical", "options": options}], 2
    ).values()
    assert summary["auc"] > 0.55
    assert summary["dense_staleness"]["max"] > 0


def test_groups_are_averaged_by_dense_servers(directory):
    options = ["groups=2", "servers_per_group=2", "nets=2", "dense_servers=2", "average_every_steps=3"]
    scene = {"name": "groups", "strategy": "hierarchical", "options": options}
    (summary,) = play_all(directory, [scene], 2).values()
    assert summary["auc"] > 0.55
    assert [len(each) for each in summary["rounds"]] == [2, 2]
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


TWO = ["strategy.servers_per_group=2", "strategy.nets=2", "train.log_every_steps=2", "train.epochs=1000000"]


@pytest.mark.heavy
def test_a_group_server_that_is_killed_ends_the_run_and_is_named_and_the_run_goes_on(directory, begin):
    running = begin("hierarchical", *TWO, "checkpoint.every_steps=2", "cluster.max_restarts=0")
    processes = running.until_it_trains()
    while not list((running.run / "checkpoints").glob("step-*")):
        assert running.process.poll() is None
        time.sleep(0.05)
    victim = [each for each in processes if each["role"] == "group-server"][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    told = running.ends(1)
    assert f"group-server {victim['index']} was killed by signal 9" in told
    assert "--resume" in told
    assert "Traceback" not in told
    stopped_at = int(latest(running.run).name.removeprefix("step-"))
    steps = f"train.max_steps={stopped_at + 3}"
    assert train(directory, "hierarchical", running.run, *TWO, steps, resume=True)["steps"] == stopped_at + 3
