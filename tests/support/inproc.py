"""A transport without sockets: parts are handed over as they are, within one process, at ``inproc://NAME``."""

from __future__ import annotations

import hmac
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc import Client, Request, Server
from girih.comm.rpc.frames import Part
from girih.comm.rpc.poller import Wakeup
from girih.comm.rpc.transport import Connection, ConnectionLost, Hello, Welcome
from girih.errors import WireError

_LISTENERS: dict[str, _Listener] = {}


def listen(
    handler: Callable[[Request], None],
    *,
    address: str = "inproc://*",
    secret: bytes,
    incarnation: int = 0,
) -> Server:
    """See :func:`girih.comm.service.listen`; ``inproc://*`` draws a name."""
    return Server(_Listener(address), handler, secret=secret, incarnation=incarnation)


def connect(
    address: str, *, secret: bytes, timeout_s: float = 40.0, resolve: Callable[[], str] | None = None
) -> Client:
    """See :func:`girih.comm.service.connect`."""
    return Client(Dialer, address, secret=secret, timeout_s=timeout_s, resolve=resolve)


class _Inbox(Wakeup):
    """Items that came; its file is readable while there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Any] = deque()
        # nobody closes it if its stranger leaves before the welcome, or is never accepted
        weakref.finalize(self, self._read.close)
        weakref.finalize(self, self._write.close)

    def put(self, item: Any) -> None:
        self.queue.append(item)
        self.ask()

    def take(self) -> Any:
        """The next one, or None."""
        if not self.queue:
            self.clear()
        return self.queue.popleft() if self.queue else None


class _Connection:
    """One end."""

    def __init__(self, inbox: _Inbox) -> None:
        self.inbox = inbox
        self.fileno = inbox.fileno
        self.other: _Connection | None = None
        self._over = False

    def send(self, parts: Sequence[Part]) -> bool:
        other = self.other
        if other is None:
            raise ConnectionLost("closed")
        other.inbox.put(list(parts))
        return True

    def flush(self) -> bool:
        return True

    def receive(self) -> list[Part] | None:
        found: list[Part] | None = self.inbox.take()
        if found is None and self._over:
            raise ConnectionLost("the other side closed the connection")
        return found

    def buffer(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        return None

    def close(self, linger_s: float = 0.0) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.end()
        self.inbox.close()

    def end(self) -> None:
        """Nothing comes any more."""
        self._over = True
        self.inbox.ask()


class _Stranger:
    """Somebody who dials, and waits for a word."""

    def __init__(self, secret: bytes, hello: Hello) -> None:
        self.secret, self.hello = secret, hello
        self.origin = "this process"
        self.inbox = _Inbox()
        self.fileno = self.inbox.fileno
        self.answered = threading.Event()
        self.answer: tuple[Connection, Welcome] | None = None
        self.left = False
        self.inbox.put(True)

    def read_hello(self, secret: bytes) -> Hello | None:
        if self.left or not hmac.compare_digest(secret, self.secret):
            raise WireError("a stranger who left, or does not know the secret")
        self.inbox.take()
        return self.hello

    def welcome(self, secret: bytes, welcome: Welcome) -> Connection:
        here, there = _Connection(self.inbox), _Connection(_Inbox())
        here.other, there.other = there, here
        self.answer = there, welcome
        self.answered.set()
        return here

    def close(self) -> None:
        self.answered.set()
        self.inbox.close()


class _Listener:
    def __init__(self, address: str) -> None:
        self.address = f"inproc://{os.urandom(8).hex()}" if address == "inproc://*" else address
        self.inbox = _Inbox()
        self.fileno = self.inbox.fileno
        if _LISTENERS.setdefault(self.address, self) is not self:
            raise WireError(
                f"cannot listen at {address!r}: this process does already; inproc://* draws a name"
            )

    def accept(self) -> _Stranger | None:
        found: _Stranger | None = self.inbox.take()
        return found

    def close(self) -> None:
        del _LISTENERS[self.address]
        self.inbox.close()


class Dialer:
    """Connects to whoever listens at a name at the time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stranger: _Stranger | None = None
        self._stopped = False

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        listener = _LISTENERS.get(self._address)
        if listener is None:
            raise ConnectionRefusedError(f"no process listens at {self._address}")
        self._stranger = stranger = _Stranger(secret, hello)
        listener.inbox.put(stranger)
        if not self._stopped:
            stranger.answered.wait(timeout_s)
        if stranger.answer is None:
            stranger.left = True
            raise WireError("the other side closed the connection instead of greeting")
        return stranger.answer

    def stop(self) -> None:
        self._stopped = True
        if self._stranger is not None:
            self._stranger.answered.set()
