"""Roles that are added and removed while a run trains: it ends as one that was stopped, and went on with as many."""

import json
import re
import subprocess
import sys

import pytest
from running import environment
from scenes import write

from runs import difference, train

STEPS = 400
TABLE = """
[[tables]]
name = "{}"
eviction = {{ name = "lru", max_rows = 150 }}
"""
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", "strategy.staleness=0"]
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Data whose tables are full, so that the shard of a key decides which row leaves."""
    directory = write(tmp_path_factory.mktemp("scale"), num_examples=1601)
    with (directory / "config.toml").open("a") as config:
        config.writelines(TABLE.format(name) for name in ("user", "item"))
    return directory


def scale(running, *wanted, status=0):
    """What ``girih scale`` tells."""
    words = [sys.executable, "-m", "girih", "scale", str(running.run), *wanted]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=environment(running.mark), check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stderr


def counts_of(running):
    processes = json.loads((running.run / "processes.json").read_text())
    return {role: sum(each["role"] == role for each in processes) for role in {p["role"] for p in processes}}


def test_embedding_servers(begin, directory, tmp_path):
    before = ["strategy.trainers=2", "strategy.embedding_servers=2"]
    running = begin("hybrid", *SHORT, *before)
    running.until_it_trains()
    told = scale(running, "embedding-server=3", "embedding-worker=2", "loader=2")
    print(told)
    step = int(re.match(r"scaled at step (\d+): embedding-server 2 → 3", told)[1])
    assert counts_of(running) == {"trainer": 2, "embedding-server": 3, "embedding-worker": 2, "loader": 2}
    print(running.ends(0))
    summary = json.loads((running.run / "summary.json").read_text())
    print(summary["scalings"], summary["wire_bytes"])
    assert summary["steps"] == STEPS
    whole = tmp_path / "whole"
    train(directory, "hybrid", whole, *SHORT, *before, f"train.max_steps={step}")
    after = ["strategy.trainers=2", "strategy.embedding_servers=3"]
    train(directory, "hybrid", whole, *SHORT, *after, resume=True)
    assert difference(running.run, whole) == (0, 0)
