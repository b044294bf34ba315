"""How runs of real processes end before they train: by a signal, or because a process dies while others begin."""

import os
import signal
import time
from pathlib import Path

import pytest
from running import BEGIN_S, processes_of
from scenes import write

pytestmark = pytest.mark.slow

SIGNALS = [signal.SIGTERM, signal.SIGINT]
HYBRID = ["strategy.trainers=2", "strategy.embedding_servers=2"]
SOON_S = 10  # two on an idle machine


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("beginnings"), num_examples=1601)


def wait_for(running, happened):
    until = time.monotonic() + BEGIN_S
    while not (found := happened()):
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < until, running.abort()
        time.sleep(0.005)
    return found


def has_begun(running):
    """Whether a process loads what it needs: numpy, or torch."""
    maps = Path("/proc", str(running.process.pid), "maps").read_text()
    return "numpy" in maps or "torch" in maps


def process_of(running, role, index):
    """The process that is to be a role, which may have none yet."""
    found = []
    for process in processes_of(running.mark):
        words = (process / "cmdline").read_bytes().split(b"\0")
        variables = (process / "environ").read_bytes().split(b"\0")
        if (role.encode() in words and b"girih.cluster.child" in words) or (
            role == "trainer" and f"RANK={index}".encode() in variables
        ):
            found.append(int(process.name))
    found.sort()
    place = 0 if role == "trainer" else index
    return found[place] if len(found) > place else None


def ended(running, started_s):
    told = running.ends(130)
    took_s = time.monotonic() - started_s
    assert "Traceback" not in told
    assert not (running.run / "processes.json").exists()
    assert took_s < SOON_S
    return told


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("strategy", ["local", "hybrid"])
def test_a_signal_before_any_role_is_started_leaves_nothing(begin, strategy, number):
    running = begin(strategy)
    wait_for(running, lambda: has_begun(running))
    running.process.send_signal(number)
    ended(running, time.monotonic())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_roles_begin_leaves_nothing(begin, number):
    running = begin("hybrid", *HYBRID)
    wait_for(running, lambda: process_of(running, "loader", 0))
    running.process.send_signal(number)
    ended(running, time.monotonic())


@pytest.mark.parametrize(
    ("role", "index"),
    [
        ("trainer", 1),
        pytest.param("embedding-server", 1, marks=pytest.mark.heavy),
        pytest.param("loader", 0, marks=pytest.mark.heavy),
    ],
)
def test_a_process_that_dies_while_others_begin_is_named(begin, role, index):
    running = begin("hybrid", *HYBRID, "cluster.max_restarts=0")
    os.kill(wait_for(running, lambda: process_of(running, role, index)), signal.SIGKILL)
    told = running.ends(1).splitlines()  # twice where the machine is so busy that the launcher tells it too
    why = (
        ""
        if role == "trainer"
        else "a process that has not begun is started again at most cluster.max_restarts = 0 times; "
    )
    way_on = "there is no checkpoint yet: give the same command again"
    assert set(told) == {f"girih: {role} {index} was killed by signal 9; {why}{way_on}"}
