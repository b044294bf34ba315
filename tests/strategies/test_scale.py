"""Roles that are added and removed while a run trains: it ends as one that was stopped, and went on with as many."""

import json
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import environment
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
    told, error = start_scaling(running, *wanted).communicate(timeout=120)
    assert "Traceback" not in error
    assert (running.process.poll(), status) == (None, status), running.process.communicate()
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
