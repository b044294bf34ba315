"""Starts and ends of runs of real processes: signals, killed processes, bad data. Nothing is left of a run, and errors are reported."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import BEGIN_S, Running, process_of
from scenes import play, play_all, write

from runs import command, difference, latest, train

pytestmark = pytest.mark.slow
TWO_SERVERS = ["strategy.trainers=2", "strategy.embedding_servers=2"]
SOON_S = 10  # two on an idle machine


def wait_for(running, condition):
    until = time.monotonic() + BEGIN_S
    while not (found := condition()):
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < until, running.abort()
        time.sleep(0.005)
    return found


def has_begun(running):
    """Whether a process loads what it needs: numpy, or torch."""
    maps = Path("/proc", str(running.process.pid), "maps").read_text()
    return "numpy" in maps or "torch" in maps


def ended_by_signal(running, started_s):
    reported = running.ends(130)
    took_s = time.monotonic() - started_s
    assert "Traceback" not in reported
    assert not (running.run / "processes.json").exists()
    assert took_s < SOON_S
    return reported


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        ("local", signal.SIGTERM),
        ("hybrid", signal.SIGINT),
        pytest.param("local", signal.SIGINT, marks=pytest.mark.heavy),
        pytest.param("hybrid", signal.SIGTERM, marks=pytest.mark.heavy),
    ],
)
def test_a_signal_before_roles_start_ends_all_processes(begin, strategy, number):
    running = begin(strategy)
    wait_for(running, lambda: has_begun(running))
    running.process.send_signal(number)
    ended_by_signal(running, time.monotonic())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)])
def test_a_signal_while_roles_start_ends_all_processes(begin, number):
    running = begin("hybrid", *TWO_SERVERS)
    wait_for(running, lambda: process_of(running, "loader", 0))
    running.process.send_signal(number)
    ended_by_signal(running, time.monotonic())


@pytest.mark.parametrize(
    ("role", "index"),
    [
        ("trainer", 1),
        pytest.param("embedding-server", 1, marks=pytest.mark.heavy),
        pytest.param("loader", 0, marks=pytest.mark.heavy),
    ],
)
def test_a_process_that_dies_while_others_start_is_named(begin, role, index):
    running = begin("hybrid", *TWO_SERVERS, "cluster.max_restarts=0")
    os.kill(wait_for(running, lambda: process_of(running, role, index)), signal.SIGKILL)
    reported = running.ends(
        1
    ).splitlines()  # twice where the machine is so busy that the launcher tells it too
    why = (
        ""
        if role == "trainer"
        else "a process that has not begun is restarted at most cluster.max_restarts = 0 times; "
    )
    way_on = "there is no checkpoint yet: give the same command again"
    assert set(reported) == {f"girih: {role} {index} was killed by signal 9; {why}{way_on}"}


TWO = ["strategy.trainers=2"]
ROLES = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
LONG = ["train.epochs=1000000", "train.log_every_steps=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("endings"), num_examples=1601)


heavy = pytest.mark.heavy
SIGNALS = [
    ("hybrid", [*TWO, *ROLES], signal.SIGINT),
    pytest.param("asynchronous", TWO, signal.SIGTERM, marks=heavy),
    pytest.param("synchronous", TWO, signal.SIGTERM, marks=heavy),
    pytest.param("substitution", TWO, signal.SIGTERM, marks=heavy),
    pytest.param("hybrid", [], signal.SIGTERM, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "counts", "number"), SIGNALS)
def test_a_run_resumes_from_the_checkpoint_of_a_signal(directory, begin, strategy, counts, number):
    running = begin(strategy, *counts, *LONG)
    running.until_it_trains()
    running.process.send_signal(number)
    assert "go on with" in running.ends(130)
    assert not {"processes.json", "live", "targets"} & set(os.listdir(running.run))
    stopped_at = int(latest(running.run).name.removeprefix("step-"))
    scene = {"name": "gone-on", "strategy": strategy, "load": running.run}
    scene["overrides"] = [*counts, *LONG, f"train.max_steps={stopped_at + 3}"]
    summary = play_all(directory, [scene], 2)["gone-on"] if TWO[0] in counts else play(directory, scene)
    assert summary["steps"] == stopped_at + 3


@heavy
def test_ctrl_c_in_a_terminal_while_trainers_evaluate(begin):
    """It reaches the launcher and trainer 0, which have the terminal."""
    running = begin("hybrid", *TWO, *ROLES, *LONG, "train.evaluate_every_steps=1")
    running.until_it_trains()
    os.killpg(running.process.pid, signal.SIGINT)
    assert "go on with" in running.ends(130)
    assert latest(running.run)


NEVER = "cluster.max_restarts=0"  # else trainers come back, see test_restarts.py


# quick: a trainer under substitution, in test_substitution.py
KILLED = [
    pytest.param("hybrid", [*TWO, *ROLES, NEVER], "embedding-server", marks=heavy),
    pytest.param("hybrid", [*TWO, *ROLES, NEVER], "embedding-worker", marks=heavy),
    pytest.param("hybrid", [*TWO, *ROLES, NEVER, "strategy.transport=tcp"], "loader", marks=heavy),
    pytest.param("synchronous", [*TWO, NEVER], "trainer", marks=heavy),
    pytest.param("asynchronous", [*TWO, NEVER], "trainer 0", marks=heavy),  # which writes the run's files
    pytest.param("asynchronous", [NEVER], "embedding-server", marks=heavy),
    pytest.param("hierarchical", ["strategy.servers_per_group=2", NEVER], "group-server", marks=heavy),
    pytest.param(
        "hierarchical", ["strategy.groups=2", "strategy.dense_servers=2", NEVER], "dense-server", marks=heavy
    ),
]


@pytest.mark.parametrize(("strategy", "counts", "role"), KILLED)
def test_a_killed_process_ends_the_run_and_is_named(begin, strategy, counts, role):
    running = begin(strategy, *counts, *LONG, "checkpoint.every_steps=2")
    processes = running.until_it_trains()
    while not list((running.run / "checkpoints").glob("step-*")):
        assert running.process.poll() is None
        time.sleep(0.05)
    role, _, index = role.partition(" ")
    victim = [each for each in processes if each["role"] == role and index in ("", str(each["index"]))][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    reported = running.ends(1)
    assert f"{role} {victim['index']} was killed by signal 9" in reported
    assert f"with: girih train {running.run}/config.toml --run {running.run} --resume" in reported
    assert not (running.run / "processes.json").exists()
    assert "Traceback" not in reported


FIRST = [
    ("hybrid", [*TWO, *ROLES]),
    pytest.param("hybrid", [*TWO, "strategy.transport=tcp"], marks=heavy),
    pytest.param("synchronous", TWO, marks=heavy),
    pytest.param("asynchronous", TWO, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "counts"), FIRST)
def test_no_process_outlives_the_launcher(begin, strategy, counts):
    running = begin(strategy, *counts, *LONG)
    running.until_it_trains()
    running.process.kill()
    running.process.communicate()
    running.leaves_nothing(within_s=10)
    assert (
        running.run / "processes.json"
    ).exists()  # as docs/strategies.md says: nobody is left to remove it


@pytest.mark.parametrize("counts", [[], pytest.param(TWO, marks=heavy)])
def test_bad_data_in_a_loader_is_an_error_with_file_and_line(directory, begin, counts):
    text = (directory / "train.svm").read_text().splitlines()
    text[700] = "1 7:nonsense"
    (directory / "bad.svm").write_text("\n".join(text))
    words = command(directory, "hybrid", directory / f"bad-{len(counts)}", "data.train=bad.svm", *counts)
    words[words.index(str(directory / "config.toml"))] = str(directory / "weighted.toml")
    running = Running(words)
    reported = running.ends(2)
    assert "bad.svm" in reported
    assert "701" in reported
    assert "Traceback" not in reported
    assert len(reported.strip().splitlines()) <= 2


BAD_VALUES = [  # synchronous: the first trainer finds it as it standardizes; asynchronous: the loader, amid training
    ("synchronous", "x0", float("nan")),
    pytest.param("synchronous", "click", float("inf"), marks=heavy),
    pytest.param("asynchronous", "click", float("nan"), marks=heavy),
    pytest.param("hybrid", "x0", float("inf"), marks=heavy),
]


@pytest.mark.parametrize(("strategy", "column", "value"), BAD_VALUES)
def test_data_that_is_not_finite_is_refused_by_every_reader(directory, tmp_path, strategy, column, value):
    table = pq.read_table(directory / "train.parquet")
    values = table[column].to_pylist()
    values[1000] = value
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, pa.array(values, pa.float64())), tmp_path / "bad.parquet")
    running = Running(
        command(directory, strategy, tmp_path / "run", f"data.train={tmp_path}/bad.parquet", *TWO)
    )
    reported = running.ends(2)
    assert "bad.parquet" in reported
    assert f"row 1001 (row group 1): column '{column}' = {value}" in reported
    assert "Traceback" not in reported
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("trainers=0", "trainers = 0"),
        ("embedding_servers=1.5", "embedding_servers"),
        ("embedding_workers=true", "embedding_workers"),
        ('loaders="2"', "loaders"),
        ("staleness=-1", "staleness = -1"),
        ("trainres=2", "did you mean 'trainers'?"),
        ('transport="smoke"', "transport"),
        ("compress_ids=1", "compress_ids"),
    ],
)
def test_wrong_options_are_refused(directory, tmp_path, change, reported):
    from girih.cli import run

    words = command(directory, "hybrid", tmp_path / "run", f"strategy.{change}")[3:]
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("click.echo", lambda text="", **_: said.append(str(text)))
        assert run(words) == 2
    assert reported in said[-1]
    assert not (tmp_path / "run").exists()


def torchrun(*words):
    running = Running([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words])
    error = running.ends(0, within_s=150)
    assert "Traceback" not in error
    return running.output


def test_torchrun_starts_the_trainers_of_a_command(directory, tmp_path):
    short = ["train.max_steps=20"]
    torchrun("-m", "--", *command(directory, "synchronous", tmp_path / "run", *short)[2:])
    scene = {"name": "started-otherwise", "strategy": "synchronous", "overrides": short}
    other = play_all(directory, [scene], 2)[scene["name"]]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["trainers"] == other["trainers"] == 2
    assert difference(tmp_path / "run", directory / scene["name"]) == (0, 0)


SCRIPT = """
import os, sys, girih, torch
from girih import models

