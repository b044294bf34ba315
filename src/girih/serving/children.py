"""Processes that a server starts, and restarts when they end.

Each process reads its instructions from its input, reports on its output that it is ready, and ends when its input is
closed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from girih.errors import RoleError
from girih.processes.pipe import module_command
from girih.serving.limits import Notify

READY = "ready"
AGAIN_S = 1.0
"""Seconds from one start to the next."""


class ChildProcess:
    """A module that runs as a process, and is restarted when it ends.

    Args:
        title: its name in messages. ``{pid}`` stands for the process id.
        words: its command.
        instructions: its first line of input.
        notify: receives a line for each restart, or the reason why it failed.
        environment: its environment variables. By default it has the variables of this process.
        descriptors: files that it inherits.

    Raises:
        OSError: the system cannot start the process.
    """

    def __init__(
        self,
        title: str,
        words: Sequence[str],
        instructions: str,
        notify: Notify,
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._title, self._words, self._instructions, self._notify = title, words, instructions, notify
        self._environment, self._descriptors = environment, descriptors
        self._reason, self.begun_s, self.again_s = "", 0.0, 0.0
        self.process = self._start()

    def wait_until_ready(self) -> None:
        """Returns when the process reports that it is ready.

        Raises:
            RoleError: the process ended before.
        """
        if self.process.stdout.readline().strip() != READY:  # type: ignore[union-attr]
            status = self.process.wait()
            raise RoleError(f"serve: {self._name()} ended with status {status}; see its message above")

    def look(self) -> subprocess.Popen[str] | None:
        """Restarts the process if it has ended. Returns the old process."""
        ended, status = self.process, self.process.poll()
        if status is None or time.monotonic() < self.again_s:
            return None
        message = f"{self._name()} ended with status {status}"
        try:
            self.process = self._start()
        except OSError as error:
            self.again_s = time.monotonic() + AGAIN_S
            if str(error) != self._reason:
                self._reason = str(error)
                self._notify(f"{message}; cannot start another: {error}; tries again")
            return None
        _release(ended)
        self._reason = ""
        self._notify(f"{message}; started another")
        return ended

    def close(self, deadline: float) -> None:
        """Waits for the process until the deadline, then kills it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.process.kill()
        self.process.wait()
        _release(self.process)

    def _name(self) -> str:
        return self._title.format(pid=self.process.pid)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            module_command(*self._words),
            pass_fds=self._descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            text=True,
            start_new_session=True,  # signals of the terminal reach only the parent
        )
        self.begun_s = time.monotonic()
        self.again_s = self.begun_s + AGAIN_S
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its waiter will notice
            process.stdin.write(self._instructions + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        return process


def _release(process: subprocess.Popen[str]) -> None:
    """Closes the pipes to a process that has ended."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]


def end_with_parent(pipe: IO[str]) -> None:
    """Ends this process when its input ends, because its parent is gone."""

    def wait() -> None:
        pipe.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="girih-parent", daemon=True).start()
