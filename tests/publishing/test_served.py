"""Servers that follow: each answer is by one version, and the newest ones come within a look or two."""

import contextlib
import errno
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from following import EVERY, SMALL, Replayed, follower, merge_all, publish_here, version_in, words

import girih
from girih import cli
from girih.checkpoint import Storage
from girih.errors import MissingFileError
from girih.publishing.log import Log
from girih.serving.following import Following
from girih.serving.model_directory import LOOK_EVERY_S, ModelDirectory, watching
from girih.serving.reading import RequestReader
from girih.serving.signature import NAME
from serving.serving_site import Site, inputs_of, tensors_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table(log_source):
    return (
        pq.read_table(log_source / "test.parquet")
        .select(["user", "item", "tags", "x0"])
        .drop_null()
        .slice(0, 64)
    )


def answers(served, table):
    return served.predict(RequestReader(served.schema, 1000).read(tensors_of(table)))[:, 0]


def expected(run, step, table):
    with girih.load(run / "checkpoints" / f"step-{step:08d}") as model:
        return model.predict(table)


def test_predictions_of_every_version_are_those_of_its_checkpoint(patient, tmp_path, table):
    run, log = patient
    replayed, watched, seen = Replayed(log, tmp_path / "log"), None, []
    found = follower(tmp_path / "log", tmp_path / "followed")
    for number in replayed.old.versions():
        replayed.reveal(number)
        assert found.poll()
        if watched is None:
            watched = ModelDirectory(tmp_path / "followed")
        else:
            assert watched.look()
        assert not watched.look()
        version = watched.served.version
        assert (version.number, version.step) == (number, found.current.step)
        np.testing.assert_array_equal(answers(watched.served, table), expected(run, version.step, table))
        seen.append(number)
    merge_all(found)
    watched.look()
    np.testing.assert_array_equal(
        answers(watched.served, table), expected(run, watched.served.version.step, table)
    )
    assert len(seen) == 12
    found.close()


def test_a_version_that_is_served_stays_whole_while_others_come(patient, tmp_path, table):
    run, log = patient
    replayed = Replayed(log, tmp_path / "log")
    found = follower(tmp_path / "log", tmp_path / "followed")
    replayed.reveal(2)
    found.poll()
    watched = ModelDirectory(tmp_path / "followed")
    first, step = watched.served, watched.served.version.step
    for number in replayed.old.versions()[2:]:
        replayed.reveal(number)
        found.poll()
        merge_all(found)
        watched.look()
    np.testing.assert_array_equal(answers(first, table), expected(run, step, table))
    found.close()


def test_a_worker_waits_for_no_version_in_vain(tmp_path):
    with pytest.raises(MissingFileError, match=r"no signature\.json"):
        ModelDirectory(tmp_path)


def model_of(site):
    status, found = site.get(f"/v2/models/{site.name}")
    assert status == 200
    return found


def test_a_server_that_follows_into_a_directory_of_its_own_ends_without_an_alarm(patient):
    _, log = patient
    with Site(log, "--follow") as site:
        assert site.stop(signal.SIGINT) == 130
    assert [line for line in site.errors if "no version" in line or "stays at" in line] == []


def test_nobody_looks_for_versions_any_more_once_it_is_over(patient, tmp_path, caplog):
    _, source = patient
    log = tmp_path / "log"
    Replayed(source, log).reveal(2)
    found = follower(log, tmp_path / "followed")
    found.poll()
    watched = ModelDirectory(tmp_path / "followed")
    with watching(watched, lambda served: None):
        time.sleep(3 * LOOK_EVERY_S)
    found.close()
    caplog.clear()
    (tmp_path / "followed" / NAME).unlink()
    time.sleep(3 * LOOK_EVERY_S)
    assert caplog.records == []


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_a_server_answers_by_what_was_published_last_while_training_goes_on(
    log_source, tmp_path, table, workers
):
    config, run, log = log_source / "config.toml", tmp_path / "run", tmp_path / "log"
    options = [
        "train.epochs=100000",  # until enough has been seen
        "data.batch_size=64",
        SMALL,
        "checkpoint.every_steps=1",
        "checkpoint.keep=100000",
        "publish.every_s=0.2",
    ]
    told = (tmp_path / "told").open("w+")
    train = subprocess.Popen(words(config, run, log, *options), stdout=told, stderr=told)
    body, got = {"inputs": inputs_of(table)}, {}
    with contextlib.ExitStack() as closing:
        closing.enter_context(told)
        closing.enter_context(train)
        closing.callback(train.kill)
        site = closing.enter_context(Site(log, "--follow", "--workers", workers, "--name", "clicks"))
        while len(got) < 4:
            assert train.poll() is None, (tmp_path / "told").read_text()
            status, found = site.infer(body)
            assert status == 200
            got[found["model_version"]] = found["outputs"][0]["data"]
            time.sleep(0.02)  # the cores are for training too
        train.send_signal(signal.SIGINT)
        assert train.wait(60) == 130, (tmp_path / "told").read_text()
        newest = Log(Storage.at(log)).head().newest
        deadline = time.monotonic() + 10
        while model_of(site)["versions"] != [f"{newest.step}.{newest.number}"]:
            assert time.monotonic() < deadline, (model_of(site), newest)
            time.sleep(0.02)
        status, found = site.infer(body)
        got[found["model_version"]] = found["outputs"][0]["data"]
        assert site.stop() == 130
    for version, predictions in got.items():
        step = int(version.partition(".")[0])
        np.testing.assert_array_equal(np.float32(predictions), expected(run, step, table))


