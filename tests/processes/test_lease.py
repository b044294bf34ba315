"""Who has a run directory, and who had it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from girih.errors import RunDirectoryError
from girih.processes import segments
from girih.processes.lease import Lease
from girih.processes.segments import owned_by, owner_prefix, start_of
from girih.runs.directory import LOCK, RunDirectory

pytestmark = pytest.mark.skipif(not segments._namespace(), reason="no /proc here")


def lease_of(pid):
    return replace(Lease.of_this_run(), pid=pid, start=start_of(pid), segments=owned_by(pid))


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
    with pytest.raises(RunDirectoryError, match=f"process {gone.pid} on .* are still ending; try again"):
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
            assert Lease.read(file) == Lease.of_this_run()
    assert (run / LOCK).read_text() == ""


def test_a_lease_of_another_machine_says_nothing_where_nobody_holds_the_lock(tmp_path, sleeping):
    leave(tmp_path, replace(lease_of(sleeping.pid), boot="another"))
    RunDirectory(tmp_path).close()


CRAFTED = {
    "of all runs": {"segments": "girih-"},
    "of another run": {"segments": "girih-ATTACK"},
    "of another process": {"pid": 1},
    "of another start": {"start": "12"},
    "of another namespace": {"segments": "girih-4194999.77.1-"},
    "a number": {"segments": 5},
    "a pid that is none": {"pid": "x"},
    "a pid that is true": {"pid": True},
    "a large pid": {"pid": 10**30},
    "a start with a pattern": {"start": ".*"},
    "another field": {"more": 1},
}


@pytest.mark.parametrize("change", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_lease_is_none(tmp_path, monkeypatch, change):
    """The shared memory of other runs stays, whatever a lock says."""
    memory, run = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    run.mkdir()
    monkeypatch.setattr(segments, "SHARED_MEMORY", str(memory))
    dead = replace(Lease.of_this_run(), pid=4194999, start="77", segments=owner_prefix(4194999, "77"))
    others = [memory / name for name in ("girih-ATTACK", "girih-1.2.3-x", f"{owner_prefix(1, '77')}x")]
    for file in (*others, memory / f"{dead.segments}x"):
        file.touch()
    (run / LOCK).write_text(json.dumps(asdict(dead) | change))
    with RunDirectory(run, resume=True):
        assert all(file.exists() for file in others)
        assert (memory / f"{dead.segments}x").exists()
    (run / LOCK).write_text(json.dumps(asdict(dead)))
    with RunDirectory(run, resume=True):
        assert all(file.exists() for file in others)
        assert not (memory / f"{dead.segments}x").exists()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "{}", "[]", "null", '{"pid": 1e999}', '{"pid": 1, "pid": 1}', "9" * 5000, "\ud800"],
)
def test_a_lock_that_holds_anything_else_is_no_lease(tmp_path, text):
    (tmp_path / LOCK).write_text(text, errors="surrogatepass")
    assert Lease.of_run(tmp_path / LOCK) is None
    RunDirectory(tmp_path).close()


def test_a_lock_that_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(RunDirectoryError, match="not a regular file; delete it"):
        RunDirectory(tmp_path)
