"""Whole runs of several processes whose checkpoints lie on an S3 server."""

import json
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from girih.checkpoint import Manifest, Storage, find
from girih.cli import run as girih

FAST = ["store.shards=1", "data.batch_size=64", "checkpoint.every_steps=4", "train.log_every_steps=1"]


def train(config, run, *words, resume=False):
    options = [word for each in (*FAST, *words) for word in ("--set", each)]
    again = ["--resume"] if resume else []
    words = [sys.executable, "-m", "girih", "train", config, "--run", run, *options, *again]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((run / "summary.json").read_text())


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "split" not in line}


@pytest.mark.heavy
def test_embedding_servers_write_and_read_it(log_directory, tmp_path, s3_address, capsys):
    config, run = log_directory / "config.toml", tmp_path / "run"
    hybrid = [
        "strategy.name='hybrid'", "strategy.staleness=0", "strategy.embedding_servers=2",
        f"checkpoint.dir={s3_address}",
    ]  # fmt: skip
    train(config, run, *hybrid, "train.max_steps=6")
    place = find(run)
    assert place == Storage(f"{s3_address}/step-00000006")
    assert len(Manifest.read(place).shards) == 2
    summary = train(config, run, *hybrid, "train.max_steps=9", resume=True)
    assert summary["steps"] == 9
    assert not (run / "checkpoints").exists()
    for command in (["evaluate", run], ["inspect", run], ["inspect", f"{s3_address}/step-00000009"]):
        assert girih(list(map(str, command))) == 0
    shown = capsys.readouterr().out
    assert f"{s3_address}/step-00000009: complete" in shown
    out = tmp_path / "out.parquet"
    assert girih(["predict", str(run), "--data", str(log_directory / "test.parquet"), "--out", str(out)]) == 0
    assert pq.read_table(out).num_rows == 1000


@pytest.mark.heavy
def test_each_trainer_goes_on_with_its_own_random_state(log_directory, tmp_path, s3_address):
    """With dropout, so that masks have to be those of a run that was not stopped, on both trainers."""
    config, whole, halves = log_directory / "config.toml", tmp_path / "whole", tmp_path / "halves"
    both = ["strategy.name='synchronous'", "strategy.trainers=2", "model.dropout=0.5"]
    train(config, whole, *both, "train.max_steps=10")
    train(config, halves, *both, "train.max_steps=5", f"checkpoint.dir={s3_address}")
    states = Manifest.read(find(halves)).random
    assert len(states) == 2
    train(config, halves, *both, "train.max_steps=10", f"checkpoint.dir={s3_address}", resume=True)
    assert losses(whole) == losses(halves)
    np.testing.assert_equal(len(losses(whole)), 10)
