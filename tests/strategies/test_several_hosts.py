"""Runs on several hosts, which are addresses of this machine, and on a Ray cluster of this host: they end as on one machine."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from running import Running
from scenes import play, write

from companions import together
from girih.comm.group import TrainerGroup
from ray_head import ray_address
from runs import command, difference, latest, train

pytestmark = pytest.mark.slow
HOST_STEPS, SIZE = 12, 32
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.1")
HALVES = ['wire_embeddings="float16"', 'wire_gradients="float16"']
WIRES = {"float32": [], "float16": HALVES}


def train_on_hosts(hosts_directory, ranks):
    """Plays each scene on one host and on two; returns how many messages this trainer sent to the other host."""
    two = TrainerGroup(ranks.rank, ranks.size, ranks.registry, host=ADDRESSES[ranks.rank], name="two hosts")
    exchanges, features = [], []
    for name, options in WIRES.items():
        for title, group in (("one host", ranks), ("two hosts", two)):
            scene = {
                "name": f"{name} on {title}",
                "config": "din",
                "strategy": "synchronous",
                "options": options,
            }
            summary = play(
                hosts_directory, scene, group, act=lambda trainer: exchanges.append(trainer.sparse.exchange)
            )
            features.append(summary["features"])
    two.close()
    assert features[0]["history"]["unseen"] > 0
    assert features.count(features[0]) == len(features)
    return [getattr(exchange, "num_messages", None) for exchange in exchanges]


@pytest.fixture(scope="module")
def hosts_directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hosts"), num_examples=HOST_STEPS * SIZE, size=SIZE, held_out=SIZE)


@pytest.fixture(scope="module")
def sent(hosts_directory):
    return together(partial(train_on_hosts, hosts_directory), len(ADDRESSES))


@pytest.mark.parametrize("name", WIRES)
def test_two_hosts_equal_one_bit_for_bit(hosts_directory, sent, name):
    assert difference(hosts_directory / f"{name} on one host", hosts_directory / f"{name} on two hosts") == (
        0,
        0,
    )


def test_the_plan_has_the_hosts_and_each_exchange_is_a_message_between_them(hosts_directory, sent):
    plans = [
        json.loads((hosts_directory / f"float32 on {title}" / "plan.json").read_text())
        for title in ("one host", "two hosts")
    ]
    hosts = {f"trainer {rank}": address for rank, address in enumerate(ADDRESSES)}
    assert [plan["hosts"] for plan in plans] == [{}, hosts]
    num_groups = len(plans[0]["groups"])
    # one trainer of each host sends for all: numbers of keys, keys and rows of each step and of the evaluation; gradients of
    # each step; which keys have no row in the evaluation
    messages = (HOST_STEPS + 1) * (2 + num_groups) + HOST_STEPS * num_groups + num_groups
    assert [each[:2] for each in sent] == [[None, messages], [None, messages], [None, 0], [None, 0]]


__all__ = ["ray_address"]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs pip install girih[cluster]"
)
STEPS = ["train.max_steps=40", "checkpoint.every_steps=10"]
TWO = ["strategy.trainers=2"]
SYNCHRONOUS = ("synchronous", [*TWO, *STEPS])
HYBRID = ("hybrid", [*TWO, *STEPS, "strategy.embedding_servers=2", "strategy.staleness=0"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ray"), num_examples=1601)


def on_ray(directory, address, run, strategy, overrides, **options):
    done = subprocess.run(
        [*command(directory, strategy, run, *overrides), "--cluster", address],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )
    return done.returncode, done.stdout, done.stderr


def by_process(run):
    return {
        f"{each['role']} {each['index']}": each for each in json.loads((run / "processes.json").read_text())
    }


@needs_ray
@pytest.mark.heavy
@pytest.mark.parametrize(("strategy", "overrides"), [SYNCHRONOUS, HYBRID])
def test_a_run_on_a_cluster_equals_one_of_plain_processes_bit_for_bit(
    directory, ray_address, tmp_path, strategy, overrides
):
    status, output, error = on_ray(directory, ray_address, tmp_path / "ray", strategy, overrides)
    assert status == 0, (output, error)
    assert "40 steps" in output
    train(directory, strategy, tmp_path / "plain", *overrides)
    assert difference(tmp_path / "ray", tmp_path / "plain") == (0, 0)
    assert not (tmp_path / "ray" / "processes.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".girih")] == []


@needs_ray
@pytest.mark.heavy
@pytest.mark.parametrize("killed", ["process", "actor"])
def test_a_killed_trainer_restarts_in_its_place(directory, ray_address, tmp_path, killed):
    """Its process is, or Ray kills its actor; the run goes on, and ends with the parameters of an undisturbed one."""
    strategy, overrides = SYNCHRONOUS
    run, overrides = tmp_path / "ray", [*overrides, "train.max_steps=200"]
    running = Running([*command(directory, strategy, run, *overrides), "--cluster", ray_address])
    running.until_it_trains()
    while not list((run / "checkpoints").glob("step-*/manifest.json")):
        time.sleep(0.02)
    pid = by_process(run)["trainer 1"]["pid"]
    if killed == "actor":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert "Agent" in Path(f"/proc/{pid}/cmdline").read_text()
    os.kill(pid, signal.SIGKILL)
    error = running.ends(0, within_s=120)
    assert "trainer 1" in error
    assert "all trainers go on from step-" in error
    assert json.loads((run / "summary.json").read_text())["restarts"] == {"trainer": 1}
    train(directory, strategy, tmp_path / "plain", *overrides)
    assert difference(run, tmp_path / "plain") == (0, 0)


@needs_ray
def test_a_missing_cluster_is_an_error_of_one_line_and_status_2(directory, tmp_path):
    status, output, error = on_ray(directory, "127.0.0.1:1", tmp_path / "run", *SYNCHRONOUS)
    assert status == 2, (output, error)
    assert output == ""
    assert len(error.splitlines()) == 1
    assert "cluster '127.0.0.1:1' cannot be reached" in error
    assert not (tmp_path / "run").exists()


@needs_ray
@pytest.mark.heavy
def test_a_signal_ends_a_run_on_a_cluster_with_a_checkpoint(directory, ray_address, tmp_path):
    strategy, overrides = HYBRID
    run = tmp_path / "run"
    words = [*command(directory, strategy, run, *overrides, "train.max_steps=100000", "train.epochs=100000")]
    running = Running([*words, "--cluster", ray_address])
    running.until_it_trains()
    running.process.send_signal(signal.SIGTERM)
    assert "go on with" in running.ends(130, within_s=60)
    assert (latest(run) / "manifest.json").is_file()


def scaled(run, wanted):
    """The status of ``girih scale``, and what it output."""
    words = [sys.executable, "-m", "girih", "scale", str(run), wanted]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@needs_ray
@pytest.mark.heavy
def test_processes_are_added_in_a_placement_group_of_their_own(directory, ray_address, tmp_path):
    """All begin anew from a checkpoint: the run ends as plain processes do. Where there is no room it goes on as it was."""
    overrides = ["train.max_steps=400", "strategy.staleness=0", "train.log_every_steps=5", *TWO]
    run = tmp_path / "ray"
    running = Running([*command(directory, "hybrid", run, *overrides), "--cluster", ray_address])
    try:
        running.until_it_trains()
        status, output = scaled(run, "embedding-server=500")
        assert status == 2
        assert "the cluster has no room for the run's 504 processes" in output
        status, output = scaled(run, "embedding-server=2")
        assert (status, "embedding-server 1 → 2" in output) == (0, True), output
        assert "embedding-server 1" in by_process(run)
        running.ends(0, within_s=120)
    finally:
        running.process.kill()
    train(directory, "hybrid", tmp_path / "plain", *overrides)
    assert difference(run, tmp_path / "plain") == (0, 0)
