"""PERSIA's defects, and connections that break in the middle of anything: nothing is lost, nothing happens twice, staleness is bounded."""

import json
import os
import random
import signal
import time
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from running import Running
from scenes import play, write

from girih.comm.service import connect
from girih.data.click_log import click_log
from girih.errors import CheckpointError, GirihError, WireTimeout
from girih.services.loader import _Pass
from girih.sparse.protocol import SparseVerb
from girih.sparse.routing.sorted_keys import PartUpdate, SortedKeys
from runs import columns_of, command, difference, latest, relative_difference, train
from support.faults import Faults
from support.faults import connect as connect_with_faults

STEPS = 30
ONE_EACH = ["trainers=1", "embedding_workers=1", "embedding_servers=1", "loaders=1", "staleness=0"]
TWO_EACH = ["embedding_workers=2", "embedding_servers=2", "staleness=0"]
ROLES_BESIDE = ("embedding-server", "embedding-worker", "loader")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("defects"), num_examples=STEPS * 32, held_out=101)
    (directory / "wide.toml").write_text(
        (directory / "deepfm.toml").read_text().replace("dim = 4", "dim = 8")
    )
    play(directory, {"name": "local"})
    return directory


def hybrid(name, *overrides, options=TWO_EACH, **more):
    return {"name": name, "strategy": "hybrid", "options": options, "overrides": overrides, **more}


def test_hybrid_with_1_trainer_1_worker_1_server_equals_local(directory):
    summary = play(directory, hybrid("one-each", options=ONE_EACH))
    assert (summary["trainers"], summary["steps"], summary["staleness_max"]) == (1, STEPS, 0)
    assert difference(directory / "local", directory / "one-each") == (0, 0)


@pytest.mark.parametrize(("kind", "verb"), [(SortedKeys, "read"), (PartUpdate, "apply")])
def test_persia_defect_3_a_failed_lookup_or_update_ends_the_run_with_its_error(
    directory, monkeypatch, kind, verb
):
    original, calls = getattr(kind, verb), []

    def fail_once(self, *arguments, **options):
        calls.append(verb)
        if len(calls) == 20:
            raise RuntimeError("the memory of this row is damaged")
        return original(self, *arguments, **options)

    monkeypatch.setattr(kind, verb, fail_once)
    with pytest.raises(GirihError, match="the memory of this row is damaged"):
        play(directory, hybrid(f"failing-{verb}", options=[*TWO_EACH[:2], "staleness=3"]))
    assert not (directory / f"failing-{verb}" / "checkpoints").exists()  # nothing that lacks a batch


def test_persia_defect_4_workers_forget_batches_that_no_trainer_will_pull(directory):
    seen = []

    def watch(trainer):
        original = trainer.sparse.stats
        trainer.sparse.stats = lambda **options: seen.append(original(**options)) or seen[-1]

    summary = play(directory, hybrid("cut-short", "train.max_steps=5", options=["staleness=3"]), act=watch)
    assert summary["steps"] == 5
    kept = [stats.processes["embedding-worker 0"]["gauges"].get("kept_samples") for stats in seen]
    assert kept == [0] * len(seen)
    assert seen


def test_persia_defect_6_a_checkpoint_of_one_server_loads_on_eight_and_on_three(directory):
    first = play(directory, hybrid("of-one", "train.max_steps=10", options=ONE_EACH))
    assert first["steps"] == 10
    for number in (8, 3):
        options = [*ONE_EACH[:2], f"embedding_servers={number}", "staleness=0"]
        play(directory, hybrid(f"on-{number}", "store.shards=1", options=options, load="of-one"))
        assert difference(directory / "local", directory / f"on-{number}") == (0, 0)


