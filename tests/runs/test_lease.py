"""Who has a run directory, and who had it."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from girih.cluster import segments
from girih.cluster.segments import owned_by, owner_prefix, start_of
from girih.errors import RunDirectoryError
from girih.runs.directory import LOCK, RunDirectory
from girih.runs.lease import Lease

pytestmark = pytest.mark.skipif(not segments._namespace(), reason="no /proc here")


def lease_of(pid):
    return replace(Lease.own(), pid=pid, start=start_of(pid), segments=owned_by(pid))


def leave(directory, lease):
    with (directory / LOCK).open("a+") as file:
        lease.write(file)


@pytest.fixture
def sleeping():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.communicate()


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_whose_launcher_lives_is_taken_though_nobody_holds_its_lock(tmp_path, sleeping, resume):
    """As while its trainers begin anew."""
    leave(tmp_path, lease_of(sleeping.pid))
    (tmp_path / "config.toml").touch()
    with pytest.raises(RunDirectoryError, match=f"process {sleeping.pid} on .* is writing this run"):
        RunDirectory(tmp_path, resume=resume)


def test_a_launcher_that_ended_and_is_not_waited_for_does_not_live(tmp_path, sleeping):
    leave(tmp_path, lease := lease_of(sleeping.pid))
    assert lease.lives
    sleeping.kill()
    os.waitid(os.P_PID, sleeping.pid, os.WEXITED | os.WNOWAIT)  # its parent may not do so for long
    assert not lease.lives
    RunDirectory(tmp_path).close()


def test_a_directory_whose_launcher_is_gone_while_another_process_ends(tmp_path, sleeping):
    held = RunDirectory(tmp_path)
    held._lock.truncate(0)
    gone = replace(lease_of(sleeping.pid), start="1", segments=owner_prefix(sleeping.pid, "1"))
    gone.write(held._lock)
    with pytest.raises(RunDirectoryError, match=f"process {gone.pid} on .* started is ending; try again"):
        RunDirectory(tmp_path)
    held.close()
    RunDirectory(tmp_path).close()


def test_what_a_dead_run_left_is_removed_by_the_next_one_there(tmp_path, sleeping, monkeypatch):
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    run.mkdir()
    monkeypatch.setattr(segments, "SHARED_MEMORY", str(memory))
    lease = lease_of(sleeping.pid)
    sleeping.communicate()
    leave(run, lease)
    left = [
        memory / f"{lease.segments}0a1b-0-0",
        run / "processes.json",
        run / ".summary.json.unfinished",
    ]
    for file in (*left, other := memory / "girih-other"):
        file.touch()
    with RunDirectory(run, resume=True):
        assert not any(file.exists() for file in left)
        assert other.exists()
        with (run / LOCK).open() as file:
            assert Lease.read(file) == Lease.own()
    assert (run / LOCK).read_text() == ""


def test_a_lease_of_another_machine_says_nothing_where_nobody_holds_the_lock(tmp_path, sleeping):
    leave(tmp_path, replace(lease_of(sleeping.pid), boot="another"))
    RunDirectory(tmp_path).close()
