"""The actor of each process of a run: it starts the process on its node, and connects it with the launcher."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from girih.cluster.launchers.local import LocalLauncher, LocalProcess
from girih.cluster.roles import HostSpec, RoleName, title
from girih.processes.pipe import from_text, module_command
from girih.processes.segments import hold

ASKED_S = 20.0
"""The time after which :meth:`Agent.events` answers even without events."""

Event = Mapping[str, object]
"""A mapping with one of these sets of keys: ``address`` and ``found``; ``message``, from trainers; ``printed`` and
``to``, 1 or 2.

The last event has ``status`` and ``words``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that is needed to start a process of a run on any node.

    Attributes:
        threads: OpenMP threads; None leaves it to the process.
        folder: its working directory, which must exist on its node.
        launched_from: the launcher's node.
        seen: a file that must exist on its node, because the process writes next to it. "" for a process that writes
            nothing.
        trainer: the words of ``girih`` for a trainer, or for a restarted trainer.
        num_trainers, hello: see :class:`girih.cluster.launchers.local.LocalLauncher`.
        environment: variables of the launcher that the run needs.
    """

    name: RoleName
    index: int
    incarnation: int
    threads: int | None
    folder: str
    launched_from: str
    seen: str
    trainer: Sequence[str]
    num_trainers: int
    hello: Mapping[str, Any]
    environment: Mapping[str, str]


class Agent:
    """One process. Its events are numbered from 0, so that the launcher can request a lost answer again.

    Ray may call its methods twice. So ``begin`` and ``send`` carry the number of the message.
    """

    def __init__(self, order: Order, host: str) -> None:
        self._events: list[Event] = []
        self._first = 0  # the number of the first event that is kept
        self._changed = threading.Condition()
        self._sent = 0
        self._process: LocalProcess | None = None
        try:
            self._process = self._start(order, host)
        except OSError as error:
            self._send_event({"status": 2, "words": f"girih: {error}"})

    def where(self) -> tuple[int, str]:
        """Returns the process id and the name of its node; id 0 if the process could not be started."""
        return (0 if self._process is None else self._process.pid), socket.gethostname()

    def send(self, number: int, message: dict[str, str]) -> None:
        """Sends message ``number`` to the process, counted from 1."""
        if number <= self._sent or self._process is None:
            return
        self._sent = number
        if "role" in message:
            self._process.begin(from_text(message["role"]))
        else:
            self._process.pipe.send(message)

    def events(self, first: int) -> list[Event]:
        """Returns the events from ``first`` on, waiting if there are none. Earlier events are forgotten."""
        with self._changed:
            del self._events[: first - self._first]
            self._first = first
            self._changed.wait_for(lambda: self._events, ASKED_S)
            return list(self._events)

    def end(self) -> None:
        """Asks the process to end."""
        if self._process is not None:
            self._process.end()

    def kill(self) -> None:
        """Ends the process immediately."""
        if self._process is not None:
            self._process.kill()

    def _start(self, order: Order, host: str) -> LocalProcess:
        where = f"{title(order.name, order.index)} on node {host}"
        if not Path(order.folder).is_dir():
            raise OSError(
                f"{where} does not see the folder {order.folder}; start girih in a folder that all nodes share, or as a Ray"
                " job with a working_dir"
            )
        if order.seen and not Path(order.seen).is_file():
            raise OSError(
                f"{where} does not see the folder {Path(order.seen).parent} of node {order.launched_from}; name a run directory on"
                " storage that all nodes share by --run"
            )
        os.chdir(order.folder)
        launcher = LocalLauncher(
            {title(order.name, order.index): HostSpec(host=host, environment=order.environment)},
            trainer=module_command("girih", *order.trainer),
            again=module_command("girih", *order.trainer),
            num_trainers=order.num_trainers,
            hello=order.hello,
        )
        is_first = order.name == RoleName.TRAINER and order.index == 0
        printed = [os.pipe() for _ in range(2 if is_first else 0)]
        held = hold(order.hello["segments"], title(order.name, order.index).replace(" ", "-"))
        try:
            process = launcher.start(
                order.name,
                order.index,
                order.incarnation,
                order.threads,
                terminal=[theirs for _, theirs in printed] or None,
                held=held,
            )
        finally:
            for descriptor in (*(theirs for _, theirs in printed), *([] if held is None else [held])):
                os.close(descriptor)
        hearing = [self._in_thread(self._forward_output, ours, to) for to, (ours, _) in enumerate(printed, 1)]
        if order.name == RoleName.TRAINER:
            hearing.append(self._in_thread(self._forward_messages, process))
        self._in_thread(self._watch, process, hearing)
        return process

    def _watch(self, process: LocalProcess, hearing: Sequence[threading.Thread]) -> None:
        """Reports a role's address, and the end of the process."""
        if process.name != RoleName.TRAINER and process.wait_for_address(None):
            self._send_event({"address": process.address, "found": process.recovery_note})
        status = process.wait()
        for thread in hearing:
            thread.join()
        words = process.last_words()
        process.close()
        self._send_event({"status": status, "words": words})

    def _forward_messages(self, process: LocalProcess) -> None:
        with suppress(EOFError):
            while True:
                self._send_event({"message": process.pipe.receive()})

    def _forward_output(self, printed: int, to: int) -> None:
        with open(printed, "rb", buffering=0) as source:
            while text := source.read(1 << 16):
                self._send_event({"printed": text, "to": to})

    def _send_event(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _in_thread(self, work: Callable[..., object], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=work, args=arguments, name="girih-agent", daemon=True)
        thread.start()
        return thread
