"""The common part of both sides of calls: a thread that waits for files, and sends on what did not go at once."""

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
        """From any thread."""
        with suppress(OSError):  # it was asked often already, or is closed
            self._write.send(b"!")

    def clear(self) -> None:
        """Clears what was asked: what is asked from here on makes it readable again."""
        with suppress(BlockingIOError):
            self._read.recv(1 << 12)

    def close(self) -> None:
        self._read.close()
        self._write.close()


IN: Final = selectors.EVENT_READ
OUT: Final = selectors.EVENT_WRITE
LINGER_S: Final = 0.3
"""A side that ends tries so long to send what is left."""
_LOG = logging.getLogger(__name__)


_NO_FRAME: Final = PackedFrame(Frame(0))


class SessionLink(RpcSession):
    """One side of a session, and the connection that it has. Methods are called under its lock.

    Args:
        stuck: called with it when a message did not go at once.

    Attributes:
        connection: None while it is broken, since ``lost_s``.
    """

    def __init__(self, number: int, stuck: Callable[[SessionLink], None]) -> None:
        super().__init__(number)
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.lost_s = time.monotonic()
        self._stuck = stuck

    def send(self, status: int, request: int, packed: PackedFrame) -> int:
        """Counts and keeps a message, and sends it where there is a connection; returns its number."""
        header = self.keep(status, request, packed)
        if not self._over:
            self._put(header, packed)
        return header.number

    def send_status(self, status: int) -> None:
        """Sends a message without content, which may get lost."""
        self._put(Header(status, 0, 0, self.received), _NO_FRAME)

    def attach(self, connection: Connection, received: int) -> None:
        """Goes on over a connection to a side that has received so many."""
        self.connection = connection
        for header, packed in self.resume(received):
            self._put(header, packed)

    def flush(self) -> bool:
        """Sends on; whether nothing is left."""
        with suppress(ConnectionLost):
            return self.connection is None or self.connection.flush()
        return True

    def _put(self, header: Header, packed: PackedFrame) -> None:
        if self.connection is None:
            return
        with suppress(ConnectionLost):  # the thread that receives sees it too
            if not self.connection.send(packed.parts(header)):
                self._stuck(self)


class Poller(ABC):
    """One side; a subclass starts its thread, which takes turns until it is closed.

    Attributes:
        address: the server's.
        num_damaged: messages that could not be read; each ended its connection.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_damaged = 0
        self._closing = False
        self._buffers = Buffers()
        self._blocked: deque[SessionLink] = deque()  # have something left to send
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
        """Ends it and its connections. From any thread."""
        self._closing = True
        self._wakeup.ask()
        if threading.current_thread() is not self._thread:  # else it ends after this callback
            self._thread.join()

    @abstractmethod
    def _turn(self) -> None:
        """Waits for messages and handles them; called until the poller closes."""

    @abstractmethod
    def _end(self, why: str) -> None:
        """Closes connections and fails calls that wait; called last by the thread."""

    @abstractmethod
    def _on_readable(self, session: SessionLink) -> None:
        """Notes that there may be messages."""

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
        """For files, or until another thread wants something."""
        while self._blocked:
            self._flush(self._blocked.popleft())
        for key, mask in self._selector.select(seconds):
            key.data(mask)

    def _handle(self, session: SessionLink, mask: int) -> None:
        if mask & OUT:
            self._flush(session)
        if mask & IN:
            self._on_readable(session)

    def _flush(self, session: SessionLink) -> None:
        """Sends on; waits for the file to be writable while something is left."""
        with session.lock:
            flushed = session.flush()
            if session.connection is not None:
                wanted = IN if flushed else IN | OUT
                self._selector.modify(session.connection, wanted, partial(self._handle, session))
        if flushed:
            self._on_readable(session)  # it may have been held back, with messages that came here already

    def _stuck(self, session: SessionLink) -> None:
        self._blocked.append(session)
        self._wakeup.ask()

    def _attach(self, session: SessionLink, connection: Connection, received: int) -> None:
        """Goes on with a session over a connection, under its lock."""
        self._selector.register(connection, IN, partial(self._handle, session))
        session.attach(connection, received)

    def _detach(self, session: SessionLink, linger_s: float = 0.0) -> None:
        """Closes the connection that a session has."""
        with session.lock:
            connection, session.connection = session.connection, None
            session.lost_s = time.monotonic()
        if connection is not None:
            self._selector.unregister(connection)
            connection.close(linger_s)

    def _buffer(self, session: SessionLink, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        connection = session.connection
        array = None if connection is None else connection.buffer(np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array
