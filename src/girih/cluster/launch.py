"""The launcher of ``girih train`` with several processes: it starts them all at once, and does nothing else.

Trainer 0 is a child like any other, except that it owns the terminal: it writes the run's files and prints every message.
Neither torch nor numba is imported here.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from girih.cluster.control import serve, text_of
from girih.cluster.launchers.launcher import Resources
from girih.cluster.launchers.local import LocalLauncher
from girih.cluster.options import ClusterOptions
from girih.cluster.pipe import CONTROL
from girih.cluster.roles import RoleName
from girih.cluster.segments import new_prefix, remove_segments
from girih.cluster.supervisor import STOPPED, Supervisor
from girih.comm.registry import LocalRegistry, RegistryServer
from girih.errors import RoleError

LAST_WORDS_S = 20.0
"""Trainer 0 has so long to say what went wrong, before it is said here."""
POLL_S = 0.2


def launch(command: Sequence[str], counts: Mapping[str, int], options: ClusterOptions) -> int:
    """Runs trainers and prepares roles; returns trainer 0's status, or 130 after a signal that it does not heed.

    Args:
        command: the words of ``girih`` that make a trainer.
        counts: role → processes, ``trainer`` among them.

    Raises:
        RoleError: trainer 0 was killed, or could not say in time that another process was.
    """
    signals: list[bool] = []
    with heeding_signals(lambda: signals.append(True)):
        run = _Run([sys.executable, "-m", "girih", *command], counts, options)
        try:
            return run.until_trainer_0_ends(signals)
        finally:
            run.close()


@contextmanager
def heeding_signals(heed: Callable[[], None], *, once: bool = False) -> Iterator[None]:
    """Has SIGINT and SIGTERM call a function: each of them, or the first alone."""

    def handle(number: int, frame: object) -> None:
        if once:
            restore()
        heed()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def leave_signals_to_launcher() -> None:
    """In a process that a launcher started: it hears the terminal's signals, and tells."""
    if CONTROL in os.environ:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


class _Run:
    def __init__(self, command: Sequence[str], counts: Mapping[str, int], options: ClusterOptions) -> None:
        self._segments, secret, bind = new_prefix(), secrets.token_hex(16), options.bind
        self._server = RegistryServer(LocalRegistry(), secret.encode(), bind, encrypt=options.encrypt)
        hello = {"registry": self._server.address, "secret": secret, "segments": self._segments, "bind": bind}
        num_trainers = counts[RoleName.TRAINER]
        launcher = LocalLauncher(trainer=command, num_trainers=num_trainers, hello=hello)
        self._supervisor = Supervisor(launcher, self._server.registry, self._fail, num_trainers=num_trainers)
        self._error: Exception | None = None
        self._stoppable = False
        self._order_s = 0.5
        self._first = launcher.start(RoleName.TRAINER, 0, 0, Resources(threads=None))
        served = (self._first.pipe, self._supervisor, self._set_stoppable)
        threading.Thread(target=serve, args=served, name="girih-serve", daemon=True).start()
        try:
            for index in range(1, num_trainers):
                self._supervisor.start_trainer(index)
            self._supervisor.prepare({n: count for n, count in counts.items() if n != RoleName.TRAINER})
        except BaseException:
            self.close()
            raise

    def until_trainer_0_ends(self, signals: Sequence[bool]) -> int:
        """The status of the run.

        The first of the ``signals`` ends it after the step under way, where it trains; the second one at once.
        """
        waited_s, status, is_stopping = 0.0, None, False
        while status is None:
            status = self._first.wait(POLL_S)
            if len(signals) > is_stopping:
                if is_stopping or not self._stoppable:
                    return STOPPED
                is_stopping = True
                self._first.pipe.send({"stop": True})
            if self._error is not None:
                waited_s += POLL_S
                if waited_s > LAST_WORDS_S:
                    raise self._error
        if status < 0:
            raise self._error or RoleError(f"trainer 0 was killed by signal {-status}")
        if status == 0 or is_stopping:
            self._order_s = 10.0
        return status

    def close(self) -> None:
        """Ends all processes, and removes what those that were killed left."""
        self._supervisor.expect_end()
        if self._first.wait(self._order_s) is None:
            self._first.kill()
            self._first.wait()
        self._supervisor.close(patience_s=self._order_s)
        self._first.close()
        remove_segments(self._segments)
        self._server.close()

    def _set_stoppable(self, flag: bool) -> None:
        self._stoppable = flag

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._first.pipe.send({"lost": text_of(error)})
