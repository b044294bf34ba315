"""A directory with data and a config, and what girih says when something in it is wrong."""

import copy
import tomllib

import numpy as np
import pyarrow as pa
import tomli_w

from girih import cli
from girih.cli import trainer  # noqa: F401  (imports torch, which has directories of its own to make)

BASE = {
    "data": {"train": "train.parquet", "valid": "valid.parquet", "test": "test.parquet", "batch_size": 32},
    "features": [
        {"name": "user", "kind": "categorical", "dim": 4},
        {"name": "item", "kind": "categorical", "dim": 4},
        {"name": "tags", "kind": "categorical", "dim": 4},
        {"name": "history", "kind": "sequence", "table": "item"},
        {"name": "price", "kind": "numeric", "transform": ["log1p", "standardize"]},
    ],
    "labels": {"names": ["click"]},
    "model": {"name": "lr"},
    "train": {"seed": 3},
}
"""A config that trains; every bad one differs from it in one thing."""


TRAINED = """
model.name = "deepfm"
model.hidden = [8]
sparse_optimizer.name = "adam"
sparse_optimizer.lr = 0.01
dense_optimizer.name = "adam"
train.epochs = 2
checkpoint.every_steps = 4
"""
"""The changes of the run that others begin with."""


def changed(*changes):
    """The base config with some lines of TOML put into it, later ones over earlier ones.

    ``features.0.dim = 8`` reaches into a list, ``features.new = {...}`` appends to it, and ``model = "GONE"``
    takes a key out.
    """
    mapping = BASE
    for change in changes:
        mapping = _merged(mapping, tomllib.loads(change))
    return mapping


def _merged(base, change):
    if isinstance(base, dict) and isinstance(change, dict):
        both = {key: _merged(base.get(key), value) for key, value in change.items() if value != "GONE"}
        return {key: value for key, value in base.items() if key not in change} | both
    if isinstance(base, list) and isinstance(change, dict):
        items = [_merged(item, change.get(str(place), {})) for place, item in enumerate(base)]
        return items + [value for key, value in change.items() if not key.isdigit()]
    return copy.deepcopy(change)


def examples(rows, seed=0):
    """Made-up clicks, one row an example."""
    random = np.random.default_rng(seed)
    return pa.table(
        {
            "user": random.integers(0, 50, rows),
            "item": [f"item {i}" for i in random.integers(0, 30, rows)],
            "tags": [random.integers(0, 9, n).tolist() for n in random.integers(0, 4, rows)],
            "history": [
                [f"item {i}" for i in random.integers(0, 30, n)] for n in random.integers(0, 5, rows)
            ],
            "price": random.exponential(10.0, rows),
            "rating": random.integers(1, 6, rows),
            "click": random.integers(0, 2, rows),
            "when": pa.array(random.integers(0, 1 << 40, rows), pa.timestamp("ms")),
            "weight": random.uniform(0.5, 2.0, rows),
        }
    )


def tree(directory):
    """Everything below a directory: relative path → content; a directory's is None. Caches do not count."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
        if not any(part.startswith(("__pycache__", "torchinductor")) for part in path.parts)
    }


class Site:
    """A directory with ``train``, ``valid`` and ``test`` data, temporary files included, and a config."""

    def __init__(self, directory, capsys):
        self.directory = directory
        self.config_file = directory / "config.toml"
        self._capsys = capsys

    def __truediv__(self, name):
        return self.directory / name

    def configure(self, *changes):
        """Writes the base config with some lines of TOML put into it; see :func:`changed`."""
        self.config_file.write_text(tomli_w.dumps(changed(*changes)))
        return self.config_file

    def write_lines(self, name, *lines):
        """Writes a text file; returns its path."""
        (self / name).write_text("".join(f"{line}\n" for line in lines))
        return self / name

    def girih(self, *words):
        """Runs one command that must succeed; returns what it printed, standard output and error."""
        status = cli.run([str(word) for word in words])
        shown = self._capsys.readouterr()
        assert status == 0, shown.err
        return shown.out + shown.err

    def refusal(self, *words, before=0):
        """Runs one command that must fail with status 2 and one line; returns the line.

        Nothing may be written by it. ``before`` progress lines may come before the one that tells.
        """
        here = tree(self.directory)
        line = self.refusal_after_writing(*words, before=before)
        after = tree(self.directory)
        assert sorted(after) == sorted(here), f"left behind or taken away by: {line}"
        assert after == here, f"written to by: {line}"
        return line

    def refusal_after_writing(self, *words, before=0):
        """As :meth:`refusal`, where part of the work was done and stays.

        ``before`` counts the lines that come before: so many, one of several numbers, or any for None.
        """
        self._capsys.readouterr()
        status = cli.run([str(word) for word in words])
        shown = self._capsys.readouterr()
        assert status == 2, shown.err
        lines = shown.err.splitlines()
        counts = before if isinstance(before, tuple) else (before,)
        assert before is None or len(lines) - 1 in counts, shown.err
        assert shown.err.endswith("\n")
        assert lines[-1].startswith("girih: ")
        assert "Traceback" not in shown.err
        assert not shown.out
        return lines[-1].removeprefix("girih: ")

    def train(self, *more):
        """The words of ``girih train`` with this config, into ``run``."""
        return ("train", self.config_file, "--run", self / "run", *more)