@pytest.mark.slow
def test_persia_defect_7_momentum_and_weight_decay_are_not_ignored(directory):
    columns = {}
    for momentum, l2 in ((0.9, 0.01), (0.9, 0.0), (0.0, 0.01), (0.0, 0.0)):
        sgd = f"sparse_optimizer={{name='sgd', lr=0.2, momentum={momentum}, l2={l2}}}"
        first_order = sgd.replace("sparse", "first_order", 1)
        local, remote = f"local-sgd-{momentum}-{l2}", f"hybrid-sgd-{momentum}-{l2}"
        play(directory, {"name": local, "overrides": [sgd, first_order]})
        play(directory, hybrid(remote, sgd, first_order))
        assert difference(directory / local, directory / remote) == (0, 0)
        columns[momentum, l2] = columns_of(latest(directory / remote))
    for one in columns:
        for other in columns:
            if one != other:  # each option moves rows in a way of its own
                embeddings = [name for name in columns[one] if name[-1] == "embedding"]
                assert (
                    max(relative_difference(columns[one][n][1], columns[other][n][1]) for n in embeddings)
                    > 1e-5
                ), (
                    one,
                    other,
                )


def test_persia_defect_8_a_checkpoint_of_another_dim_is_refused_and_leaves_all_rows(directory):
    def act(trainer):
        with pytest.raises(CheckpointError, match="dim"):
            trainer.load(directory / "local")

    summary = play(directory, {**hybrid("wide"), "config": "wide"}, act=act)
    assert summary["steps"] == STEPS
    play(directory, {"name": "local-wide", "config": "wide"})
    assert difference(directory / "local-wide", directory / "wide") == (0, 0)


@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_persia_defect_9_no_process_answers_without_the_secret_of_the_run(directory, monkeypatch, transport):
    seen = []

    def strangers(trainer):
        addresses = trainer._cluster.addresses
        for role in ROLES_BESIDE:
            for address in addresses.get(role, ()):
                with connect(address, secret=b"guessed", timeout_s=0.2) as client:
                    reply = client.call(
                        SparseVerb.LOAD if role == ROLES_BESIDE[0] else SparseVerb.DROP_IDS, (1, 0, 0)
                    )
                    with pytest.raises(WireTimeout):
                        reply.wait()
                seen.append(role)

    original = _Pass.__init__

    def begin(self, *arguments):
        original(self, *arguments)
        strangers(here[0])  # now that the loader runs

    here = []
    monkeypatch.setattr(_Pass, "__init__", begin)
    options = [*TWO_EACH, f"transport={transport}"]
    play(directory, hybrid(f"strangers-{transport}", options=options), act=here.append)
    assert sorted(seen) == sorted(["embedding-server", "embedding-worker"] * 2 + ["loader"])
    assert difference(directory / "local", directory / f"strangers-{transport}") == (0, 0)


SEEDS = int(os.environ.get("GIRIH_SEEDS", "10"))
CONNECTING = ("girih.comm.registry.remote", "girih.dense.halves.parameter_server", "girih.training.feeds")
FAULTS = {
    "broken": Faults(broken=0.05),
    "corrupt": Faults(corrupt=0.05),
    "late": Faults(delay_s=0.01),
    "disorder": Faults(doubled=0.1, swapped=0.1, dropped=0.02),
    "all": Faults(
        broken=0.02,
        refused=0.1,
        delay_s=0.005,
        delay=0.2,
        corrupt=0.02,
        doubled=0.05,
        swapped=0.05,
        dropped=0.01,
    ),
}
ROLES = ["embedding_servers=2", "embedding_workers=2"]


@pytest.fixture(scope="module")
def faults_directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("faults"), num_examples=STEPS * 32)


@pytest.fixture(scope="module")
def local_din(faults_directory):
    return play(faults_directory, {"name": "local", "config": "din"})


@pytest.fixture
def faulty(monkeypatch):
    """Has every connection between processes meet faults; returns all clients made."""
    clients = []

    def begin(faults):
        def faulty_connect(address, **options):
            clients.append(connect_with_faults(address, **options, faults=faults))
            return clients[-1]

        for module in CONNECTING:
            monkeypatch.setattr(f"{module}.connect", faulty_connect)
        return clients

    return begin


