"""The launcher of ``girih train`` with several processes: it starts all of them at once, and supervises them.

Trainer 0 is a child like the others, except that it owns the terminal: it writes the run's files and prints all
messages.

If a trainer or a role that trainers need is killed, all trainers restart from the last checkpoint, as with
``--resume``. Restarting one trainer takes as long as restarting all (decision 0051). Embedding servers outlive
trainers. Their rows include the updates since the checkpoint.

This module imports neither torch nor numba.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from girih.cluster.control import serve, text_of
from girih.cluster.launchers.launcher import Handle, HelloOf, Launch, Launcher
from girih.cluster.launchers.local import LocalLauncher
from girih.cluster.roles import RoleName
from girih.cluster.supervisor import END_S, STOPPED, Supervisor, error_of, rows_kept_in
from girih.comm.registry import LocalRegistry, RegistryServer
from girih.errors import GirihError
from girih.processes.pipe import CONTROL, module_command
from girih.processes.segments import new_prefix, remove_segments
from girih.runs import scale_requests
from girih.runs.scale_requests import ScaleStage

LAST_WORDS_S = 20.0
"""Seconds in which trainer 0 may report an error. After them, the launcher reports it."""
POLL_S = 0.2
SAID_S = 0.5
"""Seconds to wait for the last messages of a killed trainer. Not needed if the trainer waits for roles to start."""
USERS_MISTAKE = 2


def launch(spec: Launch) -> int:
    """Runs trainers and prepares roles. Returns the status of trainer 0, or 130 if trainer 0 ignores a signal.

    Raises:
        RoleError: trainer 0 was killed, or could not report in time that another process was killed.
    """
    signals: list[bool] = []
    with handle_signals(lambda: signals.append(True)):
        run = _LaunchedRun(spec)
        while True:
            try:
                status = run.until_trainer_0_ends(signals)
            finally:
                run.close()
            if run.following is None or status != STOPPED:
                return status
            run = _scaled(run, run.following)


def _scaled(ended: _LaunchedRun, following: Launch) -> _LaunchedRun:
    """Restarts the run with other numbers of processes. If that fails, restarts it with the previous numbers."""
    try:
        return _LaunchedRun(following, ended.deaths)
    except GirihError as error:
        request = scale_requests.pending(following.run)
        if request is not None:
            scale_requests.fail(following.run, request, str(error))
        return _LaunchedRun(replace(ended.spec, command=ended.spec.again), ended.deaths)


@contextmanager
def handle_signals(on_signal: Callable[[], None], *, once: bool = False) -> Iterator[None]:
    """Calls a function on each SIGINT and SIGTERM, or only on the first."""

    def handle(number: int, frame: object) -> None:
        if once:
            restore()
        on_signal()

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
    """Ignores the terminal's signals in a process of a launcher. The launcher forwards them."""
    if CONTROL in os.environ:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def make_launcher(spec: Launch, closing: ExitStack, hello_of: HelloOf) -> Launcher:
    """Returns the launcher for the machines in the options; it ends when ``closing`` is closed."""
    if spec.options.launcher == "ray":
        from girih.cluster.launchers.ray.launcher import on_nodes

        return on_nodes(spec, closing, hello_of)
    return LocalLauncher(
        trainer=module_command("girih", *spec.command),
        again=module_command("girih", *spec.again),
        num_trainers=spec.counts[RoleName.TRAINER],
        hello=hello_of(spec.options.bind, new_prefix()),
    )