def test_one_command_takes_a_server_back(patient, tmp_path, table, capsys):
    run, source = patient
    log = tmp_path / "log"
    replayed = Replayed(source, log)
    replayed.reveal(10)
    with Site(log, "--follow", "--cache", tmp_path / "cache") as site:
        for words_given, number in ((["--back-to", "3"], 3), (["--newest"], 10)):
            assert cli.run(["published", str(log), *words_given]) == 0
            deadline = time.monotonic() + 10
            while not model_of(site)["versions"][0].endswith(f".{number}"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            _, found = site.infer({"inputs": inputs_of(table)})
            step = int(found["model_version"].partition(".")[0])
            np.testing.assert_array_equal(np.float32(found["outputs"][0]["data"]), expected(run, step, table))
        assert site.stop() == 130
    capsys.readouterr()
    assert cli.run(["published", str(log), "--back-to", "99"]) == 2
    assert (
        capsys.readouterr().err
        == f"girih: {log}: version 99 is not there; there are 1 to 10; name one of them\n"
    )
    assert cli.run(["published", str(log)]) == 0
    shown = capsys.readouterr().out
    assert f"{log}: newest version 10, of step 10" in shown
    assert "available versions: 1 to 10" in shown
    with Site(log, "--follow", "--cache", tmp_path / "cache") as site:  # with what it left there
        assert "goes on with version 10" in "".join(site.errors)


def test_a_follower_that_is_killed_is_started_again(patient, tmp_path):
    _, source = patient
    replayed = Replayed(source, tmp_path / "log")
    replayed.reveal(3)
    with Site(tmp_path / "log", "--follow", "--cache", tmp_path / "cache") as site:
        children = subprocess.run(
            ["pgrep", "-P", str(site.process.pid), "-f", "girih.serving.following"],
            capture_output=True,
            text=True,
            check=True,
        )
        (child,) = children.stdout.split()
        subprocess.run(["kill", "-9", child], check=True)
        replayed.reveal(7)
        deadline = time.monotonic() + 30
        while not model_of(site)["versions"][0].endswith(".7"):
            assert time.monotonic() < deadline, site.errors
            time.sleep(0.05)
        assert site.stop() == 130
    assert "the follower ended with status -9; started another" in "".join(site.errors)


def test_a_follower_is_nice(patient, tmp_path):
    _, source = patient
    Replayed(source, tmp_path / "log").reveal(3)
    with Following(Log(Storage.at(tmp_path / "log")), tmp_path / "cache", print) as following:
        pid = following._child.process.pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 5
        session = Path(f"/proc/{pid}/autogroup")  # Linux shares cores by sessions first
        if session.exists():
            assert session.read_text().endswith(" nice 5\n")


def test_a_follower_is_started_again_once_the_system_starts_processes(patient, tmp_path, monkeypatch):
    _, source = patient
    replayed, told = Replayed(source, tmp_path / "log"), []
    replayed.reveal(3)
    popen, errors = subprocess.Popen, [OSError(errno.EAGAIN, "no more processes")] * 2

    def started(*words, **options):
        if errors:
            raise errors.pop()
        return popen(*words, **options)

    with Following(Log(Storage.at(tmp_path / "log")), tmp_path / "cache", told.append) as following:
        monkeypatch.setattr(subprocess, "Popen", started)
        os.kill(following._child.process.pid, signal.SIGKILL)
        replayed.reveal(7)
        deadline = time.monotonic() + 60
        while version_in(tmp_path / "cache").number != 7:
            assert time.monotonic() < deadline, told
            time.sleep(0.05)
    assert told == [
        "the follower ended with status -9; cannot start another: [Errno 11] no more processes; tries again",
        "the follower ended with status -9; started another",
    ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["models", "--cache", "there"], "--cache: is for --follow; leave it out"),
        (["{run}", "--follow"], "this run publishes nothing; train it with [publish] to"),
    ],
)
def test_what_cannot_be_followed_is_one_line(log_source, tmp_path, given, told, capsys):
    run = tmp_path / "run"
    publish_here(log_source / "config.toml", run, tmp_path / "log", *EVERY, "train.max_steps=2")
    (run / "config.toml").write_text(
        (run / "config.toml").read_text().replace("[publish]", "[metrics]").replace("to = ", "targets = ")
    )
    assert cli.run(["serve", *(word.format(run=run) for word in given)]) == 2
    assert told in capsys.readouterr().err


def test_a_run_names_the_log_that_it_publishes_to(log_source, tmp_path, capsys):
    config, run, log = log_source / "config.toml", tmp_path / "run", tmp_path / "log"
    publish_here(config, run, log, *EVERY, "train.max_steps=2")
    assert cli.run(["published", str(run)]) == 0
    assert f"{log}: newest version" in capsys.readouterr().out
    assert cli.run(["published", str(run), "--back-to", "1", "--newest"]) == 2
    assert cli.run(["published", str(tmp_path / "nowhere")]) == 2
    assert "nothing was published there" in capsys.readouterr().err
