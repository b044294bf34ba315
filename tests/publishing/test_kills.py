"""SIGKILL of publisher and follower at random moments: whoever serves has one whole version at any time, and the newest in the end."""

import json
import os
import random
import signal
import subprocess
import time

import pytest
from following import SMALL, assert_is, follower, patiently, publish_here, version_in, words

from girih.checkpoint import Storage, find
from girih.errors import GirihError
from girih.publishing.log import Log
from girih.serving.signature import NAME

NUM_KILLS = int(os.environ.get("GIRIH_KILLS", "2"))
"""The first one is the follower's, the second the publisher's."""
STEPS = 90
EACH = [
    f"train.max_steps={STEPS}", "train.epochs=3", "data.batch_size=64", "checkpoint.keep=200",
    SMALL,
]  # fmt: skip
TRAIN = """
import os, sys, time
from girih import cli
from girih.training.loop import Loop

account, followed = Loop._account, sys.argv.pop(1)

def slowly(self, step):
    account(self, step)
    time.sleep(0.06 if os.path.exists(followed) else 0.6)

Loop._account = slowly
sys.exit(cli.run(sys.argv[1:], own_process=True))
"""
"""Steps that take long enough to be killed amid, and longer until somebody follows."""
FOLLOW = """
import sys, time
from pathlib import Path
from girih.checkpoint import Storage
from girih.publishing.log import Log
from girih.serving.follow import Follower

found = Follower(Log(Storage.at(sys.argv[1])), Path(sys.argv[2]), lambda line: print(line, flush=True))
while True:
    found.poll()
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def expected(log_source, tmp_path_factory):
    """Checkpoints of every step of a run that nobody killed."""
    directory = tmp_path_factory.mktemp("expected")
    run = directory / "run"
    publish_here(
        log_source / "config.toml",
        run,
        directory / "log",
        *EACH,
        "checkpoint.every_steps=1",
        "publish.every_steps=30",
    )
    return run / "checkpoints"


class Player:
    """A process that is killed and started again."""

    def __init__(self, command, out, again=None):
        self._command, self._again, self._out = command, again or command, out
        self._begin(command)

    def _begin(self, command):
        self.process = subprocess.Popen(list(map(str, command)), stdout=self._out, stderr=self._out)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._begin(self._again)

    def end(self):
        self.process.kill()
        self.process.wait()


def look(directory, expected, seen):
    """Whoever serves looks: what is there is the state of one step, or a moment ago it was."""
    try:
        version = version_in(directory)
        if version is None or version.number in seen:
            return
        assert_is(version, directory, expected / f"step-{version.step:08d}")
        seen[version.number] = version.step
    except GirihError:
        now = version_in(directory)  # gone meanwhile: another one is there
        assert now is not None
        assert now != version


@pytest.mark.heavy
@pytest.mark.timeout(240 + 30 * NUM_KILLS)
@pytest.mark.parametrize("seed", [1])
def test_a_follower_serves_whole_versions_alone_and_catches_up(config, tmp_path, expected, seed):
    rng, seen = random.Random(seed), {}
    run, log, directory = tmp_path / "run", tmp_path / "log", tmp_path / "followed"
    every = [
        *EACH,
        "checkpoint.every_steps=7",
        "publish.every_steps=1",
        "publish.snapshot_every=6",
        "publish.keep=3",
    ]
    script, slow = tmp_path / "follow.py", tmp_path / "train.py"
    script.write_text(FOLLOW)
    slow.write_text(TRAIN)

    def training(run):
        python, _, _, *rest = words(config, run, log, *every)
        return [python, slow, directory / NAME, *rest]

    train = training(run)
    out = (tmp_path / "out").open("w")
    publisher = Player(train, out, [*train, "--resume"])
    followers = Player([train[0], script, log, directory], out)
    kills = 0
    try:
        until = None
        while kills < NUM_KILLS:
            look(directory, expected, seen)
            time.sleep(0.01)
            if until is None:  # until there is something to lose
                until = time.monotonic() + rng.uniform(0.0, 2.0) if len(seen) > 1 else None
                assert publisher.process.poll() is None, (tmp_path / "out").read_text()
                continue
            ended = publisher.process.poll() is not None
            if time.monotonic() < until and not ended:
                continue
            if ended:  # it is through: another run of the same, to the same log
                run = tmp_path / f"run-{kills}"
                train = training(run)
                publisher = Player(train, out, [*train, "--resume"])
            (publisher if rng.random() < 0.6 and not ended else followers).kill()
            kills += 1
            until = time.monotonic() + rng.uniform(0.3, 9.0)
        while publisher.process.poll() is None:
            look(directory, expected, seen)
            time.sleep(0.01)
        deadline = time.monotonic() + 60
        newest = Log(Storage.at(log)).head().newest
        while (version := version_in(directory)) is None or version.number != newest.number:
            look(directory, expected, seen)
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.02)
        look(directory, expected, seen)
        assert version.step == STEPS
        assert_is(version, directory, expected / f"step-{STEPS:08d}")
    finally:
        publisher.end()
        followers.end()
        out.close()
    assert len(seen) > NUM_KILLS
    told = (tmp_path / "out").read_text()
    assert "version " in told
    assert "Traceback" not in told
    late = follower(log, tmp_path / "late")
    late.poll()
    assert_is(late.current, tmp_path / "late", expected / f"step-{STEPS:08d}")
    late.close()


def processes(run, role):
    try:
        found = json.loads((run / "processes.json").read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [each["pid"] for each in found if each["role"] == role]


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_an_embedding_server_that_comes_back_has_all_rows_published_anew(config, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    options = [
        "train.epochs=3", "data.batch_size=64", "strategy.staleness=0", "strategy.embedding_servers=2", "publish.every_steps=2",
        "publish.keep=100", "checkpoint.keep=3", SMALL,
    ]  # fmt: skip
    command = words(config, run, log, *options, strategy="hybrid")
    with (tmp_path / "out").open("w") as out:
        train = subprocess.Popen(command, stdout=out, stderr=out, env=patiently())
        there, deadline = Log(Storage.at(log)), time.monotonic() + 120
        while (
            not (pids := processes(run, "embedding-server"))
            or (head := there.head()) is None
            or head.newest.number < 5
        ):
            assert train.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = there.head().newest.number
        os.kill(pids[0], signal.SIGKILL)
        assert train.wait(240) == 0, (tmp_path / "out").read_text()
    assert json.loads((run / "summary.json").read_text())["restarts"]["embedding-server"] == 1
    alone = set(there.numbers(whole=True)) - set(there.numbers(whole=False))
    assert any(number > before for number in alone)
    found = follower(log, tmp_path / "followed")
    for number in there.versions():
        there.go_back_to(number)
        found.poll()
        assert found.current.number == number
    assert_is(found.current, tmp_path / "followed", find(run).local)
    found.close()
