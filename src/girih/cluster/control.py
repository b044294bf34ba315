"""Messages between trainer 0 and the launcher, which starts roles for the trainer."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from girih.cluster.launchers.launcher import Messages
from girih.cluster.roles import FAIL, FailurePolicy, RestartPolicy
from girih.cluster.supervisor import START_S, Supervisor
from girih.errors import GirihError, RoleError, named
from girih.processes.pipe import Pipe, as_text, from_text

LAST_WORDS_S = 5.0
"""Seconds in which a trainer must end after its launcher is gone.

All processes then end within ten seconds, even on a busy machine.
"""
GONE = "the launcher of this run is gone"


class LauncherControl:
    """The trainer's side of the messages. It asks the supervisor in the launcher to do its work.

    Args:
        lost: called by a thread, with the error to raise, when a process of the run is gone. If the launcher is gone
            too, it is called again with another error.

    Attributes:
        hello: the launcher's first message: ``registry``, ``secret``, ``segments``, ``bind``; on several hosts also
            ``hosts``, title of a process → its address, and ``threads`` to compute with.
    """

    def __init__(self, pipe: Pipe, lost: Callable[[Exception], None]) -> None:
        self._pipe, self._lost = pipe, lost
        self._stop: Callable[[], None] | None = None
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._asking, self._num_asked = threading.Lock(), 0
        try:
            self.hello = pipe.receive()
        except EOFError:
            raise RoleError(GONE) from None
        threading.Thread(target=self._receive_messages, name="girih-launcher", daemon=True).start()
        pipe.unbind_life()

    def prepare(self, counts: Mapping[str, int], *, again: bool = False) -> None:
        """See :class:`Supervisor`. The launcher has already prepared the first roles, which follow from the options."""
        if again:
            self._ask("prepare", dict(counts))

    def start(self, name: str, specs: Sequence[bytes], failure_policy: FailurePolicy = FAIL) -> list[str]:
        """See :class:`Supervisor`."""
        texts = [as_text(spec) for spec in specs]
        addresses: list[str] = self._ask("start", name, texts, failure_policy.policy.name, failure_policy.why)
        return addresses

    def end(self, name: str) -> None:
        """See :class:`Supervisor`."""
        self._ask("end", name)

    def scale(self, stage: str, counts: Mapping[str, int], overrides: Sequence[str]) -> None:
        """Reports new numbers of processes, for trainers that restart later.

        Args:
            stage: a :class:`girih.runs.scale_requests.ScaleStage`.
            overrides: the same numbers as words of ``--set``.
        """
        self._ask("scale", stage, dict(counts), list(overrides))

    def failure(self) -> Exception | None:
        """See :class:`Supervisor`."""
        try:
            text = self._ask("failure")
        except GirihError as error:
            return error
        return None if text is None else error_of(text)

    @property
    def restarts(self) -> Mapping[str, int]:
        """See :class:`Supervisor`."""
        restarts: dict[str, int] = self._ask("restarts")
        return restarts

    def show_in(self, run: Path | None) -> None:
        """See :class:`Supervisor`."""
        self._ask("show_in", None if run is None else str(run.resolve()))

    @contextmanager
    def handle_stop(self, on_stop: Callable[[], None]) -> Iterator[None]:
        """Calls ``on_stop`` from a thread if the launcher gets a signal, instead of ending the run at once."""
        self._stop = on_stop
        self._pipe.send({"stoppable": True})
        try:
            yield
        finally:
            self._pipe.send({"stoppable": False})

    def _ask(self, verb: str, *arguments: object) -> Any:
        with self._asking:
            self._num_asked += 1
            self._pipe.send({"do": verb, "with": arguments, "number": self._num_asked})
            try:
                reply = self._replies.get(timeout=2 * START_S)
                while reply.get("number", self._num_asked) != self._num_asked:  # an earlier call
                    reply = self._replies.get(timeout=2 * START_S)
            except queue.Empty:
                raise RoleError(f"the launcher does not answer within {2 * START_S:.0f} s") from None
        if "error" in reply:
            raise error_of(reply["error"])
        return reply["is"]

    def _receive_messages(self) -> None:
        with suppress(EOFError):
            while True:
                message = self._pipe.receive()
                if "lost" in message:
                    self._lost(error_of(message["lost"]))
                elif "stop" in message and self._stop is not None:
                    self._stop()
                else:
                    self._replies.put(message)
        self._replies.put({"error": f"RoleError: {GONE}"})
        self._lost(RoleError(GONE))
        threading.Event().wait(LAST_WORDS_S)
        os._exit(1)  # something hangs, and nobody else can end it


Roles = Supervisor | LauncherControl
"""Starts and ends roles for a trainer."""


def serve(
    pipe: Messages,
    supervisor: Supervisor,
    stoppable: Callable[[bool], None],
    scale: Callable[[str, Mapping[str, int], Sequence[str]], None],
) -> None:
    """Does what a trainer asks for, in the launcher, until the trainer is gone."""

    def start(name: str, specs: Sequence[str], policy: str, why: str) -> list[str]:
        return supervisor.start(
            name, [from_text(spec) for spec in specs], FailurePolicy(RestartPolicy[policy], why)
        )

    def failure() -> str | None:
        error = supervisor.failure()
        return None if error is None else text_of(error)

    def show_in(run: str | None) -> None:
        supervisor.show_in(None if run is None else Path(run))

    verbs: dict[str, Callable[..., Any]] = {
        "start": start, "end": supervisor.end, "failure": failure, "show_in": show_in,
        "restarts": lambda: supervisor.restarts, "prepare": supervisor.prepare, "scale": scale,
    }  # fmt: skip
    with suppress(EOFError):
        while True:
            asked = pipe.receive()
            if "stoppable" in asked:
                stoppable(asked["stoppable"])
                continue
            try:
                reply = {"is": verbs[asked["do"]](*asked["with"])}
            except Exception as error:
                reply = {"error": text_of(error)}
            pipe.send({**reply, "number": asked["number"]})


def text_of(error: Exception) -> str:
    """Returns an error as text for another process of the run; see :func:`error_of`."""
    return f"{type(error).__name__}: {error}"


def error_of(text: str) -> GirihError:
    """Returns the error that another process sent."""
    return named(text) or RoleError(text)
