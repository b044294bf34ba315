"""The common part of both sides of calls: a thread that waits for files, and sends the unsent rest of messages."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc.frames import Frame, Header, PackedFrame
from girih.comm.rpc.session import RpcSession
from girih.comm.rpc.transport import Connection, ConnectionLost
from girih.kernels.buffers import Buffers


class Wakeup:
    """A file that becomes readable when another thread asks for it."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        return self._read.fileno()

    def ask(self) -> None:
        """Makes the file readable. Callable from any thread."""
        with suppress(OSError):  # the file is readable already, or is closed
            self._write.send(b"!")

    def clear(self) -> None:
        """Clears earlier requests. A later request makes the file readable again."""
        with suppress(BlockingIOError):
            self._read.recv(1 << 12)

    def close(self) -> None:
        self._read.close()
        self._write.close()


IN: Final = selectors.EVENT_READ
OUT: Final = selectors.EVENT_WRITE
LINGER_S: Final = 0.3
"""The time for which a closing side tries to send its remaining messages."""
_LOG = logging.getLogger(__name__)


_NO_FRAME: Final = PackedFrame(Frame(0))


class SessionLink(RpcSession):
    """One side of a session, with its connection. Callers of methods hold the link's lock.

    Args:
        stuck: called with the link if a message could not be sent completely.

    Attributes:
        connection: the connection, or None while it is broken. ``lost_s`` is the time at which it broke.
        events: the events of the connection that the poller's thread waits for: IN, OUT, both, or 0.
        lent: True while another thread receives.
    """

    def __init__(self, number: int, stuck: Callable[[SessionLink], None]) -> None:
        super().__init__(number)
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.lost_s = time.monotonic()
        self.events, self.lent = 0, False
        self._stuck = stuck

    def send(self, status: int, request: int, packed: PackedFrame) -> int:
        """Counts and keeps a message, and sends it if there is a connection. Returns the message's number."""
        header = self.keep(status, request, packed)
        if not self._over:
            self._put(header, packed)
        return header.number

    def send_status(self, status: int) -> None:
        """Sends a message without content. The message is not sent again if it gets lost."""
        self._put(Header(status, 0, 0, self.received), _NO_FRAME)

    def attach(self, connection: Connection, received: int) -> None:
        """Continues the session over a connection. The other side has received ``received`` messages."""
        self.connection = connection
        for header, packed in self.resume(received):
            self._put(header, packed)

    def flush(self) -> bool:
        """Continues to send. Returns whether all messages were sent."""
        with suppress(ConnectionLost):
            return self.connection is None or self.connection.flush()
        return True

    def _put(self, header: Header, packed: PackedFrame) -> None:
        if self.connection is None:
            return
        with suppress(ConnectionLost):  # the receiving thread also notices the broken connection
            if not self.connection.send(packed.parts(header)):
                self._stuck(self)


class Poller(ABC):
    """One side of calls. A subclass starts its thread, which takes turns until the poller closes.

    Attributes:
        address: the server's address.
        num_damaged: the number of messages that could not be read. Each of them ended its connection.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_damaged = 0
        self._closing = False
        self._buffers = Buffers()
        self._blocked: deque[SessionLink] = deque()  # links with unsent messages
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, IN, lambda _: self._wakeup.clear())
        self._side = type(self).__name__.lower()
        self._thread = threading.Thread(target=self._run, name=f"girih {self._side} {address}", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the poller and its connections. Callable from any thread."""
        self._closing = True
        self._wakeup.ask()
        if threading.current_thread() is not self._thread:  # else the thread ends after this callback
            self._thread.join()

    @abstractmethod
    def _turn(self) -> None:
        """Waits for messages and handles them. Called until the poller closes."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """Closes connections and fails waiting calls. The thread calls this method at its end."""

    @abstractmethod
    def _on_readable(self, session: SessionLink) -> None:
        """Records that messages may have arrived for a session."""

    def _run(self) -> None:
        why = "the connection was closed on this side"
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            _LOG.exception("%s: the %s failed and is closed", self.address, self._side)
            why += f": {error!r}"
        self._closing = True
        self._end(why)
        self._selector.close()
        self._wakeup.close()

    def _wait(self, seconds: float | None) -> None:
        """Waits for files, or until another thread wakes this thread."""
        while self._blocked:
            self._flush(self._blocked.popleft())
        for key, mask in self._selector.select(seconds):
            key.data(mask)

    def _handle(self, session: SessionLink, mask: int) -> None:
        if mask & OUT:
            self._flush(session)
        if mask & IN:
            self._on_readable(session)

    def _watch(self, session: SessionLink, events: int) -> None:
        """Waits for these events from now on. The caller holds the session's lock."""
        connection, before = session.connection, session.events
        if connection is None or events == before:
            return
        if not events:
            self._selector.unregister(connection)
        elif before:
            self._selector.modify(connection, events, partial(self._handle, session))
        else:
            self._selector.register(connection, events, partial(self._handle, session))
        session.events = events

    def _flush(self, session: SessionLink) -> None:
        """Continues to send. If a rest is left, the thread continues when the file is writable."""
        with session.lock:
            flushed = session.flush()
            self._watch(session, (0 if session.lent else IN) | (0 if flushed else OUT))
        if flushed:
            self._on_readable(session)  # messages may have arrived while reading was paused

    def _stuck(self, session: SessionLink) -> None:
        self._blocked.append(session)
        self._wakeup.ask()

    def _attach(self, session: SessionLink, connection: Connection, received: int) -> None:
        """Continues a session over a connection. The caller holds the session's lock."""
        session.attach(connection, received)
        self._watch(session, IN)

    def _detach(self, session: SessionLink, linger_s: float = 0.0) -> None:
        """Closes the connection of a session."""
        with session.lock:
            self._watch(session, 0)
            connection, session.connection = session.connection, None
            session.lost_s = time.monotonic()
        if connection is not None:
            connection.close(linger_s)

    def _buffer(self, session: SessionLink, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        connection = session.connection
        array = None if connection is None else connection.buffer(np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array
