"""Processes beside the trainers that are killed come back, and training goes on as if nothing had been."""

import json
import os
import random
import re
import signal
import time

import pytest
from running import processes_of
from scenes import play_all, write

import girih
from girih.cluster.roles import RestartPolicy
from girih.sparse.options import StoreOptions
from runs import difference

pytestmark = pytest.mark.slow

SERVERS = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
STEPS = 300
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", *SERVERS]
TWO = ["strategy.trainers=2", *SHORT]
ROLE, WORKER = "embedding-server", "embedding-worker"
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("come-back"), num_examples=1601)


@pytest.fixture(scope="module")
def undisturbed(directory):
    """The run without a death, at τ = 0, whose every step sees all before it."""
    scene = {"name": "undisturbed", "strategy": "hybrid", "overrides": [*TWO, "strategy.staleness=0"]}
    play_all(directory, [scene], 2)
    return directory / "undisturbed"


def life_of(running, index, role=ROLE):
    """A process's entry of ``processes.json``; None while there is none."""
    file = running.run / "processes.json"
    processes = json.loads(file.read_text()) if file.exists() else []
    return next((each for each in processes if (each["role"], each["index"]) == (role, index)), None)


def kill(running, index, life=0, after_s=0.0, role=ROLE):
    """Kills a process in a life of it, so long after it began to listen, or training to go on."""
    if life == 0:
        running.until_it_trains()
    while (found := life_of(running, index, role)) is None or found["incarnation"] < life:
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(found["pid"], signal.SIGKILL)


def ended(running, restarts, role=ROLE):
    """The summary, and (table, id) of torn rows."""
    told = running.ends(0)
    assert told.count("it came back") == restarts, told
    assert "Traceback" not in told
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == ({role: restarts} if restarts else {})
    assert summary["steps"] == STEPS
    assert summary["lost_updates"] == 0
    return summary, re.findall(r"id (-?\d+) of '(\w+)'", told)


@heavy
def test_a_server_that_is_killed_comes_back_bit_for_bit(begin, undisturbed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    kill(running, 0, after_s=random.Random(7).random() / 4)
    summary, torn = ended(running, 1)
    assert summary["staleness_max"] == 0
    if not torn:
        assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_at_any_moment(begin, undisturbed, seed):
    """Both servers, one soon after the other, amid steps, evaluations and checkpoints."""
    moments = random.Random(seed)
    often = ["checkpoint.every_steps=10"] if seed % 2 else []
    running = begin("hybrid", *TWO, *often, "strategy.staleness=0")
    kill(running, 0, after_s=moments.random() / 2)
    kill(running, 1, after_s=moments.random() / 10)
    _, torn = ended(running, 2)
    if not torn:
        assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
@pytest.mark.parametrize("seed", range(3))
def test_with_batches_read_ahead(begin, strategy, seed):
    running = begin(strategy, *TWO, "strategy.staleness=3", "strategy.transport=tcp")
    kill(running, seed % 2, after_s=random.Random(seed).random() / 2)
    summary, _ = ended(running, 1)
    assert summary["staleness_max"] <= 3


@heavy
def test_under_one_trainer_which_starts_the_servers_itself(begin):
    running = begin("asynchronous", *SHORT)
    kill(running, 1)
    ended(running, 1)


@heavy
def test_a_second_kill_while_it_comes_back(begin, undisturbed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    running.until_it_trains()
    before = {process.name for process in processes_of(running.mark)}
    kill(running, 0)
    while not (again := {process.name for process in processes_of(running.mark)} - before):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(int(again.pop()), signal.SIGKILL)
    told = running.ends(0)
    assert "restart 2 of at most 3" in told
    assert json.loads((running.run / "summary.json").read_text())["restarts"] == {ROLE: 2}
    if " of '" not in told:
        assert difference(running.run, undisturbed) == (0, 0)


@heavy
def test_one_that_is_held_up_is_waited_for(begin, undisturbed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    running.until_it_trains()
    pid = life_of(running, 1)["pid"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)
    os.kill(pid, signal.SIGCONT)
    ended(running, 0)
    assert difference(running.run, undisturbed) == (0, 0)


LONG = ["train.epochs=1000000", "train.log_every_steps=2", "strategy.trainers=2", *SERVERS]


@heavy
def test_one_that_dies_too_often_ends_the_run(begin):
    running = begin("hybrid", *LONG, "cluster.max_restarts=1")
    kill(running, 1)
    kill(running, 1, life=1)
    told = running.ends(1)
    assert "embedding-server 1 was killed by signal 9" in told
    assert "it had come back 1 time, and cluster.max_restarts = 1" in told


@heavy
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["store.arena=heap"], "only arena = 'shared' is kept"),
        (["strategy.staleness=88"], "strategy.staleness = 87, not 88"),
        (['store.tiers=["dram","ssd"]', "store.hot_rows=100"], "only tiers = ['dram'] is kept"),
    ],
)
def test_a_run_that_cannot_bear_it_ends_and_says_which_option_would_change_that(begin, change, why):
    running = begin("hybrid", *LONG, *change)
    kill(running, 0)
    told = running.ends(1)
    assert "embedding-server 0 was killed by signal 9" in told
    assert why in told


