"""Addresses that are slow, full, forbidden, taken by another run, or on an S3 server."""

import os
import shutil
import subprocess
import threading

import numpy as np
import pytest
from following import EVERY, SMALL, assert_is, follower, patience, publish, publish_here, summary_of

import girih
from girih.checkpoint import Storage, find
from girih.errors import CheckpointError, ConfigError
from girih.publishing.log import Log
from girih.publishing.manifest import LogHead, Pointer
from girih.publishing.segment import LogSegment
from girih.publishing.shards import SegmentShards
from girih.runs.callbacks import Callback
from girih.store import Store
from girih.training.publisher import Publisher
from support.store_verbs import group, look

SHORT = ["data.batch_size=64", "train.max_steps=10", "train.log_every_steps=1", "store.shards=1"]


class At(Callback):
    """Does something once, behind a step."""

    def __init__(self, step, what):
        self.step, self.what = step, what

    def on_metrics(self, record):
        if record["step"] == self.step:
            self.what()


def fit(config, run, log, *options, callbacks=()):
    overrides = [*SHORT, f"publish.to={log}", *options]
    with girih.Trainer.from_config(
        config, overrides, run=run, callbacks=callbacks, progress=False
    ) as trainer:
        trainer.fit()
        return trainer.summary(None, duration_s=1.0)["published"]


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root on Linux")
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_is_told_once_and_training_and_then_publishing_go_on(config, tmp_path, small_disk, capfd):
    log, ballast = small_disk / "log", small_disk / "ballast"
    free = os.statvfs(small_disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - 20_000))
    with patience():
        told = fit(config, tmp_path / "run", log, "publish.every_steps=1", callbacks=[At(6, ballast.unlink)])
    errors = capfd.readouterr().err
    assert errors.count("no space left for a segment; free some; training goes on") == 1
    assert errors.count("publishing continues\n") == 1
    assert told["failed"] >= 1
    assert told["snapshots"] >= 1
    found = follower(log, tmp_path / "followed")
    assert found.poll()
    assert found.current.step == 10
    assert_is(found.current, tmp_path / "followed", find(tmp_path / "run").local)
    found.close()


