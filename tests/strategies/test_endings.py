"""How runs of real processes end: nothing is left of them, whatever ended them, and what went wrong is told."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scenes import write

from runs import command, difference, latest, train

BEGIN_S = 90
END_S = 30
TWO = ["strategy.trainers=2"]
ROLES = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
LONG = ["train.epochs=1000000", "train.log_every_steps=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("endings"), num_examples=1601)


class Running:
    """A run under way, and the traces of its processes, which others of the machine are not mixed up with."""

    def __init__(self, words):
        self.mark, self.names = f"GIRIH_TEST={uuid.uuid4().hex}", set()
        self.start_s, self.begun_s = time.monotonic(), 0.0
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self.mark),
            start_new_session=True,
        )
        self.run = Path(words[words.index("--run") + 1]) if "--run" in words else None

    def until_it_trains(self):
        while not (self.run / "metrics.jsonl").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < self.start_s + BEGIN_S, self.abort()
            time.sleep(0.05)
        self.begun_s = time.monotonic() - self.start_s
        self.names = names_of(processes_of(self.mark))
        return json.loads((self.run / "processes.json").read_text())

    def ends(self, status, within_s=END_S):
        """What was told, after it ended in time and left nothing.

        One that has yet to begin gets the time for that too, and one that began slowly (the machine is busy) as long again.
        """
        within_s += self.begun_s or BEGIN_S
        try:
            out, error = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {within_s:.0f} s: {self.abort()}")
        assert self.process.returncode == status, (out, error)
        self.leaves_nothing()
        self.told = out
        return error

    def abort(self):
        """Ends all processes; returns what each was doing."""
        kept = {}
        for process in sorted(processes_of(self.mark), key=lambda process: int(process.name)):
            title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            with suppress(OSError):
                kept[title] = (process / "fd" / "2").open("rb", 0)  # roles write to files without a name
                os.kill(int(process.name), signal.SIGABRT)
        _, error = self.process.communicate()
        for title, file in kept.items():
            with suppress(OSError), file:
                file.seek(0)
                error += f"\n{title}: {file.read().decode(errors='replace')}"
        return error

    def leaves_nothing(self, within_s=8):
        until = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left

    def left(self):
        sockets = Path("/proc/net/unix").read_text()
        names = {name for name in self.names if os.path.exists(name) or name in sockets}
        return names | {str(process) for process in processes_of(self.mark)}


def environment(mark):
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return kept | dict([mark.split("=")]) | {"PYTHONFAULTHANDLER": "1"}


def processes_of(mark):
    """Those that were started with a mark in their environment, and by them."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue
    return found


def names_of(processes):
    """Files in shared memory and sockets that some processes use, by name."""
    found, inodes = set(), set()
    for process in processes:
        for line in (process / "maps").read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(line[line.index("/dev/shm/") :].removesuffix(" (deleted)"))
        for file in (process / "fd").iterdir():
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[6] in inodes:
            found.add(words[7])
    return {name for name in found if "girih" in name}


@pytest.fixture
def begin(directory, tmp_path):
    started = []

    def begin(strategy, *overrides):
        started.append(Running(command(directory, strategy, tmp_path / "run", *overrides)))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


heavy = pytest.mark.heavy
SIGNALS = [
    ("hybrid", [*TWO, *ROLES], signal.SIGINT),
    pytest.param("asynchronous", TWO, signal.SIGTERM),
    pytest.param("synchronous", TWO, signal.SIGTERM, marks=heavy),
    pytest.param("substitution", TWO, signal.SIGTERM, marks=heavy),
    pytest.param("hybrid", [], signal.SIGTERM, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "counts", "number"), SIGNALS)
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on(
    directory, begin, strategy, counts, number
):
    running = begin(strategy, *counts, *LONG)
    running.until_it_trains()
    running.process.send_signal(number)
    assert "go on with" in running.ends(130)
    assert not (running.run / "processes.json").exists()
    stopped_at = int(latest(running.run).name.removeprefix("step-"))
    summary = train(
        directory, strategy, running.run, *counts, f"train.max_steps={stopped_at + 3}", resume=True
    )
    assert summary["steps"] == stopped_at + 3


KILLED = [
    ("hybrid", [*TWO, *ROLES], "embedding-server"),
    pytest.param("hybrid", [*TWO, *ROLES], "embedding-worker", marks=heavy),
    pytest.param("hybrid", [*TWO, *ROLES, "strategy.transport=tcp"], "loader", marks=heavy),
    pytest.param("hybrid", [*TWO, *ROLES], "trainer", marks=heavy),
    ("synchronous", TWO, "trainer"),
    pytest.param("asynchronous", TWO, "trainer", marks=heavy),
    pytest.param("asynchronous", [], "embedding-server", marks=heavy),
]