class _LaunchedRun:
    """The processes of a run, until trainer 0 ends.

    Attributes:
        spec: the launched run, with its current words and counts.
        deaths: see :class:`Supervisor`. The counts continue when all processes restart.
        following: the run to launch after this one, with other numbers of processes; None if there is none.
    """

    def __init__(self, spec: Launch, deaths: Mapping[tuple[str, int], int] | None = None) -> None:
        self.spec = spec
        self.following: Launch | None = None
        self._rows_move = False
        self._num_trainers = spec.counts[RoleName.TRAINER]
        self._closing = ExitStack()
        try:
            self._launcher = make_launcher(spec, self._closing, self._serve_registry)
        except BaseException:
            self._closing.close()
            raise
        self._supervisor = Supervisor(
            self._launcher,
            self._server.registry,
            self._fail,
            num_trainers=self._num_trainers,
            max_restarts=spec.options.max_restarts,
            may_restart_all=self._may_restart_all,
        )
        self.deaths = self._supervisor.deaths
        self.deaths.update(deaths or {})
        self._error: Exception | None = None
        self._stoppable, self._is_stopping = False, False
        self._order_s = 0.5
        self._life = 0
        self._begin()

    def _serve_registry(self, bind: str, segments: str) -> Mapping[str, object]:
        """Offers a registry. Returns the first message to all processes."""
        self._segments, secret = segments, secrets.token_hex(16)
        self._server = RegistryServer(
            LocalRegistry(), secret.encode(), bind, encrypt=self.spec.options.encrypt
        )
        self._closing.callback(self._server.close)
        hello = {"registry": self._server.address, "secret": secret, "segments": segments, "bind": bind}
        return {**hello, "place": self.spec.place.to_text()}

    def until_trainer_0_ends(self, signals: Sequence[bool]) -> int:
        """Returns the status of the run when trainer 0 has ended.

        If it trains, the first of the ``signals`` ends the run after the current step, and the second at once.
        """
        waited_s, status = 0.0, None
        while status is None:
            status = self._first.wait(POLL_S)
            if len(signals) > self._is_stopping:
                if self._is_stopping or not self._stoppable:
                    return STOPPED
                self._is_stopping = True
                self._first.pipe.send({"stop": True})
            is_over = status in (0, USERS_MISTAKE, STOPPED)
            if self._error is None and not is_over and self._may_restart_all():
                self._restart_all()
                status = None
            if self._error is not None:
                waited_s += POLL_S
                if waited_s > LAST_WORDS_S:
                    raise self._error
        if status < 0:
            raise self._error or error_of(self._first)
        if status == 0 or self._is_stopping or self.following is not None:
            self._order_s = 10.0
        return status

    def close(self) -> None:
        """Ends all processes, and removes leftovers of killed ones."""
        self._supervisor.expect_end()
        if self._first.wait(self._order_s) is None:
            self._first.kill()
            self._first.wait()
        self._supervisor.close(patience_s=self._order_s)
        self._first.close()
        remove_segments(self._segments)
        self._closing.close()

    def _begin(self, kept: Collection[str] = ()) -> None:
        """Starts all trainers, and prepares all roles that do not exist yet."""
        self._stoppable = False
        self._first = self._launcher.start(RoleName.TRAINER, 0, self._life, None)
        served = (self._first.pipe, self._supervisor, self._set_stoppable, self._scale)
        self._serving = threading.Thread(target=serve, args=served, name="girih-serve", daemon=True)
        self._serving.start()
        try:
            for index in range(1, self._num_trainers):
                self._supervisor.start_trainer(index, self._life)
            roles = {name: count for name, count in self.spec.counts.items() if name != RoleName.TRAINER}
            self._supervisor.prepare({name: n for name, n in roles.items() if name not in kept})
        except BaseException:
            self.close()
            raise

    def _restart_all(self) -> None:
        """Restarts all trainers from the last checkpoint, or from the start if there is none, and logs that."""
        killed = self._killed()[0]
        self._supervisor.count_before_all_end(killed)
        self._life += 1
        self._first.kill()
        self._first.wait()
        self._serving.join(SAID_S)  # its last new numbers of processes apply from here on
        newest = self.spec.newest()  # no further checkpoint is completed
        are_there = all(map(self._supervisor.has_all, self.spec.outliving))
        are_kept = newest is not None and are_there and not self._rows_move
        self.following, self._rows_move = None, False
        kept = self.spec.outliving if are_kept else ()
        self._supervisor.kill_all_but(kept)
        self._serving.join(END_S)  # it may be starting roles
        self._supervisor.kill_all_but(kept)
        if kept:
            self._server.registry.set(rows_kept_in(self._life), "1")
        else:
            remove_segments(self._segments)
        whence = newest or "the start, since there is no checkpoint yet"
        number, most = self.deaths[killed.key], self.spec.options.max_restarts
        count = f"restart {number} of at most {most}"
        print(
            f"girih: {error_of(killed)}; all trainers go on from {whence} ({count})",
            file=sys.stderr,
            flush=True,
        )
        self._first.close()
        self._begin(kept)

    def _killed(self) -> list[Handle]:
        """Returns the processes that a signal ended and that all trainers need.

        The process with the fewest restarts comes first. The others may have crashed because it was gone.
        """
        first = [self._first] if (self._first.status() or 0) < 0 else []
        killed = [*first, *self._supervisor.killed_for_all()]
        return sorted(killed, key=lambda handle: self.deaths[handle.key])

    def _may_restart_all(self) -> bool:
        """Returns whether all trainers may restart.

        They may if a signal killed a process. After an error, a restart would only repeat it.
        """
        killed, most = self._killed(), self.spec.options.max_restarts
        if not killed or self._is_stopping:
            return False
        return self.deaths[killed[0].key] < most

    def _scale(self, stage: str, counts: Mapping[str, int], overrides: Sequence[str]) -> None:
        """Sets other numbers of processes: for trainers that restart, or for the run that follows this one."""
        words = [word for override in overrides for word in ("--set", override)]
        counts = {RoleName(name): count for name, count in counts.items()}
        scaled = replace(self.spec, counts={**self.spec.counts, **counts}, again=[*self.spec.again, *words])
        if stage == ScaleStage.RESTART:
            self.following = replace(scaled, command=scaled.again)
            return
        if scaled.counts != self.spec.counts:
            self.spec = scaled
            self._launcher.again_with(words)
        self._rows_move = stage == ScaleStage.MOVING

    def _set_stoppable(self, flag: bool) -> None:
        self._stoppable = flag

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._first.pipe.send({"lost": text_of(error)})
