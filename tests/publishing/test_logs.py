"""What stays in a log and what is removed, the way back, and how a run goes on."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest
from following import SMALL, Replayed, assert_is, follower, patience, publish_here

from girih import Trainer
from girih.checkpoint import Storage, find
from girih.comm.group import TrainerGroup
from girih.errors import CheckpointError, MissingFileError
from girih.publishing.log import Log, PublishOptions, describe_numbers
from girih.publishing.manifest import Pointer, write_pin
from girih.runs.callbacks import Callback
from girih.telemetry.stats import Stats
from girih.training.publisher import Publisher, _open_log


def test_numbers_are_shown_in_runs():
    assert describe_numbers([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
    assert describe_numbers([]) == "none"


def test_what_no_snapshot_that_stays_leads_from_is_removed(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    log, wholes = replayed.new, replayed.old.numbers(whole=True)
    segments = replayed.old.numbers(whole=False)
    replayed.reveal(segments[-1])
    assert len(wholes) >= 3
    log.remove_old(2)
    assert log.numbers(whole=True) == wholes[-2:]
    assert log.numbers(whole=False) == [n for n in segments if n > wholes[-2]]
    assert log.versions() == [n for n in sorted({*segments, *wholes}) if n >= wholes[-2]]


def test_what_leads_to_the_version_that_followers_stay_at_is_kept(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    log, wholes = replayed.new, replayed.old.numbers(whole=True)
    segments = replayed.old.numbers(whole=False)
    replayed.reveal(segments[-1])
    back = wholes[0] + 1
    log.go_back_to(back)
    log.remove_old(1)
    assert log.numbers(whole=True) == [wholes[0], wholes[-1]]
    assert set(log.numbers(whole=False)) == {back, *(n for n in segments if n > wholes[-1])}
    found = follower(tmp_path / "log", tmp_path / "f")
    found.poll()
    assert found.current.number == back
    with pytest.raises(
        CheckpointError, match=rf"version {back + 1} is not there; there are {wholes[0]} to {back}, "
    ):
        log.go_back_to(back + 1)
    found.close()


def unfinished(replayed, number):
    """Leaves a snapshot as a process that was killed leaves it."""
    (replayed.path(number, whole=True) / "manifest.json").unlink()


def test_snapshots_that_were_never_finished_do_not_count_as_those_to_keep(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    log, wholes = replayed.new, replayed.old.numbers(whole=True)
    replayed.reveal(replayed.old.numbers(whole=False)[-1])
    unfinished(replayed, wholes[1])
    before = log.versions()
    log.remove_old(len(wholes) - 1)
    assert log.versions() == before
    log.remove_old(1)
    assert log.numbers(whole=True) == wholes[-1:]  # nor does what was left stay


def test_a_version_that_followers_stay_at_is_kept_though_a_snapshot_before_it_was_never_finished(
    patient, tmp_path
):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    log, wholes = replayed.new, replayed.old.numbers(whole=True)
    replayed.reveal(replayed.old.numbers(whole=False)[-1])
    unfinished(replayed, wholes[1])
    log.go_back_to(wholes[1] + 1)
    log.remove_old(1)
    assert wholes[1] + 1 in log.versions()
    found = follower(tmp_path / "log", tmp_path / "f")
    assert found.poll(), found.lines
    assert found.current.number == wholes[1] + 1


def test_a_way_back_that_is_refused_leaves_followers_where_they_were(patient, tmp_path, monkeypatch):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    log = replayed.new
    replayed.reveal(replayed.old.numbers(whole=False)[-1])
    first, *_, last = log.versions()

    def removed_meanwhile(root, number):
        write_pin(root, number)
        if number == first:
            log.remove_old(1)
            shutil.rmtree(replayed.path(first, whole=True), ignore_errors=True)

    for before in (None, last):
        replayed.reveal(replayed.old.numbers(whole=False)[-1])
        if before is not None:
            log.go_back_to(before)
        with monkeypatch.context() as patch:
            patch.setattr("girih.publishing.log.write_pin", removed_meanwhile)
            with pytest.raises(CheckpointError, match=f"version {first} is not there"):
                log.go_back_to(first)
        assert log.pin() == before


def test_a_damaged_pin_is_replaced_by_the_next_one(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    replayed.reveal(3)
    (tmp_path / "log" / "pin.json").write_text("{}")
    replayed.new.go_back_to(2)
    assert replayed.new.pin() == 2


def unattached(options):
    """A publisher that no run has."""
    context = SimpleNamespace(directory=None, ranks=TrainerGroup(), stats=Stats())
    return Publisher(options, context, None, None)


def test_of_processes_that_open_a_log_at_once_each_has_an_epoch_and_numbers_of_its_own(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    replayed.reveal(7)
    head = replayed.new.head()
    options = PublishOptions(to=str(tmp_path / "log"))
    publishers = [unattached(options) for _ in range(6)]
    with ThreadPoolExecutor(len(publishers)) as pool:
        opened = list(pool.map(lambda each: _open_log(each._log, None), publishers))
    for publisher in publishers:
        publisher.close()
    epochs = sorted(each.epoch for each in opened)
    assert len(set(epochs)) == len(epochs)
    assert epochs[0] > head.epoch
    numbers = sorted(each.number for each in opened)
    assert numbers[0] >= 7
    assert min(after - before for before, after in pairwise(numbers)) >= 1000


def test_a_run_that_opened_a_log_with_another_one_spoils_nothing_of_it(config, tmp_path, capfd):
    log, runs = tmp_path / "log", [tmp_path / "one", tmp_path / "two"]
    options = ["data.batch_size=64", "train.log_every_steps=1", "store.shards=1", f"publish.to={log}"]

    class Begins(Callback):
        """Trains another run, whole, before the first version of this one."""

        def on_metrics(self, record):
            if record["step"] == 2:
                with Trainer.from_config(
                    config,
                    [*options, "publish.every_steps=1", "train.max_steps=3"],
                    run=runs[1],
                    progress=False,
                ) as other:
                    other.fit()

    with patience():
        first = [*options, "publish.every_steps=4", "train.max_steps=6"]
        with Trainer.from_config(config, first, run=runs[0], callbacks=[Begins()], progress=False) as trainer:
            trainer.fit()
    assert "another run now publishes to this log" in capfd.readouterr().err
    found = follower(log, tmp_path / "f")
    assert found.poll(), found.lines
    assert found.current.step == 3
    assert_is(found.current, tmp_path / "f", find(runs[1]).local)


def test_a_head_never_goes_back_to_an_earlier_snapshot(tmp_path):
    publisher = unattached(PublishOptions(to=str(tmp_path / "log")))
    publisher._opened = _open_log(publisher._log, None)
    for number, whole in ((1, True), (2, False), (5, True), (2, True)):
        publisher._write_head(Pointer(number=number, step=number, time=0.0, manifest_crc32=1), whole=whole)
    publisher.close()
    head = Log(Storage.at(tmp_path / "log")).head()
    assert (head.newest.number, head.snapshot.number) == (5, 5)


def test_a_version_that_was_never_there_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="nothing was published there"):
        Log(Storage.at(tmp_path)).go_back_to(3)


def test_what_a_killed_process_left_is_removed(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    segments = replayed.old.numbers(whole=False)
    replayed.reveal(segments[-2])
    replayed.bring(segments[-1])
    (replayed.path(segments[-1]) / "manifest.json").unlink()
    (tmp_path / "log" / "segments" / ".old-00000001").mkdir()
    replayed.new.remove_unfinished(segments[-2])
    assert replayed.new.numbers(whole=False) == [n for n in segments if n <= segments[-2]]
    assert not (tmp_path / "log" / "segments" / ".old-00000001").exists()


def test_a_run_that_goes_on_numbers_on_in_a_new_epoch_that_begins_with_a_snapshot(config, tmp_path):
    log, run = tmp_path / "log", tmp_path / "run"
    short = ["data.batch_size=64", "publish.every_steps=2", "publish.keep=50", SMALL]
    publish_here(config, run, log, *short, "train.max_steps=6")
    there = Log(Storage.at(log))
    first = there.head()
    publish_here(config, run, log, *short, "train.max_steps=12", resume=True)
    second = there.head()
    assert (second.run, second.epoch) == (first.run, first.epoch + 1)
    assert second.snapshot.number == first.newest.number + 1
    assert second.newest.step == 12
    found = follower(log, tmp_path / "f")
    there.go_back_to(first.newest.number)
    found.poll()
    assert found.current.step == 6
    there.go_on()
    found.poll()
    assert (found.current.number, found.current.step) == (second.newest.number, 12)
    found.close()
    assert json.loads((run / "published.json").read_text())["run"] == first.run


def test_another_run_goes_on_behind_the_first_one_and_followers_say_so(config, tmp_path):
    log = tmp_path / "log"
    short = ["data.batch_size=64", "publish.every_steps=2", "train.max_steps=4"]
    publish_here(config, tmp_path / "one", log, *short)
    found = follower(log, tmp_path / "f")
    found.poll()
    before = found.current
    publish_here(config, tmp_path / "two", log, *short, "train.seed=4")
    assert found.poll()
    assert found.current.number > before.number
    assert "another run publishes now" in "\n".join(found.lines)
    found.close()
