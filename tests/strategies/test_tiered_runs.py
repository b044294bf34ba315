"""Runs whose rows lie in memory and on a disk end with the rows of runs in memory, bit for bit, whatever kills them."""

import json
import os
import random
import shutil
import signal
import sys
import time

import numpy as np
import pytest
from scenes import play_all, write

from companions import ALL_S, Companion
from girih import checkpoint, cli
from girih.checkpoint.parts import PartReader
from girih.store.tiers import slot_memory
from runs import command, dense_of, train, train_here

pytestmark = pytest.mark.slow
TIERS = [
    'store.tiers=["dram","ssd"]', "store.hot_rows=150", "store.warm_up_steps=4", "store.flush_every_steps=3",
]  # fmt: skip
COMMON = ["store.shards=2", "data.batch_size=128"]
FEW = [
    'store.tiers=["dram","ssd"]',
    "store.hot_rows=15",
    "store.warm_up_steps=2",
    "store.flush_every_steps=3",
]
SCHEDULE = ["schedule.micro_batches=2", "schedule.packing=false", "schedule.interleaving_groups=2"]
NUM_KILLS = int(os.environ.get("GIRIH_KILLS", "3"))
FEW_SLOTS = 32


@pytest.fixture(autouse=True)
def few_slots(tmp_path, monkeypatch):
    """In the processes of a test memory has room for few rows beside the hot ones, so that rows come and go."""
    monkeypatch.setattr(slot_memory, "_FIRST_STAGED", FEW_SLOTS)
    (tmp_path / "sitecustomize.py").write_text(
        f"import girih.store.tiers.slot_memory as slots\nslots._FIRST_STAGED = {FEW_SLOTS}\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def begin(directory, run, *overrides):
    """Begins or goes on with a run of one trainer, in a process that can be killed."""
    return Companion(trainer, command(directory, "local", run, *overrides, resume=run.exists())[3:])


def trainer(pipe, words):
    slot_memory._FIRST_STAGED = FEW_SLOTS
    sys.exit(cli.run(words))


def end(companion):
    companion.process.join(ALL_S)
    assert companion.process.exitcode == 0, companion.printed()
    companion.close()


def rows_of(place):
    """(table, id) in order, and every column of their rows, by table; what a part holds is verified first."""
    manifest, found = checkpoint.Manifest.read(place), {}
    for name in sorted(manifest.shards):
        part = PartReader(place, manifest.shards).open(name)
        part.verify()
        tables = np.array([table["name"] for table in part.description["tables"]])[part.column("tables")]
        for column in part._columns:
            if column.name not in ("rows", "newer", "tables"):
                key = part.description["group"], column.name
                found.setdefault(key, []).append((tables, part.column("ids"), part.column(column.name)))
    joined = {}
    for key, parts in found.items():
        tables, ids, values = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.lexsort((ids, tables))
        joined[key] = tables[order], ids[order], values[order]
    return joined


def assert_same(place, expected):
    mine, theirs = rows_of(place), rows_of(expected)
    assert mine.keys() == theirs.keys()
    for name in mine:
        for one, other in zip(mine[name], theirs[name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(name))
    dense, other = dense_of(place.local), dense_of(expected.local)
    assert all((dense[name] == other[name]).all() for name in other)


@pytest.mark.parametrize(
    "strategy",
    [
        "local",
        pytest.param("hybrid", marks=pytest.mark.heavy),
        pytest.param("synchronous", marks=pytest.mark.heavy),
    ],
)
def test_runs_with_tiers_equal_one_in_memory_also_if_resumed(log_directory, strategy):
    words = {"hybrid": ["strategy.staleness=0"], "synchronous": ["strategy.trainers=2"]}.get(strategy, [])
    words += [*COMMON, "checkpoint.every_steps=5"]
    runs = {name: log_directory / name for name in ("one", "several", "halves")}
    trains = train_here if strategy == "local" else train
    trains(log_directory, strategy, runs["one"], *words)
    summary = trains(log_directory, strategy, runs["several"], *words, *TIERS)
    trains(log_directory, strategy, runs["halves"], *words, *TIERS, "train.max_steps=10")
    trains(log_directory, strategy, runs["halves"], *words, *TIERS, resume=True)
    for name in ("several", "halves"):
        assert_same(checkpoint.find(runs[name]), checkpoint.find(runs["one"]))
    assert 0 < summary["hit_ratio"]["ssd"] < 0.9
    assert sum(summary["hit_ratio"].values()) == pytest.approx(1)
    assert summary["store"]["ssd_bytes_written"] >= 0
    assert os.listdir(runs["several"] / "tiers") == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tiered"), num_examples=320, held_out=100)


def test_interleaved_micro_batches_with_tiers_equal_those_in_memory(directory):
    words = ["data.batch_size=16", "model.dropout=0.1", *SCHEDULE]
    scenes = [
        {"name": name, "strategy": "synchronous", "staged": 8, "overrides": [*words, *tiers]}
        for name, tiers in (("memory", []), ("tiers", FEW))
    ]
    summaries = play_all(directory, scenes, 2)
    plan = json.loads((directory / "tiers" / "plan.json").read_text())
    assert (len(plan["groups"]), len(plan["schedule"]["interleaving"])) == (3, 2)
    assert plan["schedule"]["micro_batches"] == 2
    assert summaries["tiers"]["hit_ratio"]["ssd"] > 0.02
    assert_same(checkpoint.find(directory / "tiers"), checkpoint.find(directory / "memory"))


@pytest.mark.timeout(300 + 60 * NUM_KILLS)
def test_a_run_killed_again_and_again_keeps_everything_in_checkpoints(log_directory):
    words = [*COMMON, "train.epochs=6", "checkpoint.every_steps=2", "checkpoint.keep=1000"]
    whole, killed = log_directory / "whole", log_directory / "killed"
    end(begin(log_directory, whole, *words))
    rng, num_kills = random.Random(7), 0
    while num_kills < NUM_KILLS:
        newest, dies = last_step(killed), False
        companion = begin(log_directory, killed, *words, *TIERS)
        lives_for_steps, then_s = 2 * rng.randint(1, 12), rng.uniform(0, 0.05)
        while companion.process.is_alive() and not dies:
            time.sleep(0.002)
            if dies := last_step(killed) >= newest + lives_for_steps:
                time.sleep(then_s)
                companion.process.kill()
        companion.process.join(ALL_S)
        if companion.process.exitcode == 0:  # it was at its end; the next kills are in a run of their own
            end(companion)
            assert_same(checkpoint.find(killed), checkpoint.find(whole))
            shutil.rmtree(killed)
            continue
        assert companion.process.exitcode == -signal.SIGKILL, companion.printed()
        companion.close()
        num_kills += 1
        found = checkpoint.latest(checkpoint.Storage.at(killed / "checkpoints"))
        assert_same(found, checkpoint.Storage.at(whole / "checkpoints") / found.name)
        assert os.listdir(killed / "tiers") == []
    end(begin(log_directory, killed, *words, *TIERS))
    assert_same(checkpoint.find(killed), checkpoint.find(whole))


def last_step(run):
    return max((int(saved.name[5:]) for saved in (run / "checkpoints").glob("step-*")), default=0)
