"""The launcher's handle on a process that an actor of Ray started."""

from __future__ import annotations

import queue
import sys
import threading
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from girih.cluster.launchers.launcher import Handle
from girih.cluster.launchers.ray.agent import ASKED_S
from girih.cluster.roles import RoleName

ANSWER_S = 60.0
"""An actor whose node is there answers much sooner; where none is, Ray may never say so (ray#20092, ray#57726)."""
WAITING = "waiting"
"""The thread of an actor in which a call waits for events; all others run one after another, in their order."""
LOST = -9
"""The status of a process whose actor is gone: the process ends with it."""


class RayPipe:
    """The launcher's end of a process's pipe, by its actor; see :class:`girih.processes.pipe.Pipe`."""

    def __init__(self, actor: Any) -> None:
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.calling = threading.Lock()  # the actor takes calls in the order in which they are made
        self._actor, self._sent = actor, 0

    def send(self, message: dict[str, object]) -> None:
        """Sends a message; silently where nobody reads any more."""
        with self.calling, suppress(RayError):
            self._sent += 1
            self._actor.send.remote(self._sent, message)

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


class RayProcess(Handle):
    """A process beside an actor.

    Ray is asked only for what happens to the process: one call waits at a time, and returns at each event.
    """

    def __init__(self, name: RoleName, index: int, incarnation: int, actor: Any, node: str) -> None:
        super().__init__(name, index, incarnation, host=node)
        self.pipe: RayPipe = RayPipe(actor)
        self._actor = actor
        self._where = actor.where.remote()
        self._waiting = actor.events.options(concurrency_group=WAITING)
        self._status: int | None = None
        self._ended = threading.Event()
        self._listening.start()

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
        """See :class:`Handle`."""
        if self.name != RoleName.TRAINER:
            with self.pipe.calling, suppress(RayError):
                self._actor.end.remote()

    def kill(self) -> None:
        """See :class:`Handle`."""
        with self.pipe.calling, suppress(RayError):
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
                with self.pipe.calling:
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
            self._take_address(event["address"], event["found"])
        elif "message" in event:
            self.pipe.messages.put(event["message"])
        elif "printed" in event:
            stream = sys.stdout if event["to"] == 1 else sys.stderr
            stream.buffer.write(event["printed"])
            stream.flush()
        else:
            self._words, self._status = event["words"], event["status"]
