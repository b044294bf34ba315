"""Trainers that are killed: all of them go on from the last checkpoint, and the run ends as if nothing had been."""

import json
import os
import signal
import time

import pytest
from scenes import write

from runs import columns_of, difference, latest, train

ROLES = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
STEPS = 400
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5"]
TWO = ["strategy.trainers=2", *SHORT]
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("reload"), num_examples=1601)


@pytest.fixture(scope="module")
def undisturbed(directory):
    """Trains by a strategy with overrides, once; returns the run's directory."""
    runs = {}

    def run_of(strategy, *overrides):
        key = (strategy, *overrides)
        if key not in runs:
            runs[key] = directory / f"undisturbed-{len(runs)}"
            train(directory, strategy, runs[key], *overrides)
        return runs[key]

    return run_of


def kill(running, rank, happened, life=0):
    """Kills a trainer once something happened, in this life of the trainers."""
    file = running.run / "processes.json"
    while True:
        assert running.process.poll() is None, running.process.communicate()
        processes = json.loads(file.read_text()) if file.exists() else []
        found = [e for e in processes if e["role"] == "trainer" and e["incarnation"] == life]
        if len(found) > rank and happened():
            os.kill(found[rank]["pid"], signal.SIGKILL)
            return
        time.sleep(0.01)


def checkpoints_of(running):
    return list((running.run / "checkpoints").glob("step-*"))


def has_saved(running, number=2):
    """Whether a few checkpoints are there, the first of which may be gone."""
    return lambda: len(checkpoints_of(running)) >= number


def is_saving(running):
    """Whether a checkpoint is being written, beside one that is complete."""
    return lambda: checkpoints_of(running) and list((running.run / "checkpoints").glob(".writing-*"))


def ended(running, restarts=1):
    """The summary, once the run came to its end."""
    told = running.ends(0)
    assert told.count("all trainers go on from") == restarts, told
    assert "Traceback" not in told
    assert not (running.run / "processes.json").exists()
    steps = [json.loads(line)["step"] for line in (running.run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    return json.loads((running.run / "summary.json").read_text())


MOMENTS = [
    ("synchronous", 1, "checkpoint.every_steps=20", has_saved),
    pytest.param("synchronous", 0, "checkpoint.every_steps=20", has_saved, marks=heavy),
    pytest.param("synchronous", 0, "checkpoint.every_steps=1", is_saving, marks=heavy),
    pytest.param("synchronous", 1, "checkpoint.every_steps=1", is_saving, marks=heavy),
    pytest.param("substitution", 1, "checkpoint.every_steps=20", has_saved, marks=heavy),
    pytest.param("substitution", 0, "checkpoint.every_steps=20", has_saved, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "rank", "every", "happened"), MOMENTS)
def test_trainers_with_rows_of_their_own_go_on_bit_for_bit(
    begin, undisturbed, strategy, rank, every, happened
):
    whole = undisturbed(strategy, *TWO)
    running = begin(strategy, *TWO, every)
    kill(running, rank, happened(running))
    summary = ended(running)
    assert summary["steps"] == STEPS
    assert summary["lost_updates"] == 0
    assert difference(running.run, whole) == (0, 0)


@heavy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_amid_an_evaluation(begin, undisturbed, rank):
    often = "train.evaluate_every_steps=2"
    running = begin("synchronous", *TWO, "checkpoint.every_steps=20", often)
    kill(running, rank, has_saved(running))
    ended(running)
    assert difference(running.run, undisturbed("synchronous", *TWO)) == (0, 0)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=heavy)])
def test_rows_of_servers_stay_as_they_are(begin, rank):
    """More updates than steps: those since the checkpoint are made again."""
    running = begin("hybrid", *TWO, *ROLES, "checkpoint.every_steps=100")
    kill(running, rank, lambda: has_saved(running, 1)() and steps_of(running) > 130)
    summary = ended(running)
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] <= 4
    assert summary["lost_updates"] >= 0
    assert updates_of(latest(running.run)) > 0


def steps_of(running):
    lines = (running.run / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["step"] if lines else 0


def updates_of(checkpoint):
    return len(columns_of(checkpoint))
