"""The context of one trainer, and what becomes of it when a process is gone."""

import json
import os
import pickle
import signal
import sys
import threading
import time

import pytest

from girih.cluster import cluster, supervisor
from girih.cluster.cluster import Cluster
from girih.cluster.rendezvous import RENDEZVOUS
from girih.comm.registry import LocalRegistry, find
from girih.comm.registry.remote import RemoteRegistry
from girih.comm.service import connect, listen
from girih.errors import ConfigError, RoleError, WireTimeout
from support.acting import Acting


@pytest.fixture
def alone(monkeypatch):
    for name in RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(supervisor, "KNOWN_S", 0.1)
    monkeypatch.setattr(cluster, "GRACE_S", 0.1)
    cluster_alone = Cluster()
    yield cluster_alone
    cluster_alone.close(failed=True)


def test_a_process_alone_joins_itself(alone, monkeypatch):
    cluster = Cluster.join(1)
    assert (cluster.ranks.rank, cluster.ranks.size, cluster.host("trainer", 0)) == (0, 1, "127.0.0.1")
    assert cluster.secret != Cluster.join(1).secret
    with pytest.raises(ConfigError, match=r"trainers = 3: this is one process; .*--nproc-per-node=3"):
        Cluster.join(3)
    for name, value in zip(RENDEZVOUS, ("1", "4", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="trainers = 3, but 4 were started"):
        Cluster.join(3)


def test_processes_are_shown_while_they_run_and_a_killed_one_is_named(alone, tmp_path):
    alone.show_in(tmp_path)
    shown = tmp_path / "processes.json"
    assert not shown.exists()
    alone.prepare({"loader": 2})
    assert alone.start("loader", lambda: [Acting("serve", 0, "a"), Acting("deaf", 1, "b")]) == ("a", "b")
    processes = json.loads(shown.read_text())
    assert [(each["role"], each["index"], each["endpoint"], each["incarnation"]) for each in processes] == [
        ("trainer", 0, "", 0),
        ("loader", 0, "a", 0),
        ("loader", 1, "b", 0),
    ]
    assert set(processes[0]) == {"role", "index", "pid", "host", "endpoint", "incarnation"}
    children = list(alone._supervisor.handles)
    assert [each["pid"] for each in processes] == [os.getpid(), *(child.pid for child in children)]
    assert not alone.ranks.lost.is_set()
    children[1].kill()
    children[1].wait()
    with pytest.raises(RoleError, match=r"^loader 1 was killed by signal 9\b"), alone.explaining():
        raise WireTimeout("shm://…: no answer")
    assert alone.ranks.lost.is_set()  # nobody waits for what it was to write
    alone.close(failed=True)
    assert not shown.exists()
    assert all(child.status() is not None for child in children)


def test_what_is_no_sign_of_a_lost_process_passes(alone):
    with pytest.raises(ConfigError), alone.explaining():
        raise ConfigError("x")
    with pytest.raises(RuntimeError, match="a tensor"), alone.explaining():
        raise RuntimeError("a tensor")
    with pytest.raises(WireTimeout, match="late"), alone.explaining():
        raise WireTimeout("late")
    with pytest.raises(RoleError, match="another trainer is gone"), alone.explaining():
        raise RuntimeError("[…/gloo/transport/tcp/pair.cc:534] Connection closed by peer")


@pytest.fixture
def calling(alone):
    """A connection to a loader that never answers."""
    alone.start("loader", lambda: [Acting("deaf")])
    asked = threading.Event()
    with listen(lambda request: asked.set(), address="shm://", secret=alone.secret) as server:
        client = connect(server.address, secret=alone.secret)
        yield client
        client.close()


def test_a_call_in_progress_raises_when_a_process_is_gone_and_nothing_of_the_users_process_is_changed(
    alone, calling
):
    before = (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT), sys.unraisablehook)
    reply = calling.call(1)
    threading.Timer(0.2, alone._supervisor.handles[0].kill).start()
    start = time.monotonic()
    with pytest.raises(RoleError, match=r"^loader 0 was killed by signal 9\b"), alone.explaining():
        reply.wait()
    assert time.monotonic() - start < 20
    assert before == (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGINT), sys.unraisablehook)


def test_roles_can_be_given_the_registry_and_find_each_other_in_it(alone):
    assert isinstance(alone.registry, LocalRegistry)
    given = []

    def roles():
        given.append(pickle.loads(pickle.dumps(alone.registry)))
        return [Acting("serve", 0, "a")]

    alone.start("loader", roles)
    assert isinstance(given[0], RemoteRegistry)
    assert find(given[0], "loader", 0).address == "a"
    assert find(given[0], "trainer", 0).pid == os.getpid()
    given[0].close()
