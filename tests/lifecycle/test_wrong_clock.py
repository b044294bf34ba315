"""Runs whose clock is wrong, with rows that expire by the clock: none is lost without a word."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

DAY_S = 86_400
CONFIG = """
[data]
train = "train.parquet"
valid = "train.parquet"
test = "train.parquet"
batch_size = 16
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
eviction = { name = "ttl", seconds = 86400 }
[labels]
names = ["click"]
[model]
name = "fm"
[train]
epochs = 1
"""
STRATEGIES = {"local": [], "hybrid": ["--set", "strategy.embedding_servers=2"]}


@pytest.fixture
def directory(tmp_path):
    ids = np.arange(64)
    table = {"user": ids % 50, "item": ids % 7, "click": (ids % 2).astype(np.int8)}
    pq.write_table(pa.table(table), tmp_path / "train.parquet")
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def girih(directory, *words, shift_s=0, status=0):
    """Runs a command under a clock that is so far ahead; returns what it told."""
    path = os.pathsep.join([str(Path(__file__).parent / "shifted"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "girih", *map(str, words)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path, "GIRIH_TEST_SHIFT_S": str(shift_s)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows_of(directory, run):
    return json.loads((directory / run / "summary.json").read_text())["store"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clock_three_days_ahead_is_refused_where_all_rows_would_expire(directory, strategy):
    train = ["train", "config.toml", "--strategy", strategy, *STRATEGIES[strategy]]
    girih(directory, *train, "--run", "one")
    for words in (
        [*train, "--run", "two", "--init-from", "one"],
        [*train, "--run", "one", "--resume", "--set", "train.epochs=2"],
    ):
        told = girih(directory, *words, shift_s=3 * DAY_S, status=2)
        (line,) = [line for line in told.splitlines() if line.startswith("girih: ")]
        assert "table 'user': all of its rows would expire" in line
        assert "If the clock is wrong, set it" in line
        assert "Traceback" not in told
    for command in ("evaluate", "predict"):  # which expire nothing
        more = ["--data", "train.parquet", "--out", "out.parquet"] if command == "predict" else []
        girih(directory, command, "one", *more, shift_s=3 * DAY_S)
    girih(directory, *train, "--run", "one", "--resume", "--set", "train.epochs=2")
    assert rows_of(directory, "one")["expired"] == 0


@pytest.mark.slow
def test_after_a_long_pause_rows_stay_with_a_longer_ttl(directory):
    train = ["train", "config.toml", "--run", "one"]
    girih(directory, *train)
    (directory / "config.toml").write_text(CONFIG.replace("86400", str(4 * DAY_S)))
    girih(directory, *train, "--resume", "--set", "train.epochs=2", shift_s=3 * DAY_S)
    assert rows_of(directory, "one")["expired"] == 0
    told = " ".join(girih(directory, *train, "--resume", "--set", "train.epochs=3").split())
    assert re.search(r"is 25\d{4} s ahead of this host's clock, .*\. Its rows expire later by as much", told)
