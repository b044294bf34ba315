"""What killed runs leave behind goes with the next run of the machine, and a live run keeps its directory."""

import os
import signal

import pytest
from running import processes_of
from scenes import write

from runs import train, train_here

pytestmark = pytest.mark.slow

ROLES = ["strategy.trainers=2", "strategy.embedding_servers=2"]
LONG = ["train.epochs=1000000", "train.log_every_steps=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("left-behind"), num_examples=801)


def kill_all(running):
    """Kills all processes of a run before one of them learns of another's end."""
    processes = [int(process.name) for process in processes_of(running.mark)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            os.kill(pid, number)
    running.process.communicate()


def test_what_a_run_leaves_whose_processes_were_all_killed_goes_with_a_run_elsewhere(
    directory, begin, tmp_path
):
    running = begin("hybrid", *ROLES, *LONG, "checkpoint.every_steps=2")
    running.until_it_trains()
    assert any(name.startswith("/dev/shm/") for name in running.left())
    kill_all(running)
    unfinished = running.run / ".summary.json.unfinished"
    unfinished.touch()
    train_here(directory, "local", tmp_path / "other", "train.max_steps=1")
    assert not running.left()
    summary = train_here(directory, "local", running.run, "train.max_steps=1", resume=True)
    assert summary["steps"] >= 1
    assert not unfinished.exists()
    assert not (running.run / "processes.json").exists()


@pytest.mark.heavy
def test_a_directory_that_a_live_run_uses_is_refused_and_its_process_named(directory, begin):
    running = begin("hybrid", *ROLES, *LONG)
    running.until_it_trains()
    host = os.uname().nodename
    for resume in (False, True):
        told = train(directory, "local", running.run, resume=resume, status=2)
        used = f"{running.run}: process {running.process.pid} on {host} is writing this run"
        assert told == f"girih: {used}; wait for it or stop it\n"
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    running.ends(130)
