"""Real processes that play trainers: forked from one that has imported torch and girih, which is most of a start.

That one is started with the first of them, once per test process, and ends with it.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from girih.comm.registry import LocalRegistry, RegistryServer
from girih.comm.registry.remote import RemoteRegistry
from girih.dense.accel import process_settings

ALL_S = int(os.environ.get("GIRIH_PATIENCE_S", "120"))
"""How long all of them may take: more where kernels are compiled first, or a machine is busy."""
SECRET = b"of these companions"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["girih.trainer", "girih.app.run_config", "girih.comm.group", "pytest"])


class Companion:
    """A process in which a module's function is called with this and other arguments.

    Attributes:
        pipe: to the process, where the function finds it as its first argument.
    """

    def __init__(self, function, *arguments):
        self.pipe, theirs = FORKS.Pipe()
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115 (as long as the process)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            forkserver.ensure_running()  # whose environment theirs is
        words = (function, theirs, [file.name for file in self._files], dict(os.environ), arguments)
        self.process = FORKS.Process(target=call, args=words, daemon=True)
        self.process.start()
        theirs.close()

    def printed(self):
        """Returns what the process has printed so far: standard output, and error."""
        return tuple(Path(file.name).read_text(errors="replace") for file in self._files)

    def close(self):
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()
        for file in self._files:
            file.close()


def call(function, pipe, files, environment, arguments):
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    for descriptor, name in enumerate(files, 1):
        with open(name, "ab", 0) as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    gc.freeze()  # as in conftest.py
    process_settings.defer_dynamo()  # as in a trainer's own process
    function(pipe, *arguments)


def killed(function, *arguments):
    """Calls a module's function in a process; returns whether SIGKILL ended that."""
    companion = Companion(function, *arguments)
    try:
        companion.process.join(ALL_S)
        assert companion.process.exitcode is not None, companion.printed()
        return companion.process.exitcode == -signal.SIGKILL
    finally:
        companion.close()


def ran(file, *words, cwd, hidden=()):
    """Runs a Python file as a program in a process; returns how that ended and what was printed.

    Args:
        hidden: modules that it cannot import.
    """
    companion = Companion(run, str(file), words, cwd, hidden)
    try:
        companion.process.join(ALL_S)
        return subprocess.CompletedProcess(words, companion.process.exitcode, *companion.printed())
    finally:
        companion.close()


def run(pipe, file, words, cwd, hidden):
    os.chdir(cwd)
    sys.modules |= dict.fromkeys(hidden)
    sys.argv = [file, *words]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


def together(function, size=2, *, barrier=True, kind=None):
    """What a module's ``function(ranks)`` returns in each of ``size`` processes; anything that JSON can hold.

    Args:
        barrier: whether all meet once more when they are done.
        kind: class of ``ranks``; a ``TrainerGroup`` by default.
    """
    server = RegistryServer(LocalRegistry(), SECRET)
    words = size, server.address, barrier, kind
    companions = [Companion(play, function, rank, *words) for rank in range(size)]
    found = {}
    try:
        while len(found) < size:
            waiting = {each.pipe: each for each in companions if each not in found}
            ready = wait(list(waiting), ALL_S)
            assert ready, "\n".join(sum((each.printed() for each in companions), ()))
            for pipe in ready:
                try:
                    found[waiting[pipe]] = json.loads(pipe.recv())
                except EOFError:
                    pytest.fail("\n".join(sum((each.printed() for each in companions), ())))
        for each in companions:
            each.process.join(ALL_S)
        assert [each.process.exitcode for each in companions] == [0] * size
    finally:
        for each in companions:
            each.close()
        server.close()
    return [found[each] for each in companions]


def play(pipe, function, rank, size, address, barrier, kind):
    from girih.comm.group import TrainerGroup

    faulthandler.dump_traceback_later(ALL_S - 10, exit=True)
    registry = RemoteRegistry(address, SECRET)
    ranks = (kind or TrainerGroup)(rank, size, registry)
    found = function(ranks)
    if barrier:
        ranks.barrier()
    ranks.close()
    registry.close()
    pipe.send(json.dumps(found))