@pytest.mark.parametrize(("strategy", "counts", "role"), KILLED)
def test_a_process_that_is_killed_ends_the_run_and_is_named(begin, strategy, counts, role):
    running = begin(strategy, *counts, *LONG)
    processes = running.until_it_trains()
    victim = [each for each in processes if each["role"] == role][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    told = running.ends(1)
    assert f"{role} {victim['index']} was killed by signal 9" in told
    assert "Traceback" not in told


FIRST = [
    ("hybrid", [*TWO, *ROLES]),
    pytest.param("hybrid", [*TWO, "strategy.transport=tcp"], marks=heavy),
    pytest.param("synchronous", TWO, marks=heavy),
    pytest.param("asynchronous", TWO, marks=heavy),
]


@pytest.mark.parametrize(("strategy", "counts"), FIRST)
def test_nothing_outlives_the_first_process(begin, strategy, counts):
    running = begin(strategy, *counts, *LONG)
    running.until_it_trains()
    running.process.kill()
    running.process.communicate()
    running.leaves_nothing(within_s=20)


@pytest.mark.parametrize("counts", [TWO, pytest.param([], marks=heavy)])
def test_what_a_loader_finds_wrong_with_the_data_is_the_users_mistake(directory, begin, counts):
    text = (directory / "train.svm").read_text().splitlines()
    text[700] = "1 7:nonsense"
    (directory / "bad.svm").write_text("\n".join(text))
    words = command(directory, "hybrid", directory / f"bad-{len(counts)}", "data.train=bad.svm", *counts)
    words[words.index(str(directory / "config.toml"))] = str(directory / "weighted.toml")
    running = Running(words)
    told = running.ends(2)
    assert "bad.svm" in told
    assert "701" in told
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) <= 2


BAD_VALUES = [  # synchronous: the first trainer finds it as it standardizes; asynchronous: the loader, amid training
    ("synchronous", "x0", float("nan")),
    pytest.param("synchronous", "click", float("inf"), marks=heavy),
    pytest.param("asynchronous", "click", float("nan"), marks=heavy),
    pytest.param("hybrid", "x0", float("inf"), marks=heavy),
]


@pytest.mark.parametrize(("strategy", "column", "value"), BAD_VALUES)
def test_data_that_is_not_finite_is_the_users_mistake_whoever_reads_it(
    directory, tmp_path, strategy, column, value
):
    table = pq.read_table(directory / "train.parquet")
    values = table[column].to_pylist()
    values[1000] = value
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, column, pa.array(values, pa.float64())), tmp_path / "bad.parquet")
    running = Running(
        command(directory, strategy, tmp_path / "run", f"data.train={tmp_path}/bad.parquet", *TWO)
    )
    told = running.ends(2)
    assert "bad.parquet" in told
    assert f"row 1001 (row group 1): column '{column}' = {value}" in told
    assert "Traceback" not in told
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_wrong_counts_are_the_users_mistake(directory, tmp_path, change, told):
    from girih.cli import run

    words = command(directory, "hybrid", tmp_path / "run", f"strategy.{change}")[3:]
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("click.echo", lambda text="", **_: said.append(str(text)))
        assert run(words) == 2
    assert told in said[-1]
    assert not (tmp_path / "run").exists()


def torchrun(*words):
    running = Running([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words])
    error = running.ends(0, within_s=150)
    assert "Traceback" not in error
    return running.told


def test_torchrun_starts_the_trainers_of_a_command(directory, tmp_path):
    short = ["train.max_steps=20"]
    torchrun("-m", "--", *command(directory, "synchronous", tmp_path / "run", *short)[2:])
    summary = train(directory, "synchronous", tmp_path / "own", *TWO, *short)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["trainers"] == summary["trainers"] == 2
    assert difference(tmp_path / "run", tmp_path / "own") == (0, 0)


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


def test_a_script_that_nobody_started_several_times_is_told_how(directory):
    import girih
    from girih import models

    schema = girih.Schema([girih.Categorical(name="user", dim=4)], labels="click")
    with pytest.raises(girih.errors.ConfigError, match="torchrun --nproc-per-node=2"):
        girih.Trainer(models.DNN(schema, hidden=(4,)), strategy=girih.Synchronous(trainers=2))
