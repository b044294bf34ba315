"""Tests of every launcher, by real processes, to subclass: ``class TestMine(LauncherSuite)`` with a ``make``."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from girih.cluster.launchers.launcher import Handle, Launcher
from girih.cluster.roles import RoleName
from girih.cluster.supervisor import Supervisor
from girih.comm.registry import Entry, LocalRegistry, RegistryServer, find
from girih.comm.registry.remote import RemoteRegistry
from girih.errors import RoleError
from girih.processes.segments import new_prefix_of_nodes
from support.acting import Acting

TOLD_S = 60.0
SECRET = b"of this run"
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc here")


class LauncherSuite:
    """Tests of a launcher, of its handles, and of a supervisor that has it. All processes are loaders on this host."""

    def make(self, segments: str = "") -> Launcher:
        """A launcher; ``segments`` begins the names of the shared memory of its processes."""
        raise NotImplementedError

    def traces(self) -> tuple[int, int]:
        """Descriptors and threads of this process, of which handles leave none."""
        return traces()

    def clean_up(self) -> bool:
        """Does what removes what killed processes left, where they cannot themselves."""
        return False

    @pytest.fixture
    def start(self) -> Iterator[Callable[..., Handle]]:
        """Starts a process for a role, which it is told; in the end it is gone, and its handle holds nothing."""
        launcher, handles, before = self.make(), [], self.traces()

        def start(role: Acting | None, incarnation: int = 0, threads: int | None = 1) -> Handle:
            index = 1 if role is None else role.index
            handles.append(launcher.start(RoleName.LOADER, index, incarnation, threads))
            if role is not None:
                handles[-1].begin(pickle.dumps(role))
            return handles[-1]

        yield start
        for handle in handles:
            handle.kill()
            assert handle.wait(TOLD_S) is not None
            handle.close()
        assert not any(runs(handle.pid) for handle in handles)
        assert until(lambda: all(now <= then for now, then in zip(self.traces(), before, strict=True)))

    def test_a_process_has_its_role_resources_incarnation_and_the_registry(
        self, start: Callable[..., Handle]
    ) -> None:
        server = RegistryServer(LocalRegistry(), SECRET)
        there = RemoteRegistry(server.address, SECRET)
        for incarnation in (0, 1):  # one that was killed comes back in its next life
            handle = start(Acting(index=2, told="", registry=there), incarnation, threads=3)
            assert "OMP_NUM_THREADS=3" in handle.wait_for_address(TOLD_S)
            assert handle.address == handle.wait_for_address(0.0)
            assert server.registry.get("loader 2") == f"life {incarnation}"
            assert (handle.name, handle.index, handle.incarnation) == ("loader", 2, incarnation)
            assert handle.host
            assert handle.status() is None
            assert handle.wait(0.01) is None
            handle.kill()
            assert handle.wait(TOLD_S) == handle.status() == -signal.SIGKILL
        there.close()
        server.close()

    def test_an_orderly_end_has_status_0_whether_it_was_given_a_role_or_not(
        self, start: Callable[..., Handle]
    ) -> None:
        served, idle = start(Acting()), start(None)
        assert served.wait_for_address(TOLD_S) == "there"
        for handle in (served, idle):
            handle.end()
            handle.end()
        assert [handle.wait(TOLD_S) for handle in (served, idle)] == [0, 0]

    def test_one_that_does_not_heed_its_end_is_killed(self, start: Callable[..., Handle]) -> None:
        deaf = start(Acting("deaf"))
        assert deaf.wait_for_address(TOLD_S)
        deaf.end()
        assert deaf.wait(0.2) is None
        begun = time.monotonic()
        deaf.kill()
        assert deaf.wait(TOLD_S) == -signal.SIGKILL
        assert time.monotonic() < begun + 10

    def test_one_that_ends_before_it_listens_is_not_waited_for(self, start: Callable[..., Handle]) -> None:
        refusing, killed = start(Acting("refuse")), start(Acting(index=1))
        killed.kill()
        for handle, status in ((killed, -signal.SIGKILL), (refusing, 1)):
            assert handle.wait_for_address(TOLD_S) == ""
            assert handle.wait(TOLD_S) == status
        assert refusing.last_words() == "ConfigError: there is nothing to load"
        killed.begin(pickle.dumps(Acting()))  # nobody hears it
        killed.end()

    @pytest.mark.parametrize(
        ("act", "status", "words"),
        [("raise", 1, "ValueError: a thing went wrong"), ("exit", 3, "its last words")],
    )
    def test_its_last_words_are_the_error_that_it_told_or_the_end_of_what_it_printed(
        self, start: Callable[..., Handle], act: str, status: int, words: str
    ) -> None:
        handle = start(Acting(act))
        assert handle.wait(TOLD_S) == status
        assert handle.address == "there"
        assert handle.last_words().strip().endswith(words)

    def test_a_supervisor_names_the_one_that_is_killed_by_role_and_index_and_ends_the_others(self) -> None:
        failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        registry = LocalRegistry()
        supervisor = Supervisor(self.make(), registry, failures.put)
        supervisor.start("loader", [pickle.dumps(Acting("deaf")), pickle.dumps(Acting(index=1))])
        other, victim = supervisor.handles
        assert find(registry, "loader", 1) == Entry("there", 0, victim.pid, victim.host)
        victim.kill()
        error = failures.get(timeout=TOLD_S)
        assert supervisor.failure() is error
        assert isinstance(error, RoleError)
        assert str(error) == "loader 1 was killed by signal 9: what anybody prints"
        assert other.wait(TOLD_S) == -signal.SIGKILL
        supervisor.close(patience_s=0.0)
        assert supervisor.handles == []
        assert registry.get("role/loader/1") is None
        assert failures.empty()

    @needs_proc
    def test_no_process_outlives_the_one_that_has_the_launcher_however_that_ends(self) -> None:
        """One of them is deaf, and ends before it has removed its shared memory: its launcher is not there to do it."""
        segments = new_prefix_of_nodes()
        left = Path("/dev/shm", f"{segments}0-rows")
        left.write_bytes(b"rows")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, type(self).__module__, type(self).__name__, segments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            told = "" if holder.stdout is None else holder.stdout.readline()
            pids = [int(pid) for pid in told.split()]
            assert len(pids) == 2
            assert all(map(runs, pids))
            holder.kill()
        assert until(lambda: not any(map(runs, pids)))
        assert until(lambda: self.clean_up() or not left.exists())


HOLD = "import sys; from support.launcher_suite import hold; hold(*sys.argv[1:])"


def hold(module: str, suite: str, segments: str) -> None:
    """Starts two processes by the launcher of a suite, says which, and waits to be killed."""
    launcher: Launcher = getattr(importlib.import_module(module), suite)().make(segments)
    handles = []
    for role in (Acting(), Acting("deaf", 1)):
        handles.append(launcher.start(RoleName.LOADER, role.index, 0, 1))
        handles[-1].begin(pickle.dumps(role))
    if all(handle.wait_for_address(TOLD_S) for handle in handles):
        print(*(handle.pid for handle in handles), flush=True)
        time.sleep(600)


def traces() -> tuple[int, int]:
    """Counts descriptors and threads of this process; the former are known where there is a /proc."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return descriptors, threading.active_count()


def runs(pid: int) -> bool:
    """Whether a process of this host is there and no zombie."""
    try:
        return "Z" not in Path("/proc", str(pid), "stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(happened: Callable[[], bool]) -> bool:
    """Waits for something to happen; whether it did in time."""
    end_s = time.monotonic() + TOLD_S
    while not (done := happened()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return done
