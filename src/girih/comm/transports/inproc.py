"""Messages within one process: ``inproc://NAME``. Parts are handed over as they are."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from girih.comm.rpc.channel import SERVER, PlainChannel
from girih.comm.rpc.frames import Part
from girih.errors import WireError

_SERVERS: dict[str, InprocServer] = {}
_LOCK = threading.Lock()


class _Inbox(PlainChannel):
    """What came, and a way to wait for it."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, list[Part]]] = deque()
        self._event = threading.Event()

    def take(self, peer: bytes, parts: Sequence[Part]) -> None:
        """From the other side's thread."""
        self.inbox.append((peer, list(parts)))
        self._event.set()

    def receive(self) -> tuple[bytes, list[Part]] | None:
        return self.inbox.popleft() if self.inbox else None

    def wait(self, seconds: float | None) -> None:
        if not self.inbox and (seconds is None or seconds > 0):
            self._event.wait(seconds)
        self._event.clear()  # whoever sets it again appended before, and is seen by the receive that follows

    def wake(self) -> None:
        self._event.set()


class InprocServer(_Inbox):
    """Listens at a name of this process; ``inproc://*`` draws one.

    Raises:
        WireError: the name is taken.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = f"inproc://{os.urandom(8).hex()}" if address == "inproc://*" else address
        self.clients: dict[bytes, InprocClient] = {}
        with _LOCK:
            if _SERVERS.setdefault(self.address, self) is not self:
                raise WireError(
                    f"cannot listen at {address!r}: this process does already; inproc://* draws a name"
                )

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        client = self.clients.get(peer)
        if client is not None:
            client.take(SERVER, parts)

    def close(self) -> None:
        with _LOCK:
            del _SERVERS[self.address]
        self.clients.clear()
        self.inbox.clear()


class InprocClient(_Inbox):
    """Sends to the server of a name, whichever it is at the time."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._name = os.urandom(16)

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        with _LOCK:  # so that a server that is closed keeps nothing
            server = _SERVERS.get(self._address)
            if server is not None:
                server.clients[self._name] = self
                server.take(self._name, parts)

    def close(self) -> None:
        with _LOCK:
            server = _SERVERS.get(self._address)
            if server is not None:
                server.clients.pop(self._name, None)
        self.inbox.clear()
