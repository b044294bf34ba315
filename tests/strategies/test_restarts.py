"""Processes that are killed come back: roles beside the trainers alone, trainers all together from the last checkpoint, at any moment."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import BEGIN_S, END_S, process_of, processes_of
from scenes import SIZE, play_all, write

import girih
from girih.cluster.roles import RestartPolicy
from girih.sparse.options import StoreOptions
from runs import difference, train

pytestmark = pytest.mark.slow
SERVERS = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
STEPS = 300
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", *SERVERS]
TWO = ["strategy.trainers=2", *SHORT]
ROLE, WORKER = "embedding-server", "embedding-worker"
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("restarts"), num_examples=1601, held_out=1001)


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
    reported = running.ends(0)
    assert reported.count("it came back") == restarts, reported
    assert "Traceback" not in reported
    assert all(0 < int(share) <= 100 for share in re.findall(r"(-?\d+)% of the ids", reported))
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == ({role: restarts} if restarts else {})
    assert summary["steps"] == STEPS
    assert summary["lost_updates"] == 0
    return summary, re.findall(r"id (-?\d+) of '(\w+)'", reported)


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
def test_servers_are_killed_at_any_moment(begin, undisturbed, seed):
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
def test_a_server_is_killed_with_batches_read_ahead(begin, strategy, seed):
    running = begin(strategy, *TWO, "strategy.staleness=3", "strategy.transport=tcp")
    kill(running, seed % 2, after_s=random.Random(seed).random() / 2)
    summary, _ = ended(running, 1)
    assert summary["staleness_max"] <= 3


@heavy
def test_a_server_of_a_single_trainer_restarts(begin):
    running = begin("asynchronous", *SHORT)
    kill(running, 1)
    ended(running, 1)


@heavy
def test_a_server_is_killed_again_while_it_restarts(begin, undisturbed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    running.until_it_trains()
    before = {process.name for process in processes_of(running.mark)}
    kill(running, 0)
    while not (again := {process.name for process in processes_of(running.mark)} - before):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(int(again.pop()), signal.SIGKILL)
    reported = running.ends(0)
    assert "restart 2 of at most 3" in reported
    assert json.loads((running.run / "summary.json").read_text())["restarts"] == {ROLE: 2}
    if " of '" not in reported:
        assert difference(running.run, undisturbed) == (0, 0)


@heavy
def test_a_stopped_process_is_waited_for(begin, undisturbed):
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
def test_a_process_that_dies_too_often_ends_the_run(begin):
    running = begin("hybrid", *LONG, "cluster.max_restarts=1")
    kill(running, 1)
    kill(running, 1, life=1)
    reported = running.ends(1)
    assert "embedding-server 1 was killed by signal 9" in reported
    assert "it had restarted 1 time, and cluster.max_restarts = 1" in reported


@heavy
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["store.arena=heap"], "only arena = 'shared' is kept"),
        (["strategy.staleness=88"], "strategy.staleness = 87, not 88"),
        (['store.tiers=["dram","ssd"]', "store.hot_rows=100"], "only tiers = ['dram'] is kept"),
    ],
)
def test_a_run_without_restarts_names_the_option_that_would_allow_them(begin, change, why):
    running = begin("hybrid", *LONG, *change)
    kill(running, 0)
    reported = running.ends(1)
    assert "embedding-server 0 was killed by signal 9" in reported
    assert why in reported


def test_failure_policies_of_strategies():
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
def test_a_killed_loader_goes_on_after_the_last_share_of_each_trainer(begin, undisturbed):
    running = begin("hybrid", *ONE_LOADER, "strategy.staleness=0")
    kill(running, 0, role="loader", after_s=random.Random(3).random() / 4)
    ended(running, 1, "loader")
    assert difference(running.run, undisturbed) == (0, 0)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_loaders_are_killed_at_any_moment(begin, undisturbed, seed):
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
def test_workers_are_killed_at_any_moment(begin, undisturbed, seed):
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
def test_loaders_and_workers_are_killed_with_batches_read_ahead(begin, strategy, role, seed):
    running = begin(strategy, *TWO, "strategy.staleness=3", "strategy.transport=tcp")
    kill(running, 0, role=role, after_s=random.Random(seed).random())
    summary, _ = ended(running, 1, role)
    assert summary["staleness_max"] <= 3


@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=heavy) for seed in range(6))])
def test_all_roles_are_killed_at_once(begin, undisturbed, seed):
    running = begin("hybrid", *TWO, "strategy.staleness=0")
    running.until_it_trains()
    roles = [(ROLE, seed % 2), (WORKER, seed // 2 % 2), ("loader", 0)]
    time.sleep(random.Random(seed).random())
    for pid in [life_of(running, index, role)["pid"] for role, index in roles]:
        os.kill(pid, signal.SIGKILL)
    reported = running.ends(0, within_s=120)  # three processes start, on cores that others may have
    assert reported.count("it came back") == 3
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {role: 1 for role, _ in roles}
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)
    if " of '" not in reported:
        assert difference(running.run, undisturbed) == (0, 0)


TRAINER_STEPS = 400
TRAINERS_SHORT = [f"train.max_steps={TRAINER_STEPS}", "train.epochs=1000000", "train.log_every_steps=5"]
TRAINERS_TWO = ["strategy.trainers=2", *TRAINERS_SHORT]


@pytest.fixture(scope="module")
def undisturbed_run(directory):
    """Trains by a strategy with overrides, once; returns the run's directory."""
    runs = {}

    def run_of(strategy, *overrides):
        key = (strategy, *overrides)
        if key not in runs:
            runs[key] = directory / f"undisturbed-{len(runs)}"
            train(directory, strategy, runs[key], *overrides)
        return runs[key]

    return run_of


