"""Hierarchical training without group servers: the EASGD-based system of HT §2.2."""

import os
import signal
import threading
import time

import pytest
import torch
from scenes import STEPS, play, play_all, write

import girih
from companions import together
from girih.cli import run as cli
from girih.comm.endpoints import connect
from girih.dense.halves.hogwild import HogwildReplica
from girih.dense.service.dense_server import DenseServer
from girih.errors import ConfigError
from girih.testing.dense_suite import case, dense_spec
from runs import command, difference, latest, train

heavy = pytest.mark.heavy
CONFIGS = ("deepfm", "weighted", *(pytest.param(name, marks=heavy) for name in ("din", "mmoe", "star")))
EPOCHS = ["train.epochs=3"]
STEPWISE = ["model.dropout=0.1", "train.lr_schedule={name='ExponentialLR', gamma=0.95, interval='step'}"]
GROUPS = {
    averaging: {
        "name": f"groups-{averaging}",
        "strategy": "hierarchical",
        "options": ["groups=2", "dense_servers=2", f"averaging='{averaging}'", "average_every_steps=4"],
        "overrides": EPOCHS,
    }
    for averaging in ("easgd", "ma", "bmuf")
}
NETS_AND_GROUPS = {
    "name": "nets-and-groups",
    "strategy": "hierarchical",
    "options": ["groups=2", "nets=3", "average_every_steps=2"],
    "overrides": [*EPOCHS, "train.evaluate_every_steps=70"],
    "valid": True,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hierarchical"), held_out=1001)


@pytest.fixture(scope="module")
def local(directory):
    return play(directory, {"name": "local", "overrides": EPOCHS})


@pytest.fixture(scope="module")
def two(directory):
    return play_all(directory, [GROUPS["ma"], NETS_AND_GROUPS], 2)


@pytest.fixture(scope="module")
def others(directory):
    return play_all(directory, [GROUPS["easgd"], GROUPS["bmuf"]], 2)


@pytest.mark.parametrize("config", CONFIGS)
def test_one_group_of_one_trainer_with_one_net_equals_local_bit_for_bit(directory, config):
    overrides = STEPWISE if config == "deepfm" else []
    local = play(directory, {"name": f"local-{config}", "config": config, "overrides": overrides})
    scene = {"name": f"one-{config}", "config": config, "strategy": "hierarchical", "overrides": overrides}
    summary = play(directory, {**scene, "options": ["embedding_servers=2"]})
    assert (summary["steps"], summary["staleness_max"]) == (STEPS, 0)
    assert summary["features"] == local["features"]
    assert summary["dense_staleness"] == {"median": 0, "p99": 0, "max": 0}
    assert difference(directory / f"local-{config}", directory / scene["name"]) == (0, 0)


def test_one_net_goes_on_bit_for_bit_where_it_was_stopped(directory):
    common = {"strategy": "hierarchical"}
    words = ["model.dropout=0.1"]
    play(directory, {**common, "name": "whole", "overrides": [*words, "train.max_steps=6"]})
    play(directory, {**common, "name": "first", "overrides": [*words, "train.max_steps=3"]})
    then = {**common, "name": "then", "load": "first", "overrides": [*words, "train.max_steps=6"]}
    assert play(directory, then)["steps"] == 6
    assert difference(directory / "whole", directory / "then") == (0, 0)


@pytest.mark.slow
def test_several_nets_learn_as_much_and_their_staleness_is_measured(directory, local):
    scene = {"name": "nets", "strategy": "hierarchical", "options": ["nets=3"], "overrides": EPOCHS}
    meeting = {
        **scene,
        "overrides": [*EPOCHS, "train.evaluate_every_steps=7", "checkpoint.every_steps=11"],
        "valid": True,
    }
    summary = play(directory, meeting)
    assert summary["num_examples"] == local["num_examples"]
    assert summary["num_rows"] == local["num_rows"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.03)
    assert 1 <= summary["staleness_max"] <= 2
    staleness = summary["dense_staleness"]
    assert 0 <= staleness["median"] <= staleness["p99"] <= staleness["max"] == summary["dense_staleness_max"]
    assert staleness["max"] >= 1
    assert summary["lost_updates"] == summary["kept"] == 0


def assert_groups_learn(summary, local):
    assert summary["num_examples"] == local["num_examples"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.03)
    assert summary["dense_staleness"]["max"] == 0  # one net each
    assert summary["wire_bytes"]["dense"] > 2 * 4 * summary["dense_parameters"]
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


@pytest.mark.slow
def test_two_groups_learn_as_much_as_one_process(local, two):
    assert_groups_learn(two["groups-ma"], local)


@heavy
@pytest.mark.parametrize("averaging", ["easgd", "bmuf"])
def test_two_groups_learn_as_much_by_the_other_algorithms(local, others, averaging):
    assert_groups_learn(others[f"groups-{averaging}"], local)


@pytest.mark.slow
def test_groups_of_several_nets_evaluate_and_save_together(local, two):
    summary = two["nets-and-groups"]
    assert summary["num_examples"] == local["num_examples"]
    assert summary["auc"] == pytest.approx(local["auc"], abs=0.04)
    assert summary["kept"] == 0
    assert all(rounds > 0 for each in summary["rounds"] for rounds in each)


def pulled_apart(ranks):
    """Two replicas whose labels are opposite, averaged elastically by a dense server; returns this one's numbers and the centre."""
    stop, told, address = threading.Event(), threading.Event(), []
    if ranks.first:
        server = DenseServer(0, 2, "easgd", 0.2, "shm://", b"of this run")
        threading.Thread(target=server.run, args=(lambda at: (address.append(at), told.set()), stop)).start()
        told.wait(20)
    (at,) = ranks.broadcast(address)
    servers = [connect(at, secret=b"of this run")]
    half = HogwildReplica(dense_spec(), ranks, nets=1, servers=servers, average_every_steps=1)
    begun = half._nets.first.parameters[-1].detach().reshape(-1).tolist()
    one = case(0)
    one.batch.labels[:] = ranks.rank
    for _ in range(30):
        half.compute(one.batch, one.embeddings()).apply()
        time.sleep(0.002)
    half.sync()
    live, model = half._nets.first.parameters, list(half.module.parameters())
    bias = live[-1].item(), model[-1].item()
    flat = torch.cat([(a - b).detach().reshape(-1) for a, b in zip(live, model, strict=True)])
    half.restore(half.state())
    same = all(torch.equal(a, b) for a, b in zip(half._nets.first.parameters, model, strict=True))
    half.sync()
    after = list(half.module.parameters())[-1].item()
    ranks.barrier()
    half.close()
    seldom = HogwildReplica(
        dense_spec(), ranks, nets=1, servers=[connect(at, secret=b"of this run")], average_every_steps=1000
    )
    for _ in range(30):
        seldom.compute(one.batch, one.embeddings()).apply()
    alone = seldom._nets.first.parameters[-1].item()
    ranks.barrier()
    seldom.close()
    stop.set()
    return {
        "begun": begun,
        "bias": bias,
        "alone": alone,
        "apart": flat.abs().max().item(),
        "same": same,
        "after": after,
    }


def test_replicas_differ_and_the_centre_lies_between_until_both_are_restored_to_it():
    zero, one = together(pulled_apart)
    assert zero["begun"] == one["begun"]
    assert zero["bias"][1] == one["bias"][1]
    assert zero["bias"][0] < zero["bias"][1] < one["bias"][0]  # the bias falls where all labels are 0
    assert one["bias"][0] - zero["bias"][0] < one["alone"] - zero["alone"]
    for each in (zero, one):
        assert each["apart"] > 1e-3
        assert each["same"]
        assert each["after"] == each["bias"][1]


TWO = ["strategy.groups=2", "strategy.nets=2", "strategy.dense_servers=2", "strategy.average_every_steps=2"]
LONG = ["train.epochs=1000000", "train.log_every_steps=2"]


@heavy
def test_a_dense_server_that_is_killed_and_may_not_come_back_ends_the_run_and_is_named(begin):
    running = begin("hierarchical", *TWO, *LONG, "checkpoint.every_steps=2", "cluster.max_restarts=0")
    processes = running.until_it_trains()
    roles = [each["role"] for each in processes]
    assert sorted(roles) == sorted(
        ["trainer"] * 2 + ["dense-server"] * 2 + ["loader", "embedding-worker", "embedding-server"]
    )
    while not list((running.run / "checkpoints").glob("step-*")):
        assert running.process.poll() is None
        time.sleep(0.05)
    victim = [each for each in processes if each["role"] == "dense-server"][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    told = running.ends(1)
    assert f"dense-server {victim['index']} was killed by signal 9" in told
    assert "--resume" in told
    assert "Traceback" not in told


@heavy
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_all_replicas_go_on(directory, begin):
    running = begin("hierarchical", *TWO, *LONG)
    running.until_it_trains()
    running.process.send_signal(signal.SIGTERM)
    assert "go on with" in running.ends(130)
    stopped_at = int(latest(running.run).name.removeprefix("step-"))
    summary = train(
        directory, "hierarchical", running.run, *TWO, *LONG, f"train.max_steps={stopped_at + 3}", resume=True
    )
    assert summary["steps"] == stopped_at + 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("servers_per_group=-1", "servers_per_group = -1"),
        ("trainers_per_group=2", "set trainers_per_group = 1 and groups = 2"),
        ("wire_activations='int8'", "wire_activations = 'int8': it is for group servers"),
        ("split_fc=true", "split_fc = True: it is for group servers, and servers_per_group = 0"),
        ("elastic_rate=1.5", "elastic_rate = 1.5"),
        ("trainers=2", "trainers"),
        ("averaging='mean'", "averaging"),
        ("staleness=2", "staleness"),
    ],
)
def test_options_that_are_not_built_or_do_not_go_together_are_refused(
    directory, tmp_path, monkeypatch, change, told
):
    said = []
    monkeypatch.setattr("click.echo", lambda text="", **_: said.append(str(text)))
    assert cli(command(directory, "hierarchical", tmp_path / "run", f"strategy.{change}")[3:]) == 2
    assert told in said[-1]
    assert not (tmp_path / "run").exists()


def test_micro_batches_are_refused(directory, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("click.echo", lambda text="", **_: said.append(str(text)))
    words = [
        "plan",
        str(directory / "config.toml"),
        "--strategy",
        "hierarchical",
        "--set",
        "schedule.micro_batches=2",
    ]
    assert cli(words) == 2
    assert "set micro_batches = 1" in said[-1]


def test_as_many_trainers_as_the_groups_need_are_expected(directory):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node=2"):
        girih.Trainer(torch.nn.Identity(), schema=girih.Schema([girih.Categorical(name="user", dim=4)], labels="click"),
                      strategy=girih.Hierarchical(groups=2))  # fmt: skip
