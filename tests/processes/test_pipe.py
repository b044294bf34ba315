"""The pipe between a launcher and its processes: while these start, the kernel ends them with the launcher."""

import os
import signal
import subprocess
import sys
import time

import pytest

from girih.processes.pipe import CONTROL, Pipe, describe_end

BUSY = "import sys; from girih.processes.pipe import *; bind_life(); {more} print('begun', flush=True); sum(range(10**11))"
UNBOUND = "pipe = Pipe.inherited(); pipe.unbind_life(); pipe.send(dict(is_there=True)); "


def started(more=""):
    """A process that computes without letting another thread run, and this end of its pipe."""
    pipe, descriptors = Pipe.pair()
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(more=more)],
        env=os.environ | {CONTROL: describe_end(*descriptors)},
        pass_fds=descriptors,
        stdout=subprocess.PIPE,
    )
    for descriptor in descriptors:
        os.close(descriptor)
    return process, pipe


@pytest.mark.parametrize("is_gone_before", [False, True])
def test_a_process_that_lets_no_thread_run_ends_with_its_launcher(is_gone_before):
    process, pipe = started()
    with process:
        if not is_gone_before:
            assert process.stdout.readline() == b"begun\n"
            pipe.send({"a": "message, which changes nothing"})
            time.sleep(0.2)
            assert process.poll() is None
        pipe.close()
        assert process.wait(20) == -signal.SIGKILL


def test_one_that_began_is_left_to_its_threads():
    process, pipe = started(UNBOUND)
    with process:
        assert pipe.receive() == {"is_there": True}
        assert process.stdout.readline() == b"begun\n"
        pipe.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()


def test_a_process_that_inherits_only_the_environment_binds_its_life_to_nothing():
    code = (
        "from girih.processes.pipe import *; bind_life(); print(os.read(0, 1), Pipe.inherited(), flush=True)"
    )
    readable, writable = os.pipe()  # takes the number of the launcher's pipe, and is read
    pipe, others = Pipe.pair()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {CONTROL: describe_end(*others).replace(f",{others[1]},", f",{writable},", 1)},
        pass_fds=[writable],
        stdin=readable,
        stdout=subprocess.PIPE,
    ) as process:
        os.write(writable, b"a")
        assert process.stdout.readline() == b"b'a' None\n"
    pipe.close()
    for descriptor in (readable, writable, *others):
        os.close(descriptor)