def kill_trainer(running, rank, happened, life=0, role="trainer", but=None):
    """Kills a trainer once something happened, in this life of the trainers, or another role ``but`` the process that was killed before."""
    file = running.run / "processes.json"
    while True:
        if running.process.poll() is not None:
            pytest.fail(running.process.communicate()[1])
        processes = json.loads(file.read_text()) if file.exists() else []
        sought = {"role": role, "index": rank, "incarnation": life}
        found = [each["pid"] for each in processes if sought.items() <= each.items() and each["pid"] != but]
        if found and happened():
            os.kill(found[0], signal.SIGKILL)
            return found[0]
        time.sleep(0.01)


def checkpoints_of(running):
    return list((running.run / "checkpoints").glob("step-*"))


def has_saved(running, number=2):
    """Whether a few checkpoints are there, the first of which may be gone."""
    return lambda: len(checkpoints_of(running)) >= number


def is_saving(running):
    """Whether a checkpoint is being written, beside one that is complete."""
    return lambda: checkpoints_of(running) and list((running.run / "checkpoints").glob(".writing-*"))


def ended_after_trainers(running, restarts=1, role="trainer", within_s=END_S, steps_in_all=TRAINER_STEPS):
    """The summary, once the run came to its end."""
    reported = running.error = running.ends(0, within_s)
    assert reported.count("all trainers go on from") == restarts, reported
    assert "Traceback" not in reported
    assert not (running.run / "processes.json").exists()
    steps = [json.loads(line)["step"] for line in (running.run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    assert steps[-1] == steps_in_all
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {role: restarts}
    return summary


MOMENTS = [
    pytest.param("synchronous", 1, "checkpoint.every_steps=20", has_saved, marks=heavy),
    pytest.param("synchronous", 0, "checkpoint.every_steps=20", has_saved, marks=heavy),
    pytest.param("synchronous", 0, "checkpoint.every_steps=1", is_saving, marks=heavy),
    pytest.param("synchronous", 1, "checkpoint.every_steps=1", is_saving, marks=heavy),
    pytest.param("substitution", 1, "checkpoint.every_steps=20", has_saved, marks=heavy),
    pytest.param("substitution", 0, "checkpoint.every_steps=20", has_saved, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "rank", "every", "happened"), MOMENTS)
def test_killed_trainers_with_rows_equal_an_undisturbed_run(
    begin, undisturbed_run, strategy, rank, every, happened
):
    whole = undisturbed_run(strategy, *TRAINERS_TWO)
    running = begin(strategy, *TRAINERS_TWO, every)
    kill_trainer(running, rank, happened(running))
    summary = ended_after_trainers(running)
    assert summary["steps"] == TRAINER_STEPS
    assert summary["lost_updates"] == 0
    assert difference(running.run, whole) == (0, 0)


@heavy
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_is_killed_during_an_evaluation(begin, undisturbed_run, rank):
    often = "train.evaluate_every_steps=2"
    running = begin("synchronous", *TRAINERS_TWO, "checkpoint.every_steps=20", often)
    kill_trainer(running, rank, has_saved(running))
    ended_after_trainers(running)
    assert difference(running.run, undisturbed_run("synchronous", *TRAINERS_TWO)) == (0, 0)


@pytest.fixture(scope="module")
def ever_new(directory):
    """Overrides for data in which each example has a user of its own, so that the number of rows tells what was read."""
    table = pq.read_table(directory / "train.parquet")
    table = pa.concat_tables([table] * (TRAINER_STEPS * SIZE // len(table) + 2)).combine_chunks()
    users = pa.array(range(len(table)), pa.int64())
    table = table.set_column(table.column_names.index("user"), "user", users)
    pq.write_table(table, directory / "ever-new.parquet")
    return [f"data.train={directory}/ever-new.parquet"]


def records_of(running):
    return [json.loads(line) for line in (running.run / "metrics.jsonl").read_text().splitlines()]


def passed(running, step):
    """Whether so many steps are recorded, and the first checkpoint is complete if there is to be one by then."""

    def happened():
        records = records_of(running) if (running.run / "metrics.jsonl").exists() else []
        return bool(records) and records[-1]["step"] >= step

    return happened


SERVED = [
    ("hybrid", 1),
    pytest.param("hybrid", 0, marks=heavy),
    pytest.param("asynchronous", 1, marks=heavy),
    pytest.param("asynchronous", 0, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "rank"), SERVED)
def test_rows_of_servers_survive_killed_trainers(begin, ever_new, strategy, rank):
    more = [f"train.max_steps={TRAINER_STEPS // 2}", "checkpoint.every_steps=40", "checkpoint.keep=9"]
    running = begin(strategy, *TRAINERS_TWO, *SERVERS, *ever_new, *more)
    kill_trainer(running, rank, lambda: has_saved(running, 1)() and passed(running, 60)())
    killed_at = records_of(running)[-1]
    summary = ended_after_trainers(running, steps_in_all=TRAINER_STEPS // 2)
    first = next(each for each in records_of(running) if each["step"] > came_back_to(running))
    assert first["step"] <= killed_at["step"]
    assert first["rows"] >= killed_at["rows"]
    assert summary["steps"] == TRAINER_STEPS // 2
    assert summary["lost_updates"] <= 2 * (4 + 1)
    assert summary["staleness_max"] <= 4


@heavy
@pytest.mark.parametrize("rank", [0, 1])
def test_trainers_of_groups_restart(begin, rank):
    groups = ["strategy.groups=2", "strategy.nets=2", "strategy.average_every_steps=2"]
    running = begin("hierarchical", *TRAINERS_SHORT, *groups, "checkpoint.every_steps=40")
    kill_trainer(running, rank, has_saved(running))
    assert ended_after_trainers(running)["steps"] == TRAINER_STEPS


@heavy
def test_without_a_checkpoint_trainers_and_rows_start_again(begin, ever_new):
    running = begin("hybrid", *TRAINERS_TWO, *SERVERS, *ever_new)
    kill_trainer(running, 1, passed(running, 40))
    killed_at = records_of(running)[-1]
    ended_after_trainers(running)
    first = records_of(running)[0]
    assert first["step"] == 5
    assert first["rows"] < killed_at["rows"]


def came_back_to(running):
    """The step of the checkpoint from which trainers went on, as the launcher reported."""
    return int(re.search(r"all trainers go on from step-(\d+)", running.error)[1])


@heavy
@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_trainers_restart_at_most_as_often_as_allowed(begin, strategy):
    running = begin(
        strategy,
        *TRAINERS_TWO,
        "train.max_steps=1000000",
        "checkpoint.every_steps=20",
        "cluster.max_restarts=1",
    )
    kill_trainer(running, 1, has_saved(running))
    kill_trainer(running, 0, has_saved(running), life=1)
    kill_trainer(running, 1, has_saved(running), life=2)
    reported = running.ends(1)
    assert reported.count("all trainers go on from") == 2
    assert "trainer 1 was killed by signal 9; go on from step-" in reported


GROUPS = ["strategy.groups=2", "strategy.average_every_steps=2", "checkpoint.every_steps=40"]
LOST_TO_ALL = [
    pytest.param("group-server", ["strategy.servers_per_group=2", "checkpoint.every_steps=40"], marks=heavy),
    pytest.param("group-server", [*GROUPS, "strategy.servers_per_group=1"], marks=heavy),
    pytest.param("dense-server", GROUPS, marks=heavy),
    pytest.param("embedding-server", GROUPS, marks=heavy),
    pytest.param("embedding-worker", GROUPS, marks=heavy),
]


@pytest.mark.parametrize(("role", "options"), LOST_TO_ALL)
def test_all_trainers_restart_with_a_role_of_groups(begin, role, options):
    running = begin("hierarchical", *TRAINERS_SHORT, *options)
    kill_trainer(running, 0, has_saved(running), role=role)
    assert ended_after_trainers(running, role=role, within_s=5 * END_S)["steps"] == TRAINER_STEPS


ONE_GROUP = ["strategy.trainers_per_group=2", "strategy.servers_per_group=2", "checkpoint.every_steps=40"]
APART = 0.03
"""AUC by which two runs may differ; trainers of a group share no step, so that no run is like another."""


@heavy
@pytest.mark.parametrize(
    "role", ["trainer", "loader", "embedding-server", "embedding-worker", "group-server"]
)
def test_a_group_learns_as_much_after_a_killed_process(begin, undisturbed_run, role):
    whole = undisturbed_run("hierarchical", *TRAINERS_SHORT, *ONE_GROUP)
    running = begin("hierarchical", *TRAINERS_SHORT, *ONE_GROUP)
    kill_trainer(running, 0, has_saved(running), role=role)
    reported = running.ends(0, 5 * END_S)
    alone = role == "loader"  # others have nothing of what it had
    assert (reported.count("it came back"), reported.count("all trainers go on from")) == (
        alone,
        not alone,
    ), reported
    summary, expected = (json.loads((run / "summary.json").read_text()) for run in (running.run, whole))
    assert (summary["steps"], summary["restarts"]) == (TRAINER_STEPS, {role: 1})
    assert expected["restarts"] == {}
    assert expected["auc"] > 0.55
    assert summary["auc"] == pytest.approx(expected["auc"], abs=APART)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_servers_of_groups_are_killed_at_any_moment(begin, seed):
    moments = random.Random(seed)
    role = ("group-server", "dense-server")[seed % 2]
    running = begin("hierarchical", *TRAINERS_SHORT, *GROUPS, "strategy.servers_per_group=1")
    running.until_it_trains()
    time.sleep(moments.random())
    kill_trainer(running, moments.randrange(2) if role == "group-server" else 0, lambda: True, role=role)
    assert ended_after_trainers(running, role=role, within_s=5 * END_S)["steps"] == TRAINER_STEPS


@heavy
def test_loaders_of_groups_restart_alone(begin):
    running = begin("hierarchical", *TRAINERS_SHORT, *GROUPS, "strategy.nets=2")
    kill_trainer(running, 0, has_saved(running), role="loader")
    reported = running.ends(0)
    assert reported.count("it came back") == 1, reported
    summary = json.loads((running.run / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (TRAINER_STEPS, {"loader": 1})


@heavy
def test_a_loader_killed_just_before_a_trainer_is_counted(begin):
    running = begin("hierarchical", *TRAINERS_SHORT, *GROUPS, "cluster.max_restarts=1")
    kill_trainer(running, 0, has_saved(running), role="loader")
    kill_trainer(running, 1, lambda: True)
    reported = running.ends(0, 5 * END_S)
    assert reported.count("all trainers go on from") == 1, reported
    summary = json.loads((running.run / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (TRAINER_STEPS, {"loader": 1, "trainer": 1})


@heavy
def test_a_group_server_that_dies_too_often_ends_the_run(begin):
    endless = ["train.max_steps=1000000", "cluster.max_restarts=1"]
    running = begin(
        "hierarchical", *TRAINERS_SHORT, "strategy.servers_per_group=2", "checkpoint.every_steps=40", *endless
    )
    first = kill_trainer(running, 1, has_saved(running), role="group-server")
    kill_trainer(running, 1, has_saved(running), role="group-server", but=first)
    reported = running.ends(1)
    assert reported.count("all trainers go on from") == 1
    assert "group-server 1 was killed by signal 9" in reported
    assert "at most cluster.max_restarts = 1 times" in reported


START_STEPS = 20
START_SHORT = [f"train.max_steps={START_STEPS}", "train.epochs=1000000", "train.log_every_steps=5"]
START_SERVED = ["strategy.trainers=2", "strategy.embedding_servers=2"]
GROUPED = ["strategy.groups=2", "strategy.servers_per_group=1"]


@pytest.fixture(scope="module")
def undisturbed_start(directory):
    """The runs without a death whose results are promised."""
    exact = {"hybrid": [*START_SERVED, "strategy.staleness=0"], "synchronous": ["strategy.trainers=2"]}
    exact["substitution"] = exact["synchronous"]
    scenes = [
        {"name": f"undisturbed-{name}", "strategy": name, "overrides": [*START_SHORT, *words]}
        for name, words in exact.items()
    ]
    play_all(directory, scenes, 2)
    return lambda name: directory / f"undisturbed-{name}" if name in exact else None


def has_imported(pid, name):
    """Whether a process has a library in its memory by now."""
    with open(f"/proc/{pid}/maps") as file:
        return name in file.read()


def kill_at(running, role, index, moment):
    """Kills a process as it is there, imports numpy, or so many seconds after it was there."""
    until = time.monotonic() + BEGIN_S
    while (pid := process_of(running, role, index)) is None:
        assert time.monotonic() < until, running.abort()
        time.sleep(0.005)
    if isinstance(moment, float):
        time.sleep(moment)
    while moment == "imports" and not has_imported(pid, "numpy"):
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


START_KILLED = [
    ("hybrid", [*START_SERVED, "strategy.staleness=0"], "embedding-server", 1),
    ("hybrid", [*START_SERVED, "strategy.staleness=0"], "embedding-worker", 0),
    ("hybrid", [*START_SERVED, "strategy.staleness=0"], "loader", 0),
    ("hybrid", [*START_SERVED, "strategy.staleness=0"], "trainer", 1),
    ("asynchronous", START_SERVED, "embedding-server", 0),
    ("hierarchical", GROUPED, "group-server", 1),
    ("hierarchical", GROUPED, "dense-server", 0),
    ("hierarchical", GROUPED, "embedding-server", 0),
    ("hybrid", ["strategy.embedding_servers=2", "strategy.staleness=0"], "embedding-server", 0),
    ("synchronous", ["strategy.trainers=2"], "trainer", 1),
    ("substitution", ["strategy.trainers=2"], "trainer", 0),
]
QUICK = {(0, "imports")}
START_MOMENTS = ["there", "imports", 1.0, 2.5]


@pytest.mark.parametrize(
    ("strategy", "words", "role", "index", "moment"),
    [
        pytest.param(*case, moment, marks=[] if (number, moment) in QUICK else heavy)
        for number, case in enumerate(START_KILLED)
        for moment in START_MOMENTS
    ],
)
def test_a_process_killed_while_roles_start_restarts(
    begin, undisturbed_start, strategy, words, role, index, moment
):
    running = begin(strategy, *words, *START_SHORT)
    kill_at(running, role, index, moment)
    reported = running.ends(0)
    assert "Traceback" not in reported
    assert f"{role} {index} was killed by signal 9" in reported
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {role: 1}
    assert summary["lost_updates"] == 0
    if (whole := undisturbed_start(strategy)) and "strategy.trainers=2" in words:
        assert difference(running.run, whole) == (0, 0)


@pytest.mark.parametrize(
    ("strategy", "words", "after_s"),
    [
        pytest.param(strategy, words, after_s, marks=[] if (strategy, after_s) == ("hybrid", 1.5) else heavy)
        for strategy, words in {
            "hybrid": START_SERVED,
            "synchronous": START_SERVED[:1],
            "hierarchical": GROUPED,
        }.items()
        for after_s in (0.3, 0.7, 1.5, 3.0, 6.0)
    ],
)
def test_all_processes_end_within_ten_seconds_of_the_launcher(begin, strategy, words, after_s):
    """On a busy machine: twice as many processes compute as there are cores."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        running = begin(strategy, *words, *START_SHORT)
        time.sleep(after_s * (1 + random.Random(after_s).random() / 4))
        running.process.kill()
        running.process.wait()
        killed_s = time.monotonic()
        while processes_of(running.mark) and time.monotonic() < killed_s + 10:
            time.sleep(0.05)
        left = [(each / "cmdline").read_bytes() for each in processes_of(running.mark)]
        assert not left
        running.leaves_nothing()
    finally:
        for other in others:
            other.kill()
            other.wait()