def test_what_a_run_can_bear():
    kept, own = StoreOptions(), StoreOptions(arena="heap")
    assert girih.Hybrid(staleness=87).failure_policy(ROLE, kept, 1000).policy is RestartPolicy.RESTART
    assert girih.Asynchronous(staleness=43).failure_policy(ROLE, kept, 2).policy is RestartPolicy.RESTART
    tiered = StoreOptions(tiers=("dram", "ssd"), hot_rows=100)
    assert girih.Hybrid().failure_policy(WORKER, own, 1).policy is RestartPolicy.RESTART
    refused = [
        *(girih.Hybrid(staleness=88).failure_policy(role, kept, 1) for role in (ROLE, WORKER)),
        *(girih.Asynchronous(staleness=44).failure_policy(role, kept, 2) for role in (ROLE, WORKER)),
        *(girih.Asynchronous(staleness=0).failure_policy(role, kept, 89) for role in (ROLE, WORKER)),
        girih.Hybrid().failure_policy(ROLE, own, 1),
        girih.Hybrid().failure_policy(WORKER, tiered, 1),
    ]
    assert all(each.policy is RestartPolicy.END_RUN and each.why for each in refused)
    for strategy in (girih.Hybrid(staleness=88), girih.Asynchronous(), girih.Hierarchical()):
        assert strategy.failure_policy("loader", own, 89).policy is RestartPolicy.RESTART


ONE_LOADER = [*TWO]
TWO_LOADERS = [*ONE_LOADER, "strategy.loaders=2"]


@heavy
def test_a_loader_that_is_killed_goes_on_behind_the_last_share_of_each_trainer(begin, undisturbed):
    running = begin("hybrid", *ONE_LOADER, "strategy.staleness=0")
    kill(running, 0, role="loader", after_s=random.Random(3).random() / 4)
    ended(running, 1, "loader")
    assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_a_loader_at_any_moment(begin, undisturbed, seed):
    """Loaders of trainers in step, one of which may be killed again as it comes back; epochs end between."""
    moments = random.Random(seed)
    counts = TWO_LOADERS if seed % 2 else ONE_LOADER
    running = begin("hybrid", *counts, "strategy.staleness=0")
    kill(running, 0, role="loader", after_s=moments.random())
    if seed % 3 == 0:
        kill(running, 0, role="loader", life=1, after_s=moments.random() / 10)
    ended(running, 1 + (seed % 3 == 0), "loader")
    assert difference(running.run, undisturbed) == (0, 0)


@heavy
def test_a_worker_that_is_killed_comes_back_bit_for_bit(begin, undisturbed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    kill(running, 0, role=WORKER, after_s=random.Random(5).random() / 4)
    ended(running, 1, WORKER)
    assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_a_worker_at_any_moment(begin, undisturbed, seed):
    """Amid steps, evaluations and checkpoints; one of them may be killed again as it comes back, or the only one there is."""
    moments = random.Random(seed)
    often = ["checkpoint.every_steps=10"] if seed % 2 else ["train.evaluate_every_steps=20"]
    alone = ["strategy.embedding_workers=1"] if seed % 4 > 1 else []
    running = begin("hybrid", *TWO, *often, *alone, "strategy.staleness=0")
    kill(running, 0, role=WORKER, after_s=moments.random())
    if seed % 3 == 0:
        kill(running, 0, role=WORKER, life=1, after_s=moments.random() / 10)
    ended(running, 1 + (seed % 3 == 0), WORKER)
    assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
@pytest.mark.parametrize("role", ["loader", WORKER])
@pytest.mark.parametrize("seed", range(3))
def test_others_with_batches_read_ahead(begin, strategy, role, seed):
    running = begin(strategy, *TWO, "strategy.staleness=3", "strategy.transport=tcp")
    kill(running, 0, role=role, after_s=random.Random(seed).random())
    summary, _ = ended(running, 1, role)
    assert summary["staleness_max"] <= 3


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=heavy) for seed in range(6))])
def test_all_roles_at_once(begin, undisturbed, seed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    running.until_it_trains()
    roles = [(ROLE, seed % 2), (WORKER, seed // 2 % 2), ("loader", 0)]
    time.sleep(random.Random(seed).random())
    for pid in [life_of(running, index, role)["pid"] for role, index in roles]:
        os.kill(pid, signal.SIGKILL)
    told = running.ends(0, within_s=120)  # three processes start, on cores that others may have
    assert told.count("it came back") == 3
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {role: 1 for role, _ in roles}
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)
    if " of '" not in told:
        assert difference(running.run, undisturbed) == (0, 0)
