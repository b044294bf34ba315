"""Checkpoints that are written while training goes on: of one step exactly, or absent."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from companions import killed
from girih import checkpoint
from girih.app.run_config import RunConfig
from girih.checkpoint import Storage
from girih.errors import StorageFullError
from girih.sparse.groups import local_shards
from girih.store import Snapshot
from girih.store.snapshot.tensorfile import TensorWriter
from support.store_verbs import contents

TABLES = (
    "tables=[{name='user', eviction={name='lru', max_rows=120}}, {name='item', eviction={name='lfu', max_rows=120}},"
    " {name='tags', admission={name='min_count', count=2, cells=4000}, eviction={name='ttl', steps=9}}]"
)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Saves take several steps, in small chunks, with a log that is soon full."""
    monkeypatch.setattr("girih.store.snapshot.snapshot._CHUNK_BYTES", 5000)
    monkeypatch.setattr("girih.store.snapshot.snapshot._LOG_BYTES", 0)


@pytest.fixture
def slow_chunks(monkeypatch):
    """Writing waits between chunks; returns the threads that wrote."""
    chunks, write, threads = Snapshot.chunks, local_shards.write_rows, set()

    def slowly(snapshot):
        for chunk in chunks(snapshot):
            time.sleep(0.002)
            yield chunk

    def recorded(*arguments):
        threads.add(threading.current_thread())
        return write(*arguments)

    monkeypatch.setattr(Snapshot, "chunks", slowly)
    monkeypatch.setattr(local_shards, "write_rows", recorded)
    return threads


def settings_of(directory, *overrides):
    return RunConfig.load(directory / "config.toml", overrides=overrides)


def train_until_killed(pipe, directory, run, file):
    """Saves after every second step, and dies as so many files of rows end."""
    finish, files = TensorWriter.finish, []

    def counted(writer):
        files.append(writer)
        if len(files) == file:
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(writer)

    TensorWriter.finish = counted
    settings = settings_of(directory, "checkpoint.every_steps=2", "store.shards=1")
    with settings.trainer(run=run) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))


def fit(settings, run=None, load=None):
    """Predictions and rows at the end of a run."""
    with settings.trainer(run=run) as trainer:
        if load is not None:
            trainer.load(load)
        trainer.fit(settings.dataset("train"), settings.dataset("valid"), epochs=1)
        chunks = {}
        for name, store in trainer.sparse.stores():
            chunks.setdefault(name.rpartition("/")[0], []).append(contents(store))
        rows = {
            group: {key: np.concatenate([c[key] for c in parts]) for key in parts[0]}
            for group, parts in chunks.items()
        }
        return trainer.predict(settings.dataset("test")), rows, trainer.state.step


def by_key(columns):
    order = np.lexsort((columns["ids"], columns["tables"]))
    return {name: column[order] for name, column in columns.items()}


def assert_same(one, other):
    np.testing.assert_array_equal(one[0], other[0])
    assert one[2] == other[2]
    for group in one[1]:
        left, right = by_key(one[1][group]), by_key(other[1][group])
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.parametrize("every_steps", [1, 5])
def test_runs_with_checkpoints_are_those_without_and_go_on_from_each(
    log_directory, tmp_path, slow_chunks, every_steps
):
    alone = fit(settings_of(log_directory, TABLES))
    saving = settings_of(log_directory, TABLES, f"checkpoint.every_steps={every_steps}", "checkpoint.keep=99")
    assert_same(fit(saving, run=tmp_path / "run"), alone)
    assert len(slow_chunks) > 0
    assert threading.main_thread() not in slow_chunks
    found = checkpoint.complete(Storage.at(tmp_path / "run" / "checkpoints"))
    assert [step for step, _ in found] == sorted({*range(every_steps, 25, every_steps), 24})
    for step, path in found[:: 7 if every_steps == 1 else 2]:
        if step < 24:
            assert_same(fit(settings_of(log_directory, TABLES), load=path.local), alone)


def test_a_second_save_waits_for_the_first(log_directory, tmp_path, slow_chunks):
    settings = settings_of(log_directory, "train.max_steps=3")
    with settings.trainer(run=tmp_path / "run") as trainer:
        trainer.fit(settings.dataset("train"))
        trainer.state.step += 1
        trainer._run.checkpoints.begin(trainer.state)
        path = trainer.save(tmp_path / "own")
        assert (path / "manifest.json").is_file()
        steps = [step for step, _ in checkpoint.complete(Storage.at(tmp_path / "run" / "checkpoints"))]
        assert steps == [3, 4]


def test_what_goes_wrong_is_raised_by_the_next_step(log_directory, tmp_path, monkeypatch):
    settings = settings_of(log_directory, "checkpoint.every_steps=2", "store.shards=1")
    finish, files = TensorWriter.finish, []

    def full(writer):
        files.append(writer)
        if len(files) == 2:
            raise OSError(28, "No space left on device")
        return finish(writer)

    monkeypatch.setattr(TensorWriter, "finish", full)
    with settings.trainer(run=tmp_path / "run") as trainer:
        with pytest.raises(StorageFullError, match="no space left for a checkpoint"):
            trainer.fit(settings.dataset("train"))
        assert 4 <= trainer.state.step < 24
        assert all(store.state.memory.saving is None for _, store in trainer.sparse.stores())
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    whole = fit(settings_of(log_directory, "store.shards=1"))
    assert_same(fit(settings, run=tmp_path / "run", load=tmp_path / "run"), whole)


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2, 3])
def test_a_kill_amid_a_save_leaves_the_checkpoint_before(log_directory, tmp_path, file):
    run = tmp_path / "run"
    assert killed(train_until_killed, log_directory, run, file)
    root = run / "checkpoints"
    assert [step for step, _ in checkpoint.complete(Storage.at(root))] == list(range(2, 2 * file, 2))
    settings = settings_of(log_directory, "checkpoint.every_steps=2", "store.shards=1")
    if file > 1:
        assert_same(fit(settings, run=run, load=run), fit(settings_of(log_directory)))
        manifest = json.loads((checkpoint.latest(Storage.at(root)).local / "manifest.json").read_text())
        assert manifest["step"] == 24
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