def quick(choices, *of_them):
    return [c if c in of_them else pytest.param(*c, marks=pytest.mark.heavy) for c in choices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "transport"),
    quick([(k, t) for k in FAULTS for t in ("shared", "tcp")], ("broken", "shared"), ("all", "tcp")),
)
def test_persia_defect_3_lookups_and_updates_are_repeated_once_after_a_broken_connection(
    faults_directory, local_din, faulty, kind, transport
):
    clients = faulty(FAULTS[kind])
    scene = {
        "name": f"{kind}-{transport}",
        "config": "din",
        "strategy": "hybrid",
        "options": ["staleness=0", f"transport={transport}", *ROLES],
    }
    summary = play(faults_directory, scene)
    assert difference(faults_directory / "local", faults_directory / scene["name"]) == (0, 0)
    assert summary["store"]["lookups"] == local_din["store"]["lookups"]
    assert summary["store"]["updates"] == local_din["store"]["updates"]
    assert summary["kept"] == 0
    assert sum(client.num_lost for client in clients) == 0
    if FAULTS[kind].broken or FAULTS[kind].corrupt:
        assert sum(client.num_reconnects for client in clients) > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "staleness", "kind"),
    quick(
        [(s, t, k) for s in ("hybrid", "asynchronous") for t in (1, 3) for k in (None, "all")],
        ("hybrid", 3, "all"),
        ("asynchronous", 3, None),
    ),
)
def test_persia_defect_5_staleness_is_bounded_and_measured(
    faults_directory, local_din, faulty, strategy, staleness, kind
):
    if kind is not None:
        faulty(FAULTS[kind])
    name = f"{strategy}-{staleness}-{kind}"
    scene = {
        "name": name,
        "config": "din",
        "strategy": strategy,
        "options": [f"staleness={staleness}", *ROLES],
    }
    seen = []
    summary = play(faults_directory, scene, act=partial(watch_staleness, seen))
    assert 0 < summary["staleness_max"] <= staleness
    assert len(seen) == STEPS
    assert max(seen) == summary["staleness_max"]
    assert sum(seen) / STEPS == summary["staleness_mean"]
    assert summary["store"]["lookups"] == local_din["store"]["lookups"]
    assert summary["store"]["updates"] == local_din["store"]["updates"]
    assert summary["kept"] == 0


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_minutes_of_faults_change_no_row(faults_directory, local_din, faulty, strategy, transport):
    """Each run is the same training over other dice; the model of what rows are to be is the local run."""
    num_reconnects = 0
    for seed in range(SEEDS):
        clients = faulty(replace(FAULTS["all"], seed=seed))
        name = f"minutes-{strategy}-{transport}-{seed}"
        options = ["staleness=0", f"transport={transport}", *ROLES]
        scene = {"name": name, "config": "din", "strategy": strategy, "options": options}
        summary = play(faults_directory, scene)
        assert difference(faults_directory / "local", faults_directory / name) == (0, 0)
        assert summary["store"]["updates"] == local_din["store"]["updates"]
        assert summary["kept"] == 0
        assert sum(client.num_lost for client in clients) == summary["lost_updates"] == 0
        num_reconnects += sum(client.num_reconnects for client in clients)
    assert num_reconnects > 10 * SEEDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_a_connection_cut_for_good_ends_the_run_with_an_error(faults_directory, faulty, strategy):
    faulty(Faults(cut_after=40))
    scene = {
        "name": f"cut-{strategy}",
        "config": "din",
        "strategy": strategy,
        "options": ["staleness=2", "transport=tcp", *ROLES],
    }
    with pytest.raises(GirihError, match=r"no process listens|another process|no lasting"):
        play(faults_directory, scene)


def watch_staleness(seen, trainer):
    """Notes what servers say of each batch."""
    pull = trainer.sparse.pull

    def watched(batch):
        pulled = pull(batch)
        wait = pulled.wait

        def waited(*examples):
            found = wait(*examples)
            seen.append(pulled.staleness)
            return found

        pulled.wait = waited
        return pulled

    trainer.sparse.pull = watched


