"""Whole runs of real processes whose every connection meets faults: no row moves otherwise, nothing hangs, and losses are counted.

Each test goes on with other dice for ``GIRIH_MINUTES``, one run at least. Collectives of trainers go through torch, not these connections.
"""

import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from running import Running
from scenes import write

from girih.data.click_log import click_log
from runs import columns_of, command, difference, latest, train

pytestmark = pytest.mark.heavy
MINUTES = float(os.environ.get("GIRIH_MINUTES", "0"))
RUN_S = 240
ALL_KINDS = {"broken", "refused", "corrupt", "doubled", "swapped", "dropped", "delay", "parted"}
FAULTS = {
    "broken": 0.01, "refused": 0.1, "corrupt": 0.01, "doubled": 0.05, "swapped": 0.05, "dropped": 0.005, "delay": 0.1, "delay_s": 0.005,
    "parted": 0.001, "parted_s": 0.5,
}  # fmt: skip
ROLES = ["strategy.trainers=2", "strategy.embedding_servers=2", "strategy.embedding_workers=2"]
SIZE, STEPS, EPOCHS = 32, 64, 3
MODEL = '''
import torch
from torch import nn

from girih.schema import Schema


class Counting(nn.Module):
    """A model whose logits are always 0, and whose gradients are those of the sum of its embeddings."""

    def __init__(self, schema: Schema):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, numeric, embeddings):
        total = embeddings["user"].sum(1, keepdim=True) + embeddings["item"].sum(1, keepdim=True) + self.bias
        return total - total.detach()
'''
CONFIG = f"""
[data]
train = "train.parquet"
batch_size = {SIZE}
shuffle = false
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[tables]]
name = "user"
initializer = {{ name = "zeros" }}
[[tables]]
name = "item"
initializer = {{ name = "zeros" }}
[labels]
names = ["click"]
[model]
name = "counting.py:Counting"
[sparse_optimizer]
name = "sgd"
lr = 1.0
[train]
seed = 3
epochs = {EPOCHS}
log_every_steps = 5
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("faulty"), num_examples=STEPS * SIZE)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Data and a model whose rows are sums of exact numbers: whatever the order, they say which updates were applied."""
    made = tmp_path_factory.mktemp("counting")
    table, _ = click_log(STEPS * SIZE, start=0, cardinality=300)
    pq.write_table(table, made / "train.parquet", row_group_size=700)
    (made / "counting.py").write_text(MODEL)
    (made / "config.toml").write_text(CONFIG)
    return made


class Network:
    """Faults that processes started from here on meet, and what they tell of them."""

    def __init__(self, place, monkeypatch):
        self._place, self._monkeypatch = place, monkeypatch
        site = str(Path(__file__).parent / "faulty")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([site, os.environ.get("PYTHONPATH", "")]))
        self.kinds = Counter()

    def begin(self, seed):
        """Throws other dice from here on."""
        self._folder = self._place / f"network-{seed}"
        self._folder.mkdir()
        (self._folder / "faults.json").write_text(json.dumps(FAULTS | {"seed": seed}))
        self._monkeypatch.setenv("GIRIH_FAULTS", str(self._folder))

    def met(self):
        """How many faults of each kind there were since."""
        found = Counter((self._folder / "met").read_text().split())
        self.kinds += found
        return found

    def journals(self):
        """What each server was told and did, by line and word."""
        return [
            [line.split() for line in file.read_text().splitlines()] for file in self._folder.glob("server-*")
        ]


@pytest.fixture
def network(tmp_path, monkeypatch):
    return Network(tmp_path, monkeypatch)


@pytest.fixture
def rounds(network, tmp_path, request):
    """Seeds, and a directory for the run of each, until the time is over."""

    def seeds():
        until_s, seed = time.monotonic() + 60 * MINUTES, 0
        while seed == 0 or time.monotonic() < until_s:
            network.begin(seed)
            yield seed, tmp_path / f"run-{seed}"
            seed += 1

    return seeds


def ended(words, network, act=lambda running: None):
    """The summary of a run that met faults, and what it told."""
    running = Running(words)
    try:
        act(running)
        told = running.ends(0, within_s=RUN_S)
    finally:
        running.process.kill()
        running.process.communicate()
    assert "Traceback" not in told
    assert sum(network.met().values()) > 100
    return json.loads((running.run / "summary.json").read_text()), told


