"""The launcher's handle on a process that an actor of Ray started."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from girih.cluster.launchers.ray.agent import ASKED_S
from girih.cluster.roles import RoleName
from girih.processes.pipe import as_text

ANSWER_S = 60.0
"""An actor whose node is there answers much sooner; where none is, Ray may never say so (ray#20092, ray#57726)."""
WAITING = "waiting"
"""The thread of an actor in which a call waits for events; all others run one after another, in their order."""
LOST = -9
"""The status of a process whose actor is gone: the process ends with it."""


class RayPipe:
    """The launcher's end of a trainer's pipe; see :class:`girih.processes.pipe.Pipe`."""

    def __init__(self, process: RayProcess) -> None:
        self._process = process
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def send(self, message: dict[str, object]) -> None:
        """Sends a message; silently where nobody reads any more."""
        self._process.send(message)

    def receive(self) -> dict[str, Any]:
        """The next message.

        Raises:
            EOFError: the process is gone.
        """
        message = self.messages.get()
        if message is None:
            self.messages.put(None)  # for whoever asks again
            raise EOFError("the other side is gone")
        return message

    def close(self) -> None:
        """Nothing is held here."""


class RayProcess:
    """A process beside an actor; see :class:`girih.cluster.launchers.launcher.Handle`.

    Ray is asked only for what happens to the process: one call waits at a time, and returns at each event.

    Attributes:
        pipe: to a trainer.
    """

    def __init__(self, name: RoleName, index: int, incarnation: int, actor: Any, node: str) -> None:
        self.name, self.index, self.incarnation = name, index, incarnation
        self.pid, self.host = 0, node
        self.pipe = RayPipe(self)
        self._actor = actor
        self._where = actor.where.remote()
        self._waiting = actor.events.options(concurrency_group=WAITING)
        self._address, self._recovery_note, self._words = "", "", ""
        self._status: int | None = None
        self._sent, self._calling = 0, threading.Lock()
        self._address_known, self._ended = threading.Event(), threading.Event()
        self._listening = threading.Thread(target=self._listen, name="girih-ray", daemon=True)
        self._listening.start()

    @property
    def address(self) -> str:
        """See :class:`Handle`."""
        return self._address

    @property
    def recovery_note(self) -> str:
        """See :class:`Handle`."""
        return self._recovery_note

    def begin(self, spec: bytes) -> None:
        """See :class:`Handle`."""
        self.send({"role": as_text(spec)})

    def send(self, message: dict[str, object]) -> None:
        """Sends a message to the process."""
        with self._calling, suppress(RayError):
            self._sent += 1
            self._actor.send.remote(self._sent, message)

    def wait_for_address(self, timeout_s: float | None) -> str:
        """See :class:`Handle`."""
        self._address_known.wait(timeout_s)
        return self._address

    def status(self) -> int | None:
        """See :class:`Handle`."""
        return self._status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See :class:`Handle`."""
        self._ended.wait(timeout_s)
        return self._status

    def last_words(self) -> str:
        """See :class:`Handle`."""
        return self._words

    def end(self) -> None:
        """See :class:`Handle`; a trainer ends by itself."""
        if self.name != RoleName.TRAINER:
            with self._calling, suppress(RayError):
                self._actor.end.remote()

    def kill(self) -> None:
        """See :class:`Handle`."""
        with self._calling, suppress(RayError):
            self._actor.kill.remote()

    def close(self) -> None:
        """See :class:`Handle`."""
        self._listening.join()

    def _listen(self) -> None:
        """Hears of the process until it ended, or its actor did."""
        try:
            self.pid, self.host = ray.get(self._where, timeout=ANSWER_S)
            first = 0
            while self._status is None:
                with self._calling:
                    pending = self._waiting.remote(first)
                events = ray.get(pending, timeout=ASKED_S + ANSWER_S)
                first += len(events)
                for event in events:
                    self._handle_event(event)
        except (RayError, GetTimeoutError, ValueError) as error:
            self._words = f"Ray lost it: {str(error).strip().splitlines()[0]}"
            self._status = LOST
        with suppress(RayError):
            ray.kill(self._actor)  # the next life of the process needs its place
        self._ended.set()
        self._address_known.set()
        self.pipe.messages.put(None)

    def _handle_event(self, event: Any) -> None:
        if "address" in event:
            self._recovery_note, self._address = event["found"], event["address"]
            self._address_known.set()
        elif "message" in event:
            self.pipe.messages.put(event["message"])
        elif "printed" in event:
            stream = sys.stdout if event["to"] == 1 else sys.stderr
            stream.buffer.write(event["printed"])
            stream.flush()
        else:
            self._words, self._status = event["words"], event["status"]