MINUTES = float(os.environ.get("GIRIH_MINUTES", "0"))
RUN_S = 240
ALL_KINDS = {"broken", "refused", "corrupt", "doubled", "swapped", "dropped", "delay", "parted"}
NETWORK_FAULTS = {
    "broken": 0.01, "refused": 0.1, "corrupt": 0.01, "doubled": 0.05, "swapped": 0.05, "dropped": 0.005, "delay": 0.1, "delay_s": 0.005,
    "parted": 0.001, "parted_s": 0.5,
}  # fmt: skip
RUN_ROLES = ["strategy.trainers=2", "strategy.embedding_servers=2", "strategy.embedding_workers=2"]
SIZE, RUN_STEPS, EPOCHS = 32, 64, 3
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
def run_directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("faulty"), num_examples=RUN_STEPS * SIZE)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Data and a model whose rows are sums of exact numbers: whatever the order, they say which updates were applied."""
    made = tmp_path_factory.mktemp("counting")
    table, _ = click_log(RUN_STEPS * SIZE, start=0, cardinality=300)
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
        (self._folder / "faults.json").write_text(json.dumps(NETWORK_FAULTS | {"seed": seed}))
        self._monkeypatch.setenv("GIRIH_FAULTS", str(self._folder))

    def met(self):
        """How many faults of each kind there were since."""
        found = Counter((self._folder / "met").read_text().split())
        self.kinds += found
        return found

    def journals(self):
        """What each server received and did, by line and word."""
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
    """The summary of a run that met faults, and what it reported."""
    running = Running(words)
    try:
        act(running)
        reported = running.ends(0, within_s=RUN_S)
    finally:
        running.process.kill()
        running.process.communicate()
    assert "Traceback" not in reported
    assert sum(network.met().values()) > 100
    return json.loads((running.run / "summary.json").read_text()), reported


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


@pytest.mark.heavy
@pytest.mark.timeout(60 * MINUTES + 2 * RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_a_run_in_step_equals_one_on_a_sound_network(
    run_directory, network, rounds, tmp_path, monkeypatch, transport
):
    sets = [*RUN_ROLES, "strategy.staleness=0", f"strategy.transport={transport}", "train.log_every_steps=5"]
    sound = train(run_directory, "hybrid", tmp_path / "sound", *sets)
    for _, run in rounds():
        found, _ = ended(command(run_directory, "hybrid", run, *sets), network)
        assert difference(run, tmp_path / "sound") == (0, 0)
        assert found["store"]["lookups"] == sound["store"]["lookups"]
        assert found["store"]["updates"] == sound["store"]["updates"]
        assert (found["lost_updates"], found["restarts"], found["staleness_max"]) == (0, {}, 0)
    assert network.kinds.keys() == ALL_KINDS


@pytest.mark.heavy
@pytest.mark.timeout(60 * MINUTES + RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_every_update_of_several_trainers_moves_its_rows_once(counting, network, rounds, strategy, transport):
    updates_per_step = 2 if strategy == "asynchronous" else 1  # of the mean over a share, or over both
    expected = moved(counting, np.full(RUN_STEPS, EPOCHS * updates_per_step))
    sets = [*RUN_ROLES, "strategy.staleness=3", f"strategy.transport={transport}"]
    for _, run in rounds():
        found, _ = ended(command(counting, strategy, run, *sets), network)
        rows = rows_of(run)
        assert rows.keys() == expected.keys()
        assert [key for key, value in expected.items() if (rows[key] != value).any()] == []
        assert found["num_examples"] == EPOCHS * RUN_STEPS * SIZE
        assert (found["lost_updates"], found["restarts"]) == (0, {})
        assert found["staleness_max"] <= 3


@pytest.mark.heavy
@pytest.mark.timeout(60 * MINUTES + RUN_S + 60)
@pytest.mark.parametrize("transport", ["shared", "tcp"])
def test_updates_that_a_killed_trainer_loses_are_counted_exactly(counting, network, rounds, transport):
    """Against journals of the servers: what was read and never ended is lost, and rows are the sum of what was applied."""
    sets = [
        *RUN_ROLES,
        "strategy.staleness=3",
        f"strategy.transport={transport}",
        "checkpoint.every_steps=10",
    ]
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
    times = np.zeros(RUN_STEPS)
    for what, *words in journal:
        if what == "applied":
            times[(int(words[0]) - 1) % RUN_STEPS] += 1
    return times
