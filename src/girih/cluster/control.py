"""Messages of trainer 0 and the launcher, to have roles started that a trainer does not start itself."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from girih.cluster.pipe import Pipe
from girih.cluster.supervisor import START_S, TOLD_S, Supervisor
from girih.errors import GirihError, RoleError, named

LAST_WORDS_S = 10.0
GONE = "the launcher of this run is gone"


class Roles(Protocol):
    """Starts and ends roles on behalf of a trainer: its own :class:`Supervisor`, or the launcher's."""

    def prepare(self, counts: Mapping[str, int]) -> None:
        """Has processes started that :meth:`start` will give roles."""
        ...

    def start(self, name: str, specs: Sequence[bytes]) -> list[str]:
        """Starts all processes of a role, given as pickled roles; returns where they listen."""
        ...

    def end(self, name: str) -> None:
        """Ends all processes of a role."""
        ...

    def failure(self) -> Exception | None:
        """Which process failed, if one did."""
        ...

    def show_in(self, run: Path | None) -> None:
        """Keeps ``processes.json`` in a run's directory."""
        ...


class LauncherControl:
    """A trainer's side.

    Args:
        lost: called by a thread, with the error to raise, once a process of the run is gone; again, with another, where
            the launcher goes too.
        stop: called by a thread, where the launcher was told to stop.

    Attributes:
        hello: what the launcher says first: ``registry``, ``secret``, ``segments``, ``bind``.
    """

    def __init__(self, pipe: Pipe, lost: Callable[[Exception], None], stop: Callable[[], None]) -> None:
        self._pipe, self._lost, self._stop = pipe, lost, stop
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._asking = threading.Lock()
        try:
            self.hello, _ = pipe.receive()
        except EOFError:
            raise RoleError(GONE) from None
        threading.Thread(target=self._hear, name="girih-launcher", daemon=True).start()

    def prepare(self, counts: Mapping[str, int]) -> None:
        """No-op: the launcher did, as far as the options told."""
        return

    def start(self, name: str, specs: Sequence[bytes]) -> list[str]:
        """See :class:`Roles`."""
        sizes = [len(spec) for spec in specs]
        told = self._ask({"do": "start", "role": name, "sizes": sizes}, b"".join(specs), 2 * START_S)
        addresses: list[str] = told["addresses"]
        return addresses

    def end(self, name: str) -> None:
        """See :class:`Roles`."""
        self._ask({"do": "end", "role": name})

    def failure(self) -> Exception | None:
        """See :class:`Roles`."""
        try:
            told = self._ask({"do": "failure"}).get("failure")
        except GirihError as error:
            return error
        return None if told is None else error_of(told)

    def show_in(self, run: Path | None) -> None:
        """See :class:`Roles`."""
        self._ask({"do": "show", "run": None if run is None else str(run.resolve())})

    def stoppable(self, flag: bool) -> None:
        """Says whether a stop is heeded now; else the launcher ends the run at once."""
        self._pipe.send({"do": "stoppable", "flag": flag})

    def _ask(
        self, message: dict[str, Any], content: bytes = b"", timeout_s: float = 3 * TOLD_S
    ) -> dict[str, Any]:
        with self._asking:
            self._pipe.send(message, content)
            try:
                told = self._replies.get(timeout=timeout_s)
            except queue.Empty:
                raise RoleError(f"the launcher does not answer within {timeout_s:.0f} s") from None
        if "error" in told:
            raise error_of(told["error"])
        return told

    def _hear(self) -> None:
        while True:
            try:
                told, _ = self._pipe.receive()
            except EOFError:
                break
            if "lost" in told:
                self._lost(error_of(told["lost"]))
            elif "stop" in told:
                self._stop()
            else:
                self._replies.put(told)
        self._replies.put({"error": f"RoleError: {GONE}"})
        self._lost(RoleError(GONE))
        threading.Event().wait(LAST_WORDS_S)
        os._exit(1)  # something hangs, and nobody is there to end it


def serve(pipe: Pipe, supervisor: Supervisor, stoppable: Callable[[bool], None]) -> None:
    """The launcher's side: does what a trainer asks for until it is gone."""
    while True:
        try:
            asked, content = pipe.receive()
        except EOFError:
            return
        if asked["do"] == "stoppable":
            stoppable(asked["flag"])
            continue
        try:
            pipe.send(_answer(asked, content, supervisor))
        except Exception as error:
            pipe.send({"error": text_of(error)})


def _answer(asked: Mapping[str, Any], content: bytes, supervisor: Supervisor) -> dict[str, Any]:
    if asked["do"] == "start":
        specs, first = [], 0
        for size in asked["sizes"]:
            specs.append(content[first : first + size])
            first += size
        return {"addresses": supervisor.start(asked["role"], specs)}
    if asked["do"] == "end":
        supervisor.end(asked["role"])
    elif asked["do"] == "show":
        supervisor.show_in(None if asked["run"] is None else Path(asked["run"]))
    elif asked["do"] == "failure":
        error = supervisor.failure()
        return {"failure": None if error is None else text_of(error)}
    return {}


def text_of(error: Exception) -> str:
    """An error as another process of the run makes it anew: see :func:`error_of`."""
    return f"{type(error).__name__}: {error}"


def error_of(text: str) -> GirihError:
    """The error that another process told."""
    return named(text) or RoleError(text)
