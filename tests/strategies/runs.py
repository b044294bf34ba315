"""Runs of real processes, as a user starts them, and what they leave."""

import json
import os
import subprocess
import sys

import numpy as np
from safetensors.numpy import load_file

from girih.store import read_snapshot


def command(directory, strategy, run, *overrides, resume=False):
    words = [sys.executable, "-m", "girih", "train", str(directory / "config.toml"), "--strategy", strategy]
    words += ["--run", str(run)] + [word for each in overrides for word in ("--set", each)]
    return words + (["--resume"] if resume else [])


def train(directory, strategy, run, *overrides, resume=False, status=0):
    """Trains; returns the summary."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command(directory, strategy, run, *overrides, resume=resume),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((run / "summary.json").read_text()) if status == 0 else done.stderr


def latest(run):
    return max((run / "checkpoints").glob("step-*"))


def rows_of(checkpoint):
    """(group, table, id) → (embedding and optimizer state) of every row."""
    rows = {}
    for file in sorted(checkpoint.glob("tables/*/*.safetensors")):
        snapshot = read_snapshot(file)
        tables = [table["name"] for table in snapshot.description["tables"]]
        names = [c.name for c in snapshot._columns if c.name.split(".")[0] in ("embedding", "first_order")]
        values = np.concatenate([np.atleast_2d(np.array(snapshot.column(n)).T).T for n in names], axis=1)
        for key, table, value in zip(snapshot.column("ids"), snapshot.column("tables"), values, strict=True):
            rows[file.parent.name, tables[table], int(key)] = value.copy()
    return rows


def dense_of(checkpoint):
    tensors = load_file(checkpoint / "dense.safetensors")
    return {name: value for name, value in tensors.items() if value.dtype == np.float32}


def difference(one, other):
    """The largest difference of a row and of a dense parameter, relative to the largest number of each."""
    mine, theirs = rows_of(latest(one)), rows_of(latest(other))
    assert mine.keys() == theirs.keys()
    scale = max(np.abs(value).max() for value in mine.values())
    rows = max(np.abs(mine[key] - theirs[key]).max() for key in mine) / scale
    mine, theirs = dense_of(latest(one)), dense_of(latest(other))
    assert mine.keys() == theirs.keys()
    dense = max(np.abs(mine[k] - theirs[k]).max() / max(np.abs(mine[k]).max(), 1e-6) for k in mine)
    return rows, dense