def moved(counting, times):
    """(table, id) → what each number of a row is, where a step's batch was applied ``times[step]`` times."""
    log = pq.read_table(counting / "train.parquet")
    gradient = (0.5 - log["click"].to_numpy()) / SIZE * np.repeat(times, SIZE)
    rows = defaultdict(float)
    for table in ("user", "item"):
        for key, part in zip(log[table].to_pylist(), gradient.tolist(), strict=True):
            rows[table, key] -= part
    return rows


def rows_of(run):
    """(table, id) → a row's numbers."""
    return {
        (table, int(key)): row
        for (table, column), (ids, values) in columns_of(latest(run)).items()
        if column.startswith("embedding")
        for key, row in zip(ids, values, strict=True)
    }


@pytest.mark.timeout(60 * MINUTES + 2 * RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_run_in_step_ends_bit_for_bit_as_on_a_sound_network(
    directory, network, rounds, tmp_path, monkeypatch, transport
):
    sets = [*ROLES, "strategy.staleness=0", f"strategy.transport={transport}", "train.log_every_steps=5"]
    sound = train(directory, "hybrid", tmp_path / "sound", *sets)
    for _, run in rounds():
        found, _ = ended(command(directory, "hybrid", run, *sets), network)
        assert difference(run, tmp_path / "sound") == (0, 0)
        assert found["store"]["lookups"] == sound["store"]["lookups"]
        assert found["store"]["updates"] == sound["store"]["updates"]
        assert (found["lost_updates"], found["restarts"], found["staleness_max"]) == (0, {}, 0)
    assert network.kinds.keys() == ALL_KINDS


@pytest.mark.timeout(60 * MINUTES + RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_every_update_of_several_trainers_moves_its_rows_once(counting, network, rounds, strategy, transport):
    updates_per_step = 2 if strategy == "asynchronous" else 1  # of the mean over a share, or over both
    expected = moved(counting, np.full(STEPS, EPOCHS * updates_per_step))
    sets = [*ROLES, "strategy.staleness=3", f"strategy.transport={transport}"]
    for _, run in rounds():
        found, _ = ended(command(counting, strategy, run, *sets), network)
        rows = rows_of(run)
        assert rows.keys() == expected.keys()
        assert [key for key, value in expected.items() if (rows[key] != value).any()] == []
        assert found["num_examples"] == EPOCHS * STEPS * SIZE
        assert (found["lost_updates"], found["restarts"]) == (0, {})
        assert found["staleness_max"] <= 3


@pytest.mark.timeout(60 * MINUTES + RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_what_a_killed_trainer_takes_along_is_counted_exactly(counting, network, rounds, transport):
    """Against journals of the servers: what was read and never ended is lost, and rows are the sum of what was applied."""
    sets = [*ROLES, "strategy.staleness=3", f"strategy.transport={transport}", "checkpoint.every_steps=10"]
    num_lost = 0
    for seed, run in rounds():
        dice = random.Random(seed)

        def kill_one(running, dice=dice):
            processes = running.until_it_trains()
            time.sleep(dice.uniform(0.5, 2.0))
            pids = [each["pid"] for each in processes if each["role"] == "trainer"]
            os.kill(pids[dice.randrange(2)], signal.SIGKILL)

        found, _ = ended(
            command(counting, "hybrid", run, *sets, f"train.epochs={3 * EPOCHS}"), network, kill_one
        )
        assert found["restarts"] == {"trainer": 1}
        last_lives = [journal for journal in network.journals() if journal]
        assert found["lost_updates"] == max(map(lost, last_lives))
        num_lost += found["lost_updates"]
        one, other = (moved(counting, times_applied(journal)) for journal in last_lives)
        for key, row in rows_of(run).items():
            assert (row == row[0]).all()
            assert row[0] in (one[key], other[key])
    assert num_lost > 0


def lost(journal):
    """Batches that were read and never ended, until trainers began anew."""
    read, total = set(), 0
    for what, *words in journal:
        if what == "read":
            read.add(tuple(words))
        elif what == "ended":
            read.discard(tuple(words))
        elif what == "anew":
            total += len(read)
            read.clear()
    return total


def times_applied(journal):
    """How often each step of an epoch was applied."""
    times = np.zeros(STEPS)
    for what, *words in journal:
        if what == "applied":
            times[(int(words[0]) - 1) % STEPS] += 1
    return times
