"""Messages over sockets: the side that connects, and connects again."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from girih.comm.rpc.channel import SERVER, PlainChannel
from girih.comm.rpc.frames import Limits, Part
from girih.comm.transports.addresses import TCP, Local
from girih.comm.transports.socket_server import NAME_BYTES, linger
from girih.comm.transports.streams import GarbageError, LostError, Stream, laid_out
from girih.comm.transports.wakeup import Wakeup
from girih.kernels.buffers import Buffers

_LEAST_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 1.0
_GONE_S: Final = 0.5  # a server that left and refuses connections for so long is dead
_REFUSED: Final = (errno.ECONNREFUSED, errno.ENOENT)
_IN: Final = selectors.EVENT_READ
_OUT: Final = selectors.EVENT_WRITE


class SocketClient(PlainChannel):
    """One connection, which is made again when it is lost; until then messages are kept. One that was sent in part,
    or that the system had, may be lost: the RPC asks again.
    """

    def __init__(self, place: TCP | Local, limits: Limits) -> None:
        self._place = place
        self._limits = limits
        self._buffers = Buffers()
        self._name = np.frombuffer(os.urandom(NAME_BYTES), np.uint8)
        self._wakeup = Wakeup()
        self._selector = (
            selectors.DefaultSelector()
        )  # epoll or kqueue: other threads may change what is waited for
        self._selector.register(self._wakeup.fileno(), _IN)
        self._events: list[tuple[selectors.SelectorKey, int]] = []
        self._stream: Stream | None = None
        self._connected = False
        self._kept: deque[list[memoryview]] = deque()  # without a stream
        self._pause_s = _LEAST_PAUSE_S
        self._next_s = 0.0  # when to connect again
        self._lost_s: float | None = None  # since when there is no connection, after one
        self._refused = False
        self._connect()

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        stream = self._stream
        if stream is None:
            self._kept.append(laid_out(parts))
            if time.monotonic() > self._next_s - self._pause_s + _LEAST_PAUSE_S:
                self._connect()
            return
        if not self._connected:
            stream.unsent.append(laid_out(parts))
            return
        before = bool(stream.unsent)
        try:
            stream.send(parts)
        except LostError:
            self._lose()
            return
        if stream.unsent and not before:
            self._selector.modify(stream, _IN | _OUT, stream)

    def receive(self) -> tuple[bytes, list[Part]] | None:
        self._handle_events()
        if self._stream is None or not self._connected:
            return None
        try:
            if self._stream.unsent:
                self._flush(self._stream)
            parts = self._stream.receive()
        except LostError as error:
            self._lose()
            if isinstance(error, GarbageError):
                raise
            return None
        return None if parts is None else (SERVER, parts)

    def wait(self, seconds: float | None) -> None:
        if self._stream is None:
            pause_s = self._next_s - time.monotonic()
            seconds = pause_s if seconds is None else min(seconds, pause_s)
        self._events = self._selector.select(None if seconds is None else max(0, seconds))

    def wake(self) -> None:
        self._wakeup.ask()

    def gone(self, peer: bytes) -> bool:
        lost_s = self._lost_s
        return self._refused and lost_s is not None and time.monotonic() - lost_s > _GONE_S

    def close(self) -> None:
        if self._stream is not None:
            if self._connected:
                linger([self._stream])
            self._stream.close()
        self._selector.close()
        self._wakeup.close()

    def _connect(self) -> None:
        """Begins to; what comes of it is an event."""
        self._next_s = time.monotonic() + self._pause_s
        try:
            connection, place = self._place.dial()
        except OSError:  # the host is not known, yet
            self._fail(None)
            return
        connection.setblocking(False)
        self._stream = stream = Stream(connection, self._limits, self._buffers, trusted=True)
        stream.unsent, self._kept = self._kept, deque()
        error = connection.connect_ex(place)
        if not error:
            self._made(stream)
        elif error == errno.EINPROGRESS:
            self._selector.register(stream, _OUT, stream)
        else:
            self._fail(error)

    def _handle_events(self) -> None:
        events, self._events = self._events, []
        for key, mask in events:
            stream = self._stream
            if key.data is None:
                self._wakeup.heard()
            elif stream is None or key.data is not stream:
                continue  # of a connection that is gone
            elif not self._connected:
                error = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self._selector.unregister(stream)
                if error:
                    self._fail(error)
                else:
                    self._made(stream)
            elif mask & _IN:
                stream.readable = True
        if self._stream is None and time.monotonic() >= self._next_s:
            self._connect()

    def _made(self, stream: Stream) -> None:
        self._place.prepare(stream.socket)
        self._connected, self._refused, self._lost_s = True, False, None
        self._pause_s = _LEAST_PAUSE_S
        self._selector.register(stream, _IN, stream)
        stream.unsent.appendleft(laid_out([self._name]))
        try:
            self._flush(stream)
        except LostError:
            self._lose()

    def _flush(self, stream: Stream) -> None:
        stream.flush()
        self._selector.modify(stream, _IN | _OUT if stream.unsent else _IN, stream)

    def _lose(self) -> None:
        """Of a connection that was made."""
        stream = self._stream
        if stream is None:
            return
        self._selector.unregister(stream)
        self._connected = False
        self._lost_s = time.monotonic()
        self._next_s = self._lost_s + self._pause_s
        self._drop()

    def _fail(self, error: int | None) -> None:
        """Of one that was not."""
        self._refused = error in _REFUSED
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
        self._drop()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._kept = self._stream.unbegun()
            self._stream = None
        self.wake()  # there is a time to connect at