def test_a_forbidden_address_is_told_and_training_ends_as_ever(config, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    told = fit(config, tmp_path / "run", tmp_path / "file" / "log", "publish.every_steps=1")
    errors = capfd.readouterr().err
    assert errors.count("check the path and its permissions") == 1
    assert "the final state (step 10) is not in" in errors
    assert told["segments"] == told["snapshots"] == 0
    assert told["failed"] >= 1


@pytest.mark.slow
def test_a_forbidden_address_ends_training_where_it_is_to(config, tmp_path):
    (tmp_path / "file").write_text("")
    options = [*EVERY, "publish.every_steps=1", "publish.on_error=stop"]
    told = publish(config, tmp_path / "run", tmp_path / "file" / "log", *options, status=2)
    assert "check the path and its permissions" in told


def test_a_slow_address_makes_segments_fewer_and_holds_no_step_up(config, tmp_path, monkeypatch):
    write, begin, sent, steps = LogSegment.write, Publisher.begin, threading.Event(), []

    def slowly(self):
        assert sent.wait(60), "training waits for a segment"
        return write(self)

    def once_it_is_open(self, step):
        begin(self, step)
        self._opening.result()

    def note(record):
        steps.append((record["step"], sent.is_set()))
        if record["step"] == 8:
            sent.set()

    monkeypatch.setattr(LogSegment, "write", slowly)
    monkeypatch.setattr(Publisher, "begin", once_it_is_open)
    noted = At(None, None)
    noted.on_metrics = note
    told = fit(config, tmp_path / "run", tmp_path / "log", "publish.every_steps=1", callbacks=[noted])
    assert [step for step, is_sent in steps if not is_sent] == list(range(1, 9))
    assert told["skipped"] >= 6
    assert told["failed"] == 0
    found = follower(tmp_path / "log", tmp_path / "followed")
    found.poll()
    assert found.current.step == 10
    assert_is(found.current, tmp_path / "followed", find(tmp_path / "run").local)
    found.close()


def test_a_checkpoint_begins_while_a_snapshot_is_on_its_way_to_a_slow_address(tmp_path, monkeypatch):
    sent = threading.Event()
    create = Storage.create

    def slowly(self, name):
        assert sent.wait(20)
        return create(self, name)

    with Store(group(("t",))) as store:
        look(store, np.arange(5000), np.zeros(5000, np.int32), 1)
        rows = SegmentShards(Storage("memory://slow"), [("part", store)], 1)
        monkeypatch.setattr(Storage, "create", slowly)
        thread = threading.Thread(target=rows.write)
        thread.start()
        rows.wait_copied()
        with store.snapshot(tmp_path) as snapshot:
            assert snapshot.num_rows == 5000
        assert store.knows_changes(1)
        sent.set()
        thread.join()
    assert Storage("memory://slow").exists("part")


def test_a_run_publishes_no_more_once_another_one_has_taken_the_log_over(config, tmp_path, capfd):
    log = tmp_path / "log"
    point = Pointer(number=1, step=1, time=0.0, manifest_crc32=1)
    other = LogHead(run="other", epoch=99, newest=point, snapshot=point, written=0.0)

    def take_over():
        Log(Storage.at(log)).write_head(other)

    with patience():
        fit(config, tmp_path / "run", log, "publish.every_steps=1", callbacks=[At(5, take_over)])
    assert (
        "another run now publishes to this log (other); this run stops publishing\n" in capfd.readouterr().err
    )
    assert Log(Storage.at(log)).head() == other


def test_no_version_of_all_rows_begins_while_a_snapshot_is_on_its_way(config, tmp_path, monkeypatch):
    write, publish, begin, write_head = LogSegment.write, Publisher.run, Publisher.begin, Log.write_head
    sent, snapshots = threading.Event(), []

    def writing(self):
        number, whole = self._fields["number"], self._fields["previous"] is None
        if number == 2 and whole:
            assert sent.wait(60)
        if number == 3:
            raise CheckpointError("this one cannot be written")
        return write(self)

    def once_it_is_open(self, step):
        begin(self, step)
        self._opening.result()

    def one_after_the_other(self, state):
        publish(self, state)
        if "segment" in self._writes:
            self._writes["segment"][0].exception()
        self.settle()
        self._again_s = 0.0

    def noted(self, head):
        snapshots.append(head.snapshot.number)
        write_head(self, head)

    monkeypatch.setattr(LogSegment, "write", writing)
    monkeypatch.setattr(Publisher, "begin", once_it_is_open)
    monkeypatch.setattr(Publisher, "run", one_after_the_other)
    monkeypatch.setattr(Log, "write_head", noted)
    options = ["publish.every_steps=1", "publish.snapshot_every=1", "publish.keep=50"]
    told = fit(config, tmp_path / "run", tmp_path / "log", *options, callbacks=[At(8, sent.set)])
    assert told["failed"] == 1
    assert told["skipped"] >= 3
    assert snapshots == sorted(snapshots)
    found = follower(tmp_path / "log", tmp_path / "followed")
    assert found.poll(), found.lines
    assert found.current.step == 10
    assert_is(found.current, tmp_path / "followed", find(tmp_path / "run").local)


def test_early_stopping_publishes_the_best_weights_at_the_end(config, tmp_path):
    stopping = "train.early_stopping={metric='auc',patience=1}"
    options = [
        "train.evaluate_every_steps=3",
        "train.max_steps=30",
        "train.epochs=4",
        "publish.every_steps=2",
        stopping,
    ]
    run = publish_here(
        config, tmp_path / "run", tmp_path / "log", *EVERY[1:], *options, "sparse_optimizer.lr=2.0"
    )
    best = summary_of(run)["checkpoint_step"]
    assert best < summary_of(run)["steps"]
    found = follower(tmp_path / "log", tmp_path / "followed")
    found.poll()
    assert found.current.step == best
    assert_is(found.current, tmp_path / "followed", run / "checkpoints" / f"step-{best:08d}")
    found.close()


def test_rows_on_a_gpu_are_refused_by_name(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"publish: store.tiers = \['gpu'\]: rows in GPU memory cannot be published"
    ):
        fit(config, tmp_path / "run", tmp_path / "log", "store.tiers=['gpu']", "store.shards=1")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["publish.every_s=1", "publish.every_steps=2"], "expected one of them"),
        (["publish.evry_s=1"], "unknown key 'evry_s'; did you mean 'every_s'?"),
        (["publish.every_s=0"], "expected a finite number > 0"),
        (["publish.on_error=ignore"], "expected one of 'go_on', 'stop'"),
        (["publish.to="], "expected a directory or an fsspec address"),
    ],
)
def test_options_that_cannot_be_are_refused(config, tmp_path, options, told):
    with pytest.raises(ConfigError, match="publish") as found:
        fit(config, tmp_path / "run", tmp_path / "log", *options)
    assert told in str(found.value)


@pytest.mark.slow
def test_a_log_on_s3(config, tmp_path, s3_address):
    run = publish_here(
        config,
        tmp_path / "run",
        s3_address,
        *EVERY,
        SMALL,
        "publish.every_steps=3",
        "publish.snapshot_every=2",
    )
    found = follower(s3_address, tmp_path / "followed")
    assert found.poll()
    assert found.current.step == 12
    assert_is(found.current, tmp_path / "followed", run / "checkpoints" / "step-00000012")
    log = Log(Storage.at(s3_address))
    back = log.versions()[-2]
    log.go_back_to(back)
    assert found.poll()
    assert found.current.number == back
    assert_is(found.current, tmp_path / "followed", run / "checkpoints" / f"step-{found.current.step:08d}")
    found.close()


@pytest.mark.heavy
def test_embedding_servers_write_to_s3(config, tmp_path, s3_address):
    hybrid = ["strategy.staleness=0", "strategy.embedding_servers=2", "publish.every_steps=3"]
    run = publish(config, tmp_path / "run", s3_address, *EVERY, *hybrid, strategy="hybrid")
    found = follower(s3_address, tmp_path / "followed")
    assert found.poll()
    assert_is(found.current, tmp_path / "followed", run / "checkpoints" / "step-00000012")
    found.close()


def test_an_error_of_the_operating_system_is_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with Store(group(("t",))) as store:
        look(store, np.arange(5), np.zeros(5, np.int32), 1)
        rows = SegmentShards(Storage.at(tmp_path / "file" / "log"), [("part", store)], 1)
        with pytest.raises((OSError, CheckpointError)):
            rows.write()
        with store.snapshot(tmp_path):
            pass
