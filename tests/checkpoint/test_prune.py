"""``girih prune``: which rows remain, and that what is left is a run like any other."""

import json

import numpy as np
import pytest

import girih
from girih import cli
from girih.checkpoint import Manifest, Storage
from support.store_verbs import read_snapshot

META = ("ids", "tables", "counts", "last_used", "embedding", "embedding.sum")


def run(*words):
    return cli.run([str(word) for word in words])


def rows_of(checkpoint):
    """(table, id) → its count, age and values."""
    found = {}
    for file in sorted(checkpoint.glob("tables/*/*.safetensors")):
        snapshot = read_snapshot(file)
        names = [table["name"] for table in snapshot.description["tables"]]
        last = snapshot.description["last_step"]
        for key, table, count, used, *values in zip(*(snapshot.column(name) for name in META), strict=True):
            found[names[table], int(key)] = int(count), last - int(used), np.concatenate(values)
    return found


@pytest.fixture
def trained(log_directory):
    text = (log_directory / "config.toml").read_text()
    text += '\n[[tables]]\nname = "user"\nadmission = { name = "min_count", count = 2 }\neviction = { name = "lru", max_rows = 400 }\n'
    (log_directory / "config.toml").write_text(text)
    path = log_directory / "run"
    words = (
        "sparse_optimizer.name=adagrad",
        "store.shards=2",
        f"checkpoint.dir={log_directory / 'elsewhere'}",
    )
    assert run("train", log_directory / "config.toml", "--run", path, "--set", *words) == 0
    return path


def test_rows_seen_seldom_or_long_ago_leave(trained, log_directory, capsys):
    (whole,) = (log_directory / "elsewhere").iterdir()
    before, small = rows_of(whole), log_directory / "small"
    capsys.readouterr()
    assert (
        run("prune", trained, "--out", small, "--min-count", 3, "--max-age", 10, "--table", "user", "item")
        == 0
    )
    told = capsys.readouterr().out
    (pruned,) = (small / "checkpoints").iterdir()
    after = rows_of(pruned)
    expected = {
        key for key, (count, age, _) in before.items() if key[0] == "tags" or (count >= 3 and age <= 10)
    }
    assert 0 < len(expected) < len(before)
    assert after.keys() == expected
    for key, (count, age, values) in after.items():
        assert (count, age) == before[key][:2]
        np.testing.assert_array_equal(values, before[key][2])
    for name in ("user", "item", "tags"):
        number, of = (sum(key[0] == name for key in rows) for rows in (expected, before))
        assert f"{name}: {number:,} of {of:,} rows remain\n" in told
    assert f"{len(expected):,} of {len(before):,} rows in {pruned}" in told
    assert Manifest.read(Storage.at(pruned)).final

    for command in ("inspect", "evaluate"):
        assert run(command, small) == 0
    with girih.load(small) as model:
        assert len(model.table("user").ids) == sum(key[0] == "user" for key in expected)
    again = ("train", log_directory / "config.toml", "--run", small, "--resume", "--set", "train.epochs=2")
    assert run(*again, "sparse_optimizer.name=adagrad") == 0  # on other shards, with lists and filter
    assert json.loads((small / "summary.json").read_text())["num_examples"] == 6000


def test_age_in_seconds(log_directory, capsys):
    text = (log_directory / "config.toml").read_text()
    text += '\n[[tables]]\nname = "user"\neviction = { name = "ttl", seconds = 1000 }\n'
    (log_directory / "config.toml").write_text(text)
    assert (
        run(
            "train",
            log_directory / "config.toml",
            "--run",
            log_directory / "run",
            "--set",
            "train.max_steps=5",
        )
        == 0
    )
    capsys.readouterr()
    words = ("prune", log_directory / "run", "--max-age", 900, "--table", "user")
    assert run(*words, "--out", log_directory / "small") == 0  # all were used within the same minutes
    shown = capsys.readouterr().out.splitlines()[0]
    assert shown.split()[1] == shown.split()[3]


def test_what_cannot_be_pruned_is_one_sentence(trained, log_directory, capsys):
    capsys.readouterr()
    for words, told in (
        (
            (trained, "--out", log_directory / "a"),
            "prune: say which rows stay, by --min-count N, --max-age STEPS, or both",
        ),
        ((trained, "--out", log_directory, "--min-count", 2), f"--out {log_directory}: not empty (it holds "),
        ((trained, "--out", log_directory / "config.toml", "--min-count", 2), "is a file; name a directory"),
        ((trained, "--out", log_directory / "a", "--min-count", 0), "Invalid value for '--min-count'"),
        (
            (trained, "--out", log_directory / "a", "--min-count", 2, "--table", "usr"),
            "--table usr: the run has none of that name; did you mean 'user'?",
        ),
        (
            (log_directory / "none", "--out", log_directory / "a", "--min-count", 2),
            "no such run or checkpoint directory",
        ),
    ):
        assert run("prune", *words) == 2
        assert told in capsys.readouterr().err
    (whole,) = (log_directory / "elsewhere").iterdir()
    file = next(whole.glob("tables/*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    assert run("prune", trained, "--out", log_directory / "a", "--min-count", 2) == 2
    assert "damaged" in capsys.readouterr().err
    assert not any((log_directory / "a" / "checkpoints").iterdir())
