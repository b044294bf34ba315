"""Trainers that are killed: all of them go on from the last checkpoint, and the run ends as if nothing had been."""

import json
import os
import random
import re
import signal
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import END_S
from scenes import SIZE, write

from runs import difference, train

pytestmark = pytest.mark.slow

ROLES = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
STEPS = 400
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5"]
TWO = ["strategy.trainers=2", *SHORT]
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("reload"), num_examples=1601, held_out=1001)


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


def kill(running, rank, happened, life=0, role="trainer", but=None):
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


def ended(running, restarts=1, role="trainer", within_s=END_S, steps_in_all=STEPS):
    """The summary, once the run came to its end."""
    told = running.error = running.ends(0, within_s)
    assert told.count("all trainers go on from") == restarts, told
    assert "Traceback" not in told
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


@pytest.fixture(scope="module")
def ever_new(directory):
    """Overrides for data in which each example has a user of its own, so that the number of rows tells what was read."""
    table = pq.read_table(directory / "train.parquet")
    table = pa.concat_tables([table] * (STEPS * SIZE // len(table) + 2)).combine_chunks()
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
def test_rows_of_servers_stay_as_they_are(begin, ever_new, strategy, rank):
    more = [f"train.max_steps={STEPS // 2}", "checkpoint.every_steps=40", "checkpoint.keep=9"]
    running = begin(strategy, *TWO, *ROLES, *ever_new, *more)
    kill(running, rank, lambda: has_saved(running, 1)() and passed(running, 60)())
    killed_at = records_of(running)[-1]
    summary = ended(running, steps_in_all=STEPS // 2)
    first = next(each for each in records_of(running) if each["step"] > came_back_to(running))
    assert first["step"] <= killed_at["step"]
    assert first["rows"] >= killed_at["rows"]
    assert summary["steps"] == STEPS // 2
    assert summary["lost_updates"] <= 2 * (4 + 1)
    assert summary["staleness_max"] <= 4


@heavy
@pytest.mark.parametrize("rank", [0, 1])
def test_trainers_of_groups_come_back_too(begin, rank):
    groups = ["strategy.groups=2", "strategy.nets=2", "strategy.average_every_steps=2"]
    running = begin("hierarchical", *SHORT, *groups, "checkpoint.every_steps=40")
    kill(running, rank, has_saved(running))
    assert ended(running)["steps"] == STEPS


@heavy
def test_without_a_checkpoint_all_begins_anew_rows_too(begin, ever_new):
    running = begin("hybrid", *TWO, *ROLES, *ever_new)
    kill(running, 1, passed(running, 40))
    killed_at = records_of(running)[-1]
    ended(running)
    first = records_of(running)[0]
    assert first["step"] == 5
    assert first["rows"] < killed_at["rows"]


def came_back_to(running):
    """The step of the checkpoint from which trainers went on, as the launcher told."""
    return int(re.search(r"all trainers go on from step-(\d+)", running.error)[1])


@heavy
@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_a_trainer_comes_back_as_often_as_it_may(begin, strategy):
    running = begin(
        strategy, *TWO, "train.max_steps=1000000", "checkpoint.every_steps=20", "cluster.max_restarts=1"
    )
    kill(running, 1, has_saved(running))
    kill(running, 0, has_saved(running), life=1)
    kill(running, 1, has_saved(running), life=2)
    told = running.ends(1)
    assert told.count("all trainers go on from") == 2
    assert "trainer 1 was killed by signal 9; go on from step-" in told


GROUPS = ["strategy.groups=2", "strategy.average_every_steps=2", "checkpoint.every_steps=40"]
LOST_TO_ALL = [
    pytest.param("group-server", ["strategy.servers_per_group=2", "checkpoint.every_steps=40"], marks=heavy),
    pytest.param("group-server", [*GROUPS, "strategy.servers_per_group=1"], marks=heavy),
    pytest.param("dense-server", GROUPS, marks=heavy),
    pytest.param("embedding-server", GROUPS, marks=heavy),
    pytest.param("embedding-worker", GROUPS, marks=heavy),
]


@pytest.mark.parametrize(("role", "options"), LOST_TO_ALL)
def test_all_trainers_begin_anew_for_a_role_of_groups(begin, role, options):
    running = begin("hierarchical", *SHORT, *options)
    kill(running, 0, has_saved(running), role=role)
    assert ended(running, role=role, within_s=5 * END_S)["steps"] == STEPS


ONE_GROUP = ["strategy.trainers_per_group=2", "strategy.servers_per_group=2", "checkpoint.every_steps=40"]
APART = 0.03
"""AUC by which two runs may differ; trainers of a group share no step, so that no run is like another."""


@heavy
@pytest.mark.parametrize(
    "role", ["trainer", "loader", "embedding-server", "embedding-worker", "group-server"]
)
def test_a_group_learns_as_much_after_a_death(begin, undisturbed, role):
    whole = undisturbed("hierarchical", *SHORT, *ONE_GROUP)
    running = begin("hierarchical", *SHORT, *ONE_GROUP)
    kill(running, 0, has_saved(running), role=role)
    told = running.ends(0, 5 * END_S)
    alone = role == "loader"  # others have nothing of what it had
    assert (told.count("it came back"), told.count("all trainers go on from")) == (alone, not alone), told
    summary, expected = (json.loads((run / "summary.json").read_text()) for run in (running.run, whole))
    assert (summary["steps"], summary["restarts"]) == (STEPS, {role: 1})
    assert expected["restarts"] == {}
    assert expected["auc"] > 0.55
    assert summary["auc"] == pytest.approx(expected["auc"], abs=APART)


@heavy
@pytest.mark.parametrize("seed", range(20))
def test_a_role_of_groups_at_any_moment(begin, seed):
    moments = random.Random(seed)
    role = ("group-server", "dense-server")[seed % 2]
    running = begin("hierarchical", *SHORT, *GROUPS, "strategy.servers_per_group=1")
    running.until_it_trains()
    time.sleep(moments.random())
    kill(running, moments.randrange(2) if role == "group-server" else 0, lambda: True, role=role)
    assert ended(running, role=role, within_s=5 * END_S)["steps"] == STEPS


@heavy
def test_loaders_of_groups_come_back_alone(begin):
    running = begin("hierarchical", *SHORT, *GROUPS, "strategy.nets=2")
    kill(running, 0, has_saved(running), role="loader")
    told = running.ends(0)
    assert told.count("it came back") == 1, told
    summary = json.loads((running.run / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (STEPS, {"loader": 1})


@heavy
def test_a_loader_that_dies_just_before_a_trainer_is_counted_too(begin):
    running = begin("hierarchical", *SHORT, *GROUPS, "cluster.max_restarts=1")
    kill(running, 0, has_saved(running), role="loader")
    kill(running, 1, lambda: True)
    told = running.ends(0, 5 * END_S)
    assert told.count("all trainers go on from") == 1, told
    summary = json.loads((running.run / "summary.json").read_text())
    assert (summary["steps"], summary["restarts"]) == (STEPS, {"loader": 1, "trainer": 1})


@heavy
def test_a_group_server_that_dies_too_often_ends_the_run(begin):
    endless = ["train.max_steps=1000000", "cluster.max_restarts=1"]
    running = begin(
        "hierarchical", *SHORT, "strategy.servers_per_group=2", "checkpoint.every_steps=40", *endless
    )
    first = kill(running, 1, has_saved(running), role="group-server")
    kill(running, 1, has_saved(running), role="group-server", but=first)
    told = running.ends(1)
    assert told.count("all trainers go on from") == 1
    assert "group-server 1 was killed by signal 9" in told
    assert "at most cluster.max_restarts = 1 times" in told
