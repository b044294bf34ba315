"""Runs of real processes, as a user starts them, and what they leave."""

import json
import os
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file

from girih import cli
from support.store_verbs import read_snapshot


def command(directory, strategy, run, *overrides, resume=False):
    words = [sys.executable, "-m", "girih", "train", str(directory / "config.toml"), "--strategy", strategy]
    words += ["--run", str(run)] + [word for each in overrides for word in ("--set", each)]
    return words + (["--resume"] if resume else [])


def train(directory, strategy, run, *overrides, resume=False, status=0, more=()):
    """Trains; returns the summary. ``more`` are words of the command."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [*command(directory, strategy, run, *overrides, resume=resume), *more],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((run / "summary.json").read_text()) if status == 0 else done.stderr


def train_here(directory, strategy, run, *overrides, resume=False):
    """Trains by one trainer as :func:`train` does, in this process."""
    assert cli.run(command(directory, strategy, run, *overrides, resume=resume)[3:]) == 0
    return json.loads((run / "summary.json").read_text())


def latest(run):
    return max((run / "checkpoints").glob("step-*"))


def columns_of(checkpoint):
    """(table, column) → ids[n] in order, and their rows' values[n, width]; each optimizer state is a column."""
    parts = {}
    for file in sorted(checkpoint.glob("tables/*/*.safetensors")):
        snapshot = read_snapshot(file)
        ids, tables = snapshot.column("ids"), snapshot.column("tables")
        for number, table in enumerate(snapshot.description["tables"]):
            own = tables == number
            if not own.any():  # of many shards, some have no row of a small table
                continue
            for column in snapshot._columns:
                if column.name.split(".")[0] in ("embedding", "first_order"):
                    values = snapshot.column(column.name)[own].reshape(own.sum(), -1)
                    parts.setdefault((table["name"], column.name), []).append((ids[own], values))
    columns = {}
    for name, of_shards in parts.items():
        ids, values = (np.concatenate(each) for each in zip(*of_shards, strict=True))
        columns[name] = ids[order := ids.argsort()], values[order]
    return columns


def dense_of(checkpoint):
    tensors = load_file(checkpoint / "dense.safetensors")
    return {name: value for name, value in tensors.items() if value.dtype == np.float32}


def difference(one, other):
    """The largest difference of two runs' rows, and of their dense parameters, with their optimizers' state.

    Each dimension of each table's columns is measured by its own largest number, and so is each dense tensor.
    """
    rows = difference_of_rows(columns_of(latest(one)), columns_of(latest(other)))
    mine, theirs = dense_of(latest(one)), dense_of(latest(other))
    assert mine.keys() == theirs.keys()
    return rows, np.max(
        [relative_difference(mine[name].reshape(-1, 1), theirs[name].reshape(-1, 1)) for name in mine]
    )


def difference_of_rows(mine, theirs):
    """See :func:`difference`; takes what :func:`columns_of` returns."""
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(ids, theirs[name][0]) for name, (ids, _) in mine.items())
    return np.max([relative_difference(values, theirs[name][1]) for name, (_, values) in mine.items()])


def relative_difference(one, other):
    """The largest difference of two arrays[n, width], relative to the largest number in the same place of all rows."""
    largest = np.abs(one).max(axis=0, initial=0)
    return float((np.abs(one - other) / np.where(largest > 0, largest, 1)).max(initial=0))
