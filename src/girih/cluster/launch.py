"""The launcher of ``girih train`` with several processes: it starts them all at once, and does nothing else.

Trainer 0 is a child like any other, but that it has the terminal: it writes the run and says what there is to say.
Neither torch nor numba is imported here.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from girih.cluster.control import serve, text_of
from girih.cluster.hosts import Hosts, host_of
from girih.cluster.launchers.launcher import Handle
from girih.cluster.launchers.local import LocalLauncher, LocalProcess
from girih.cluster.options import ClusterOptions
from girih.cluster.pipe import Pipe
from girih.cluster.roles import RoleName
from girih.cluster.segments import new_prefix, remove_segments
from girih.cluster.supervisor import STOPPED, Supervisor
from girih.comm.registry import LocalRegistry, RegistryServer
from girih.errors import RoleError

LAST_WORDS_S = 20.0
"""How long trainer 0 may take to say what went wrong, before it is said here."""
POLL_S = 0.2


def launch(
    command: Sequence[str], counts: Mapping[str, int], options: ClusterOptions, hosts: Hosts | None = None
) -> int:
    """Runs trainers and prepares roles; returns trainer 0's status, or 130 after a signal that it does not heed.

    Args:
        command: the words of ``girih`` that make a trainer.
        counts: role → processes, ``trainer`` among them.

    Raises:
        RoleError: trainer 0 was killed, or could not say in time that another process was.
    """
    run = _Run([sys.executable, "-m", "girih", *command], counts, options, hosts)
    try:
        with run.heeding_signals():
            return run.until_trainer_0_ends()
    finally:
        run.close()


class _Run:
    def __init__(
        self, command: Sequence[str], counts: Mapping[str, int], options: ClusterOptions, hosts: Hosts | None
    ) -> None:
        self._segments, secret = new_prefix(), secrets.token_hex(16)
        bind = host_of(hosts or {}, RoleName.TRAINER, 0).host if hosts else options.bind
        self._server = RegistryServer(LocalRegistry(), secret.encode(), bind)
        hello = {"registry": self._server.address, "secret": secret, "segments": self._segments, "bind": bind}
        num_trainers = counts[RoleName.TRAINER]
        launcher = LocalLauncher(
            hosts, segments=self._segments, trainer=command, num_trainers=num_trainers, hello=hello
        )
        self._supervisor = Supervisor(launcher, self._server.registry, self._fail, num_trainers=num_trainers)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._failed = threading.Event()
        self._stoppable, self._num_signals = False, 0
        self._order_s = 0.5
        self._pipe: Pipe | None = None
        try:
            self._first = self._start_first()
            for index in range(1, num_trainers):
                self._supervisor.start_trainer(index)
            self._supervisor.prepare({n: count for n, count in counts.items() if n != RoleName.TRAINER})
        except BaseException:
            self.close()
            raise

    def until_trainer_0_ends(self) -> int:
        """The status of the run."""
        waited_s = 0.0
        while (status := self._first.wait(POLL_S)) is None:
            if self._num_signals > 1 or (self._num_signals and not self._stoppable):
                return STOPPED
            waited_s += POLL_S if self._failed.is_set() else 0.0
            if waited_s > LAST_WORDS_S and self._error is not None:
                raise self._error
        if status < 0:
            raise self._error or RoleError(f"trainer 0 was killed by signal {-status}")
        if status in (0, STOPPED):
            self._order_s = 10.0
        return status

    @contextlib.contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after the step under way, where it trains; the second one at once."""
        previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

        def heed(number: int, frame: FrameType | None) -> None:
            self._num_signals += 1
            if self._stoppable:
                self._tell_first({"stop": True})

        for each in (signal.SIGINT, signal.SIGTERM):
            previous[each] = signal.signal(each, heed)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Ends all processes, and removes what those that were killed left."""
        self._supervisor.expect_end()
        if self._order_s > 1:
            self._supervisor.wait_for_trainers(self._order_s)
        self._supervisor.close(patience_s=self._order_s)
        remove_segments(self._segments)
        self._server.close()

    def _start_first(self) -> Handle:
        """Trainer 0, and a thread that does what it asks for."""
        handle = self._supervisor.start_trainer(0, watched=False)
        self._pipe = handle.pipe if isinstance(handle, LocalProcess) else None
        if self._pipe is not None:
            words = (self._pipe, self._supervisor, self._set_stoppable)
            threading.Thread(target=serve, args=words, name="girih-serve", daemon=True).start()
        return handle

    def _tell_first(self, message: dict[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.send(message)

    def _set_stoppable(self, flag: bool) -> None:
        self._stoppable = flag

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._failed.set()
        self._tell_first({"lost": text_of(error)})
