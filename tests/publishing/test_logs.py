"""What stays in a log and what is removed, the way back, and how a run goes on."""

import json

import pytest
from following import SMALL, Replayed, follower, publish_here

from girih.checkpoint import Storage
from girih.errors import CheckpointError, MissingFileError
from girih.publishing.log import Log, shown


def test_numbers_are_shown_in_runs():
    assert shown([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
    assert shown([]) == "none"


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
