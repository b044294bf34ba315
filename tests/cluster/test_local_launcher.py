"""Processes that are started, watched and ended; all of them are real."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from acting import PLACE, Acting, kill

from girih.cluster import HostSpec
from girih.cluster.launchers.local import Supervisor
from girih.errors import ConfigError, RoleError

TOLD_S = 60


class Told:
    """Hears of a failure, in the supervisor's thread."""

    def __init__(self):
        self.errors, self._heard = [], threading.Event()

    def __call__(self, error):
        self.errors.append(error)
        self._heard.set()

    def error(self):
        assert self._heard.wait(TOLD_S)
        time.sleep(0.3)
        (error,) = self.errors  # once, whatever else ends after it
        return error


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def supervisor(told):
    with_mark = HostSpec(("env", "GIRIH_TEST_PLACE=here"), environment={**PLACE.environment, "RANK": "5"})
    supervisor = Supervisor(told, {"loader": PLACE, "loader 1": with_mark})
    yield supervisor
    supervisor.close(patience_s=0.0)


def test_roles_run_side_by_side_each_in_its_place_and_are_ended_by_name(supervisor, told, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    supervisor.prepare({"loader": 1})
    (prepared,) = supervisor.children
    roles = [Acting("serve", told=""), Acting("serve", 1, told=""), Acting("deaf", name="embedding-worker")]
    supervisor._places = {**supervisor._places, "embedding-worker": PLACE}
    assert supervisor.start(roles) == [
        "RANK=None OMP_NUM_THREADS=1 GIRIH_TEST_PLACE=None",  # a role is no trainer
        "RANK=5 OMP_NUM_THREADS=1 GIRIH_TEST_PLACE=here",  # unless its host_spec says so
        "there",
    ]
    assert [child.title for child in supervisor.children] == ["loader 0", "loader 1", "embedding-worker 0"]
    assert supervisor.children[0] is prepared
    *loaders, deaf = [child.process for child in supervisor.children]
    supervisor.end("loader")
    assert [process.returncode for process in loaders] == [0, 0]
    assert deaf.poll() is None
    assert [child.title for child in supervisor.children] == ["embedding-worker 0"]
    supervisor.close(patience_s=0.1)
    assert deaf.returncode == -signal.SIGKILL
    assert supervisor.children == ()
    assert not told.errors


def test_a_role_that_is_killed_is_named_and_the_others_end(supervisor, told):
    supervisor.start([Acting("serve"), Acting("deaf", 1)])
    victim, other = [child.process for child in supervisor.children]
    assert not supervisor.has_failed()
    kill(victim)
    assert supervisor.has_failed()
    error = told.error()
    assert isinstance(error, RoleError)
    assert str(error) == "loader 0 was killed by signal 9: what anybody prints"
    assert other.wait(TOLD_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("raise", r"^loader 0 ended with status 1: ValueError: .*a thing went wrong"),
        ("exit", r"^loader 0 ended with status 3: .*its last words$"),
    ],
)
def test_what_a_role_says_last_is_told(supervisor, told, act, message):
    supervisor.start([Acting(act)])
    with pytest.raises(RoleError, match=f"(?s){message}"):
        raise told.error()


def test_a_role_that_cannot_begin_says_why(supervisor):
    with pytest.raises(ConfigError, match="there is nothing to load"):
        supervisor.start([Acting("refuse")])
    with pytest.raises(RoleError, match="loader 1 could not begin"):
        supervisor.start([Acting("vanish", 1)])


STARTS = """
import sys, time
from acting import PLACE, Acting
from girih.cluster.launchers.local import Supervisor
supervisor = Supervisor(print, {"loader": PLACE})
supervisor.start([Acting("serve"), Acting("deaf", 1)])
print(*(child.process.pid for child in supervisor.children), flush=True)
time.sleep(600)
"""


def test_roles_end_with_the_one_that_started_them_however_that_ends():
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTS],
        env={**os.environ, **PLACE.environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        roles = [Path("/proc", pid) for pid in starter.stdout.readline().split()]
        assert len(roles) == 2
        assert all(role.exists() for role in roles)
        kill(starter)
    until = time.monotonic() + TOLD_S
    while any(role.exists() and "Z" not in (role / "stat").read_text().split()[2] for role in roles):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("status", [0, 130])
def test_a_trainer_that_ends_in_good_order_is_no_failure(supervisor, told, status):
    supervisor.start_trainer(1, ["sh", "-c", f"exit {status}"], {})
    supervisor.wait_for_trainers()
    assert not supervisor.has_failed()
    time.sleep(0.4)
    assert not told.errors


def test_a_trainers_environment_and_what_it_says_of_the_users_mistake(supervisor, told):
    command = 'echo "girih: rank $RANK: no such column" >&2; exit 2'
    supervisor.start_trainer(3, ["sh", "-c", command], {"RANK": "3"})
    error = told.error()
    assert isinstance(error, ConfigError)
    assert str(error) == "rank 3: no such column"


def test_a_trainer_that_ends_because_another_was_killed_is_not_the_one_that_is_named(supervisor, told):
    with supervisor._lock:  # both have ended when the first of them is told of
        supervisor.start_trainer(1, ["sh", "-c", "echo the other is gone >&2; exit 1"], {})
        supervisor.wait_for_trainers()
        supervisor.start_trainer(2, ["sh", "-c", "kill -9 $$"], {})
        supervisor.wait_for_trainers()
    assert str(told.error()) == "trainer 2 was killed by signal 9"


def test_an_end_that_is_expected_is_no_failure(supervisor, told):
    supervisor.start_trainer(1, ["sleep", "600"], {})
    supervisor.expect_end()
    kill(supervisor.children[0].process)
    time.sleep(0.4)
    assert not told.errors