def main():
    schema = girih.Schema([girih.Categorical(name="user", dim=4), girih.Categorical(name="item", dim=4)], labels="click")
    data = girih.read_parquet(sys.argv[1] + "/train.parquet", schema, batch_size=32)
    strategies = [girih.Synchronous(trainers=2), girih.Hybrid(staleness=2), girih.Asynchronous()]
    for number, strategy in enumerate(strategies[: int(sys.argv[3])]):
        torch.manual_seed(0)
        with girih.Trainer(models.LR(schema), strategy=strategy, run=f"{sys.argv[2]}/{number}") as trainer:
            trainer.fit(data, epochs=1)
            auc = trainer.evaluate(data).first.auc
            with open(f"{sys.argv[2]}/{number}-{os.environ['RANK']}", "w") as file:
                file.write(repr(auc))

if __name__ == "__main__":
    main()
"""


@pytest.mark.heavy
def test_torchrun_starts_the_trainers_of_a_script_which_may_make_several(directory, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun(str(tmp_path / "script.py"), str(directory), str(tmp_path), "3")
    for number in range(3):
        one, two = ((tmp_path / f"{number}-{rank}").read_text() for rank in (0, 1))
        assert one == two  # all trainers learn the metrics
        assert float(one) > 0.55


def test_a_script_for_several_trainers_names_torchrun(directory):
    import girih
    from girih import models

    schema = girih.Schema([girih.Categorical(name="user", dim=4)], labels="click")
    with pytest.raises(girih.errors.ConfigError, match="torchrun --nproc-per-node=2"):
        girih.Trainer(models.DNN(schema, hidden=(4,)), strategy=girih.Synchronous(trainers=2))


@pytest.mark.heavy
def test_the_directory_of_a_live_run_is_refused(directory, begin):
    running = begin("hybrid", *TWO_SERVERS, *LONG)
    running.until_it_trains()
    host = os.uname().nodename
    for resume in (False, True):
        told = train(directory, "local", running.run, resume=resume, status=2)
        used = f"{running.run}: process {running.process.pid} on {host} is writing this run"
        assert told == f"girih: {used}; wait for it or stop it\n"
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    running.ends(130)
