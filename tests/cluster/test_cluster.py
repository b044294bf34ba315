"""The context of one trainer, and what becomes of it when a process is gone."""

import json
import os
import sys
import threading
import time

import pytest
from acting import PLACE, Acting, kill

from girih.cluster import Cluster, cluster
from girih.cluster.cluster import RENDEZVOUS, _Failure
from girih.comm.group import TrainerGroup
from girih.errors import ConfigError, RoleError, WireTimeout


@pytest.fixture
def alone(monkeypatch):
    for name in RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "KNOWN_S", 0.1)
    cluster_alone = Cluster(TrainerGroup(), hosts={"loader": PLACE})
    yield cluster_alone
    cluster_alone.close(failed=True)


def test_a_process_alone_joins_itself(alone, monkeypatch):
    context = Cluster.join(1).context
    assert (context.ranks.rank, context.ranks.size, context.host) == (0, 1, "127.0.0.1")
    assert context.secret != Cluster.join(1).context.secret
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
    assert alone.context.addresses == {"loader": ("a", "b")}
    processes = json.loads(shown.read_text())
    assert [(each["role"], each["index"], each["endpoint"]) for each in processes] == [
        ("trainer", 0, ""),
        ("loader", 0, "a"),
        ("loader", 1, "b"),
    ]
    children = [child.process for child in alone._supervisor.children]
    assert [each["pid"] for each in processes] == [os.getpid(), *(child.pid for child in children)]
    assert not alone.context.ranks.lost.is_set()
    kill(children[1])
    with pytest.raises(RoleError, match=r"^loader 1 was killed by signal 9\b"), alone.explaining():
        raise WireTimeout("shm://…: no answer")
    assert alone.context.ranks.lost.is_set()  # nobody waits for what it was to write
    alone.close(failed=True)
    assert not shown.exists()
    assert all(child.returncode is not None for child in children)


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
def failure(monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 0.05)
    before = sys.unraisablehook
    failure = _Failure()
    yield failure
    failure.close()
    assert sys.unraisablehook is before


def tell(failure):
    thread = threading.Thread(target=failure.tell, args=(RoleError("it is gone"),))
    thread.start()
    return thread


def test_a_failure_reaches_a_thread_that_waits(failure):
    thread = tell(failure)
    with pytest.raises(RoleError, match="it is gone"):
        time.sleep(30)
    assert str(failure.known(0.0)) == "it is gone"
    failure.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_failure_that_comes_while_memory_is_freed_is_raised_again_and_prints_nothing(failure, capsys):
    class Slow:
        def __del__(self):
            time.sleep(30)

    def free_and_wait():
        Slow()  # freed at once: here it gets lost, and
        time.sleep(30)  # comes again

    start = time.monotonic()
    tell(failure)
    with pytest.raises(RoleError, match="it is gone"):
        free_and_wait()
    assert time.monotonic() - start < 20
    assert capsys.readouterr().err == ""


def test_a_failure_that_was_told_is_not_raised_where_processes_are_ended(failure):
    thread = tell(failure)
    failure.close()
    time.sleep(0.3)
    thread.join(5)
    assert not thread.is_alive()
