"""Embedding servers that are killed come back to their rows, and training goes on as if nothing had been."""

import json
import os
import random
import re
import signal
import time

import pytest
from scenes import write

from runs import columns_of, difference, latest, train

SERVERS = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
STEPS = 300
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", *SERVERS]
TWO = ["strategy.trainers=2", *SHORT]
ROLE = "embedding-server"
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("come-back"), num_examples=1601)


def lives_of(running, index):
    """The process of a server and which life it is, as far as it listens; None before."""
    file = running.run / "processes.json"
    processes = json.loads(file.read_text()) if file.exists() else []
    found = [e for e in processes if e["role"] == ROLE and e["index"] == index]
    return found[0] if found else None


def kill(running, index, life, wait_s=0.0):
    """Kills a server in a life of it, so long after it began to listen or the run to train."""
    if life == 0:
        running.until_it_trains()
    while (found := lives_of(running, index)) is None or found["incarnation"] < life:
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.01)
    time.sleep(wait_s)
    os.kill(found["pid"], signal.SIGKILL)


def ended(running, restarts):
    told = running.ends(0)
    assert told.count("it came back") == restarts, told
    assert "Traceback" not in told
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {ROLE: restarts}
    assert summary["steps"] == STEPS
    return summary, torn_rows(told)


def torn_rows(told):
    return {(table, int(number)) for number, table in re.findall(r"id (-?\d+) of '(\w+)'", told)}


@pytest.mark.parametrize("strategy", ["hybrid", pytest.param("asynchronous", marks=heavy)])
def test_a_server_that_is_killed_comes_back(begin, strategy):
    running = begin(strategy, *TWO, "strategy.staleness=2")
    kill(running, 0, 0, random.Random(7).random() / 4)
    kill(running, 1, 0, 0.1)
    summary, _ = ended(running, 2)
    assert summary["staleness_max"] <= 2
    assert summary["lost_updates"] == 0
