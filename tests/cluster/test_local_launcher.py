"""Processes that are started, watched and ended; all of them are real."""

import pickle
import signal
import sys
import threading
import time

import pytest

from girih.cluster.launchers.local import LocalLauncher
from girih.cluster.roles import HostSpec, RoleName, title
from girih.cluster.supervisor import Supervisor
from girih.comm.registry import Entry, LocalRegistry, find
from girih.errors import ConfigError, RoleError
from support.acting import Acting
from support.launcher_suite import LauncherSuite

TOLD_S = 60


class TestLocalLauncher(LauncherSuite):
    def make(self, segments=""):
        return LocalLauncher(hello={"segments": segments})


def specs(*roles):
    return [pickle.dumps(role) for role in roles]


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
    hosts = {"loader 1": HostSpec(("env", "GIRIH_TEST_PLACE=here"), environment={"RANK": "5"})}
    supervisor = Supervisor(LocalLauncher(hosts), LocalRegistry(), told)
    yield supervisor
    supervisor.close(patience_s=0.0)


@pytest.mark.slow
def test_roles_run_side_by_side_each_in_its_place_and_are_ended_by_name(supervisor, told, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    supervisor.prepare({"loader": 1})
    (prepared,) = supervisor.handles
    told_where = supervisor.start("loader", specs(Acting("serve", told=""), Acting("serve", 1, told="")))
    assert told_where == [
        "RANK=None OMP_NUM_THREADS=1 GIRIH_TEST_PLACE=None",  # a role is no trainer
        "RANK=5 OMP_NUM_THREADS=1 GIRIH_TEST_PLACE=here",  # unless its host_spec says so
    ]
    assert supervisor.start("embedding-worker", specs(Acting("deaf", name="embedding-worker"))) == ["there"]
    assert titles(supervisor) == ["loader 0", "loader 1", "embedding-worker 0"]
    assert supervisor.handles[0] is prepared
    *loaders, deaf = supervisor.handles
    found = find(supervisor._registry, "loader", 1)
    assert found == Entry(told_where[1], 0, loaders[1].pid, loaders[1].host)
    supervisor.end("loader")
    assert [handle.status() for handle in loaders] == [0, 0]
    assert supervisor._registry.get("role/loader/1") is None
    assert deaf.status() is None
    assert titles(supervisor) == ["embedding-worker 0"]
    supervisor.close(patience_s=0.1)
    assert deaf.status() == -signal.SIGKILL
    assert supervisor.handles == []
    assert not told.errors


def titles(supervisor):
    return [title(handle.name, handle.index) for handle in supervisor.handles]


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("raise", r"^loader 0 ended with status 1: ValueError: .*a thing went wrong"),
        ("exit", r"^loader 0 ended with status 3: .*its last words$"),
    ],
)
def test_what_a_role_says_last_is_told(supervisor, told, act, message):
    supervisor.start("loader", specs(Acting(act)))
    with pytest.raises(RoleError, match=f"(?s){message}"):
        raise told.error()


@pytest.mark.parametrize(
    ("act", "kind", "why"),
    [
        ("refuse", ConfigError, "there is nothing to load"),
        ("vanish", RoleError, "loader 0 ended with status 7"),
    ],
)
def test_a_role_that_cannot_begin_says_why(supervisor, act, kind, why):
    with pytest.raises(kind, match=f"^{why}$"):
        supervisor.start("loader", specs(Acting(act)))


def test_roles_that_end_because_another_was_killed_while_they_began_are_not_named(supervisor, told):
    supervisor.prepare({"embedding-worker": 2})
    supervisor.handles[1].kill()  # none of them has a role yet
    why = "a process that has not begun is restarted at most cluster.max_restarts = 0 times"
    error = f"embedding-worker 1 was killed by signal 9; {why}"
    with pytest.raises(RoleError, match=f"^{error}$"):
        supervisor.start("embedding-server", specs(Acting("mute", name="embedding-server")))
    assert str(told.error()) == error


def trainers(told, command):
    launcher = LocalLauncher(trainer=["sh", "-c", command], num_trainers=4)
    return Supervisor(launcher, LocalRegistry(), told, num_trainers=4)


@pytest.mark.parametrize("status", [0, 130])
def test_a_trainer_that_ends_in_good_order_is_no_failure(told, status):
    supervisor = trainers(told, f"exit {status}")
    assert supervisor.start_trainer(1).wait(TOLD_S) == status
    assert not supervisor._has_failed()
    time.sleep(0.4)
    assert not told.errors
    supervisor.close(patience_s=0.0)


def test_a_trainers_environment_and_what_it_says_of_the_users_mistake(told):
    supervisor = trainers(told, 'echo "girih: rank $RANK of $WORLD_SIZE: no such column" >&2; exit 2')
    supervisor.start_trainer(3)
    error = told.error()
    assert isinstance(error, ConfigError)
    assert str(error) == "rank 3 of 4: no such column"
    supervisor.close(patience_s=0.0)


def test_a_trainer_that_ends_because_another_was_killed_is_not_the_one_that_is_named(told):
    supervisor = trainers(told, "if [ $RANK = 2 ]; then kill -9 $$; fi; echo the other is gone >&2; exit 1")
    with supervisor._lock:  # both have ended when the first of them is told of
        supervisor.start_trainer(1).wait(TOLD_S)
        supervisor.start_trainer(2).wait(TOLD_S)
    assert str(told.error()) == "trainer 2 was killed by signal 9"
    supervisor.close(patience_s=0.0)


def test_an_end_that_is_expected_is_no_failure(told):
    supervisor = trainers(told, "sleep 600")
    handle = supervisor.start_trainer(1)
    supervisor.expect_end()
    handle.kill()
    handle.wait()
    time.sleep(0.4)
    assert not told.errors
    supervisor.close(patience_s=0.0)


def test_only_the_first_trainer_has_the_terminal_and_each_learns_where_the_run_is(capfd):
    say = "import os; from girih.processes.pipe import Pipe; print(Pipe.inherited().receive(), os.getpgid(0) == os.getpgrp())"
    launcher = LocalLauncher(trainer=[sys.executable, "-c", say], num_trainers=2, hello={"registry": "here"})
    first, second = (launcher.start(RoleName.TRAINER, index, 0, None) for index in (0, 1))
    assert [each.wait(TOLD_S) for each in (first, second)] == [0, 0]
    assert capfd.readouterr().out == "{'registry': 'here', 'incarnation': 0} True\n"
    for each in (first, second):
        each.close()
