"""Roles that are added and removed while a run trains: it ends as one that was stopped, and went on with as many."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import environment, processes_of
from scenes import SIZE, write

from runs import difference, train

pytestmark = pytest.mark.heavy
STEPS = 400
TABLE = """
[[tables]]
name = "{}"
eviction = {{ name = "lru", max_rows = 150 }}
"""
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", "checkpoint.keep=9"]
IN_STEP = [*SHORT, "strategy.staleness=0"]
ENDLESS = IN_STEP[1:]
OPTIONS = {
    "embedding-server": "embedding_servers",
    "embedding-worker": "embedding_workers",
    "loader": "loaders",
    "trainer": "trainers",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scale"), num_examples=1601)


@pytest.fixture
def full_tables(directory):
    """Overrides for tables that are full, so that the shard of a key, and so their number, decides which row leaves."""
    rows = "eviction={name='lru',max_rows=150}"
    return [f"tables=[{{name='user',{rows}}},{{name='item',{rows}}}]"]


def start_scaling(running, *wanted):
    words = [sys.executable, "-m", "girih", "scale", str(running.run), *wanted]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(running.mark)
    )


def scale(running, *wanted, status=0):
    """What ``girih scale`` tells."""
    asking = start_scaling(running, *wanted)
    told, error = asking.communicate(timeout=120)
    assert "Traceback" not in error
    assert asking.returncode == status, told + error
    return told if status == 0 else error


def step_of(told):
    return int(re.match(r"scaled at step (\d+): ", told)[1])


def counts_of(running):
    processes = json.loads((running.run / "processes.json").read_text())
    return {role: sum(each["role"] == role for each in processes) for role in {p["role"] for p in processes}}


def summary_of(running):
    return json.loads((running.run / "summary.json").read_text())


def options(**counts):
    return [f"strategy.{name}={count}" for name, count in counts.items()]


def until(running, step):
    """Waits until a step is recorded."""
    running.until_it_trains()
    while json.loads((running.run / "metrics.jsonl").read_text().splitlines()[-1])["step"] < step:
        assert running.process.poll() is None, running.process.communicate()


def went_on(directory, run, strategy, *lives):
    """A run that was stopped after a step, and went on with other overrides, once or more often; the independent reference."""
    for number, (step, overrides) in enumerate(lives):
        train(directory, strategy, run, *overrides, f"train.max_steps={step}", resume=number > 0)
    return run


def test_embedding_servers(begin, directory, full_tables, tmp_path):
    """More, then fewer; with tables that are full, so that the order of rows in each shard counts, too."""
    own = [*IN_STEP, *full_tables]
    two, three, one = (options(embedding_servers=count) for count in (2, 3, 1))
    running = begin("hybrid", *own, *two)
    running.until_it_trains()
    up = step_of(scale(running, "embedding-server=3", "embedding-worker=2"))
    assert counts_of(running) == {"trainer": 1, "embedding-server": 3, "embedding-worker": 2, "loader": 1}
    down = step_of(scale(running, "embedding-server=1"))
    assert counts_of(running) == {"trainer": 1, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
    running.ends(0)
    summary = summary_of(running)
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)
    told = [(each["step"], each["roles"]) for each in summary["scalings"]]
    assert told == [
        (up, {"embedding-server": [2, 3], "embedding-worker": [1, 2]}),
        (down, {"embedding-server": [3, 1]}),
    ]
    lives = [(up, [*own, *two]), (down, [*own, *three]), (STEPS, [*own, *one])]
    assert difference(running.run, went_on(directory, tmp_path / "whole", "hybrid", *lives)) == (0, 0)


def test_embedding_workers_and_loaders(begin, directory, tmp_path):
    before = options(trainers=2, loaders=2)
    running = begin("hybrid", *IN_STEP, *before)
    running.until_it_trains()
    scale(running, "embedding-worker=3")
    assert counts_of(running) == {"trainer": 2, "embedding-server": 1, "embedding-worker": 3, "loader": 2}
    scale(running, "loader=1", "embedding-worker=2")
    assert counts_of(running) == {"trainer": 2, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
    running.ends(0)
    train(directory, "hybrid", tmp_path / "whole", *IN_STEP, *before)
    assert difference(running.run, tmp_path / "whole") == (0, 0)


@pytest.fixture(scope="module")
def ever_new(directory):
    """Overrides for data in which each example has a user of its own, so that the number of rows tells what was trained on."""
    table = pq.read_table(directory / "train.parquet")
    table = pa.concat_tables([table] * (STEPS * SIZE // len(table) + 2)).combine_chunks()
    users = pa.array(range(len(table)), pa.int64())
    table = table.set_column(table.column_names.index("user"), "user", users)
    pq.write_table(table.slice(0, STEPS * SIZE), directory / "ever-new.parquet")
    return [f"data.train={directory}/ever-new.parquet", "train.epochs=1", "train.log_every_steps=5"]


def test_asynchronous_sees_each_example_once(begin, directory, ever_new, tmp_path):
    own = [*ever_new, "strategy.trainers=2", "strategy.staleness=3"]
    running = begin("asynchronous", *own)
    running.until_it_trains()
    scale(running, "embedding-server=2", "loader=2")
    scale(running, "embedding-worker=2")
    running.ends(0)
    summary, whole = summary_of(running), train(directory, "asynchronous", tmp_path / "whole", *own)
    assert [summary[name] for name in ("num_rows", "steps", "num_examples", "lost_updates")] == [
        whole[name] for name in ("num_rows", "steps", "num_examples", "lost_updates")
    ]
    assert summary["staleness_max"] <= 3


def test_groups_of_trainers(begin):
    groups = [f"strategy.{name}=2" for name in ("groups", "nets", "average_every_steps")]
    running = begin("hierarchical", *SHORT, *groups)
    running.until_it_trains()
    told = scale(running, "trainer=3", status=2)
    assert "strategy 'hierarchical' has no trainer whose number could change" in told
    scale(running, "embedding-server=2", "embedding-worker=2", "loader=2")
    assert counts_of(running)["embedding-server"] == 2
    running.ends(0)
    summary = summary_of(running)
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)


@pytest.mark.parametrize(("strategy", "first", "wanted"), [
    ("synchronous", {"trainers": 2}, {"trainers": 3}),
    ("synchronous", {"trainers": 2}, {"trainers": 1}),
    ("hybrid", {"trainers": 1}, {"trainers": 2, "embedding_servers": 2}),
])  # fmt: skip
def test_trainers(begin, directory, tmp_path, strategy, first, wanted):
    own = IN_STEP if strategy == "hybrid" else SHORT
    role = {option: name for name, option in OPTIONS.items()}
    running = begin(strategy, *own, *options(**first))
    running.until_it_trains()
    step = step_of(scale(running, *(f"{role[name]}={count}" for name, count in wanted.items())))
    assert counts_of(running)["trainer"] == wanted["trainers"]
    running.ends(0)
    assert [each["step"] for each in summary_of(running)["scalings"]] == [step]
    lives = [(step, [*own, *options(**first)]), (STEPS, [*own, *options(**wanted)])]
    assert difference(running.run, went_on(directory, tmp_path / "whole", strategy, *lives)) == (0, 0)


def begun(running):
    """Waits until training has paused for the scaling."""
    file = running.run / "scale.json"
    while not file.exists() or json.loads(file.read_text())["begun"] is None:
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 2.0, 4.0])
@pytest.mark.parametrize(("role", "index"), [("trainer", 0), ("trainer", 1), ("embedding-server", 0)])
def test_a_kill_meanwhile(begin, directory, role, index, after_s):
    """The run goes on with the old numbers or the new ones, or ends with a line, and a checkpoint to go on from."""
    before = options(trainers=2, embedding_servers=2)
    running = begin("hybrid", *SHORT, *before)
    running.until_it_trains()
    processes = json.loads((running.run / "processes.json").read_text())
    asking = start_scaling(running, "embedding-server=3")
    begun(running)
    time.sleep(after_s)
    now = json.loads((running.run / "processes.json").read_text()) or processes
    killed = [each["pid"] for each in now if (each["role"], each["index"]) == (role, index)]
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    told, error = asking.communicate(timeout=120)
    try:
        error = running.ends(0)
        assert summary_of(running)["steps"] == STEPS
        assert asking.returncode == 0 or "not scaled: a process was killed meanwhile" in error, told + error
    except AssertionError:
        assert running.process.returncode == 1, error
        last = running.process.communicate()[1].strip().splitlines()[-1]
        assert re.match(r"girih: .*was killed by signal 9.*; go on from step-\d+ with", last)
    before = options(trainers=2, embedding_servers=1)
    last = train(
        directory, "hybrid", running.run, *SHORT, *before, f"train.max_steps={STEPS + 20}", resume=True
    )
    assert last["steps"] == STEPS + 20


@pytest.mark.parametrize("role", ["trainer", "embedding-worker"])
def test_restarts_count_on(begin, role):
    """A process that has come back as often as it may does not come back because all began anew meanwhile."""
    running = begin("hybrid", *ENDLESS, "checkpoint.every_steps=20", "cluster.max_restarts=1")
    until(running, 40)
    os.kill(pid_of(running, role, life=0), signal.SIGKILL)
    pid_of(running, role, life=1)
    scale(running, "trainer=2")
    os.kill(pid_of(running, role, life=0), signal.SIGKILL)
    told = running.ends(1)
    assert told.count("(restart 1 of at most 1)") == 1
    assert f"{role} 0 was killed by signal 9" in told.splitlines()[-1]


def pid_of(running, role, life):
    """Waits for the first process of a role to be in one of its lives."""
    while True:
        assert running.process.poll() is None, running.process.communicate()
        with suppress(FileNotFoundError):
            for each in json.loads((running.run / "processes.json").read_text()):
                if (each["role"], each["index"], each["incarnation"]) == (role, 0, life):
                    return each["pid"]
        time.sleep(0.01)


def test_all_killed_meanwhile(begin, directory):
    before = options(trainers=2, embedding_servers=2)
    running = begin("hybrid", *SHORT, *before)
    running.until_it_trains()
    asking = start_scaling(running, "embedding-server=3")
    begun(running)
    for process in processes_of(running.mark):
        if b"scale" not in (process / "cmdline").read_bytes().split(b"\0"):
            os.kill(int(process.name), signal.SIGKILL)
    running.process.communicate()
    _, error = asking.communicate(timeout=60)
    assert asking.returncode == 2
    assert "the run ended before it was scaled; its last checkpoint is whole" in error
    time.sleep(10.0)  # until processes have noticed that nobody keeps them
    last = train(directory, "hybrid", running.run, *SHORT, *before, resume=True)
    assert (last["steps"], last["scalings"]) == (STEPS, [])


def test_what_is_refused(begin):
    running = begin("hybrid", *ENDLESS, *options(trainers=2))
    running.until_it_trains()
    for wanted, why in (
        ("embedding-sever=2", "unknown role 'embedding-sever'; did you mean 'embedding-server'?"),
        (
            "servers=2",
            "unknown role 'servers'; valid: embedding-server, embedding-worker, loader, trainer",
        ),
        ("embedding-server=0", "expected ROLE=COUNT with at least one process, as embedding-server=4"),
        (
            "group-server=2",
            "strategy 'hybrid' has no group-server whose number could change; expected one of",
        ),
        ("loader=3", "loaders = 3: expected at most one per trainer, 2 in all"),
        ("embedding-server=4096", "expected an integer from 1 to 1024"),
    ):
        told = scale(running, wanted, status=2)
        assert why in told
        assert told.count("\n") == 1
    assert scale(running, "loader=1") == "nothing to do: loader is 1\n"
    first = start_scaling(running, "embedding-worker=2")
    while not (running.run / "scale.json").exists():
        time.sleep(0.001)
    assert "another scaling is under way" in scale(running, "embedding-worker=3", status=2)
    assert first.communicate(timeout=60)[0].startswith("scaled at step")
    running.process.send_signal(signal.SIGINT)
    running.ends(130)
    words = [sys.executable, "-m", "girih", "scale", str(running.run), "loader=2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "this run is not on; train it with --resume, with other counts by --set" in done.stderr
