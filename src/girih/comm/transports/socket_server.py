"""Messages over sockets: TCP between hosts, local ones for ``shm://``. The side that listens."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from girih.comm.rpc.channel import PlainChannel
from girih.comm.rpc.frames import Limits, Part
from girih.comm.transports.addresses import TCP, Local
from girih.comm.transports.streams import GarbageError, LostError, Stream
from girih.comm.transports.wakeup import Wakeup
from girih.errors import WireError
from girih.kernels.buffers import Buffers

LINGER_S: Final = 0.3
NAME_BYTES: Final = 16
_LOST_S: Final = 60.0  # a peer that does not connect again for so long is gone
_IN: Final = selectors.EVENT_READ
_OUT: Final = selectors.EVENT_WRITE


class SocketServer(PlainChannel):
    """A listening socket and a stream for each peer. A peer names itself by 16 bytes, which it draws, in the first
    message of a connection; of two connections with one name the later counts.

    Raises:
        WireError: it cannot be listened there.
    """

    def __init__(self, place: TCP | Local, limits: Limits) -> None:
        self._place = place
        self._limits = limits
        self._buffers = Buffers()
        self._listener, self.address = place.listen()
        self._listener.setblocking(False)
        self._wakeup = Wakeup()
        self._selector = (
            selectors.DefaultSelector()
        )  # epoll or kqueue: other threads may change what is waited for
        self._selector.register(self._listener, _IN)
        self._selector.register(self._wakeup.fileno(), _IN)
        self._events: list[tuple[selectors.SelectorKey, int]] = []
        self._streams: dict[bytes, Stream] = {}
        self._strangers: set[Stream] = set()  # without a name yet
        self._ready: deque[Stream] = deque()  # may have messages, each by turns
        self._trusted: set[bytes] = set()
        self._lost_s: dict[bytes, float] = {}

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        stream = self._streams.get(peer)
        if stream is None:  # a peer that is gone: the RPC will find out
            return
        before = bool(stream.unsent)
        try:
            stream.send(parts)
        except LostError:
            self._lose(stream)
            return
        if stream.unsent and not before:
            self._selector.modify(stream, _IN | _OUT, stream)

    def receive(self) -> tuple[bytes, list[Part]] | None:
        self._handle_events()
        while self._ready:
            stream = self._ready.popleft()
            if stream.fileno() < 0:
                continue
            try:
                parts = stream.receive()
            except LostError as error:
                self._lose(stream)
                if isinstance(error, GarbageError):
                    raise
                continue
            finally:
                if stream.holds_more():
                    self._ready.append(stream)
            if parts is not None:
                if stream.peer:
                    return stream.peer, parts
                self._named(stream, parts)
        return None

    def wait(self, seconds: float | None) -> None:
        if self._ready:
            seconds = 0
        self._events = self._selector.select(None if seconds is None else max(0, seconds))

    def wake(self) -> None:
        self._wakeup.ask()

    def accept(self, peer: bytes, offer: bytes) -> bool:
        self._trusted.add(peer)
        if peer in self._streams:
            self._streams[peer].trust(self._limits)
        return True

    def forget(self, peer: bytes) -> None:
        self._trusted.discard(peer)
        self._lost_s.pop(peer, None)
        if peer in self._streams:
            self._lose(self._streams[peer])

    def gone(self, peer: bytes) -> bool:
        return peer in self._lost_s and time.monotonic() - self._lost_s[peer] > _LOST_S

    def close(self) -> None:
        self._listener.close()
        linger([*self._streams.values()])
        for stream in (*self._streams.values(), *self._strangers):
            stream.close()
        self._streams.clear()
        self._strangers.clear()
        self._ready.clear()
        self._selector.close()
        self._wakeup.close()

    def _handle_events(self) -> None:
        events, self._events = self._events, []
        for key, mask in events:
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                self._wakeup.heard()
            elif key.data.fileno() >= 0:
                self._handle(key.data, mask)

    def _handle(self, stream: Stream, mask: int) -> None:
        if mask & _OUT:
            try:
                stream.flush()
            except LostError:
                self._lose(stream)
                return
            if not stream.unsent:
                self._selector.modify(stream, _IN, stream)
        if mask & _IN and not stream.readable:
            if not stream.holds_more():
                self._ready.append(stream)
            stream.readable = True

    def _accept(self) -> None:
        with suppress(OSError):  # as many as there are; too many files: they stay in the system's queue
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                with suppress(OSError):
                    self._place.prepare(connection)
                stream = Stream(connection, self._limits, self._buffers, trusted=False)
                self._strangers.add(stream)
                self._selector.register(stream, _IN, stream)

    def _named(self, stream: Stream, parts: list[Part]) -> None:
        if len(parts) != 1 or len(parts[0]) != NAME_BYTES:
            self._lose(stream)
            raise WireError(f"a stranger that does not say its name of {NAME_BYTES} bytes first")
        peer = parts[0].tobytes()
        if peer in self._streams:
            self._lose(self._streams[peer])
        self._strangers.discard(stream)
        self._lost_s.pop(peer, None)
        self._streams[peer] = stream
        stream.peer = peer
        if peer in self._trusted:
            stream.trust(self._limits)

    def _lose(self, stream: Stream) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(stream)
        stream.close()
        self._strangers.discard(stream)
        if self._streams.get(stream.peer) is stream:
            del self._streams[stream.peer]
            if stream.peer in self._trusted:
                self._lost_s[stream.peer] = time.monotonic()


def linger(streams: Sequence[Stream]) -> None:
    """Sends what was not sent yet, for a moment."""
    end_s = time.monotonic() + LINGER_S
    for stream in streams:
        with suppress(LostError, OSError):
            while stream.unsent and time.monotonic() < end_s:
                stream.socket.settimeout(max(0.001, end_s - time.monotonic()))
                stream.flush()
            stream.socket.shutdown(socket.SHUT_WR)
