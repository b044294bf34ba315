"""The answering side: one thread that receives and calls the handler; replies are sent by who gives them."""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc.frames import (
    GOODBYE,
    REQUEST,
    Limits,
    Packed,
    total_bytes,
    unpack,
)  # fmt: skip
from girih.comm.rpc.handshake import Hello, Welcome
from girih.comm.rpc.request import Request
from girih.comm.rpc.session import Session
from girih.comm.rpc.transport import Connection, ConnectionLost, Listener, Stranger
from girih.comm.transports.wakeup import Wakeup
from girih.errors import WireError
from girih.kernels.buffers import Buffers

LINGER_S: Final = 0.3
_LOG = logging.getLogger(__name__)
_MOST_AT_ONCE: Final = 64  # messages before it looks at the files
_TIDY_S: Final = 0.25
_IDLE_S: Final = 5.0
_STRANGER_S: Final = 5.0  # for the handshake
_MOST_STRANGERS: Final = 256
_SESSION_S: Final = 120.0  # a client without a connection for so long is forgotten
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IN: Final = selectors.EVENT_READ
_OUT: Final = selectors.EVENT_WRITE


class Peer:
    """A client, as its server sees it.

    Attributes:
        number: its session's.
        connection: None while it is broken, since ``lost_s``.
        lock: of the session, and of sending.
        gone: it said goodbye, or was forgotten.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.session = Session()
        self.connection: Connection | None = None
        self.lost_s = time.monotonic()
        self.lock = threading.Lock()
        self.gone = False


class Server:
    """Answers clients until it is closed. Made by ``listen``.

    Attributes:
        address: what clients connect to.
        incarnation, limits: see ``listen``.
        bytes_sent, bytes_received: of all messages, headers included; what is sent twice counts twice.
        num_refused: strangers who did not prove that they know the secret, or not in time.
        num_damaged: messages that could not be read; each ended its connection.
    """

    def __init__(
        self,
        listener: Listener,
        handler: Callable[[Request], None],
        *,
        secret: bytes,
        limits: Limits,
        incarnation: int,
    ) -> None:
        self.address = listener.address
        self.incarnation, self.limits = incarnation, limits
        self.bytes_sent = self.bytes_received = 0
        self.num_refused = self.num_damaged = 0
        self._buffers = Buffers()
        self._listener, self._handler, self._secret = listener, handler, secret
        self._strangers: dict[Stranger, float] = {}  # until when
        self._peers: dict[int, Peer] = {}  # by session
        self._ready: deque[Peer] = deque()  # may have messages, each by turns
        self._blocked: deque[Peer] = deque()  # have something left to send
        self._counting = threading.Lock()
        self._closing = False
        self._accepting = False
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.fileno(), _IN, lambda _: self._wakeup.heard())
        self._thread = threading.Thread(target=self._run, name=f"girih server {self.address}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Answers that were given are sent; then all is closed. Requests under way stay unanswered."""
        self._closing = True
        if threading.current_thread() is self._thread:
            return  # a handler may close its server: it ends after the handler
        self._wakeup.ask()
        self._thread.join()

    def _answer(self, peer: Peer, number: int, status: int, packed: Packed) -> None:
        """From any thread."""
        with peer.lock:
            if not peer.gone:
                self._put(peer, peer.session.message(status, number, packed)[1])

    def _buffer(self, peer: Peer, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        connection = peer.connection
        array = None if connection is None else connection.buffer(np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array

    def _run(self) -> None:
        tidy_s = 0.0
        try:
            while not self._closing:
                if time.monotonic() >= tidy_s:
                    self._tidy()
                    tidy_s = time.monotonic() + _TIDY_S
                for key, mask in self._selector.select(self._rest_s()):
                    key.data(mask)
                while self._blocked:
                    self._watch(self._blocked.popleft())
                for _ in range(_MOST_AT_ONCE):
                    if not self._ready or self._closing:
                        break
                    self._receive(self._ready.popleft())
        except Exception:  # the clients see that the connection ends
            _LOG.critical("%s: the server failed and is closed", self.address, exc_info=True)
        finally:
            self._end()

    def _rest_s(self) -> float:
        """The longest time that it may wait for files."""
        if self._ready:
            return 0.0
        return _TIDY_S if self._strangers or not self._accepting else _IDLE_S

    def _end(self) -> None:
        self._closing = True
        end_s = time.monotonic() + LINGER_S
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        for peer in self._peers.values():
            with peer.lock:
                peer.gone = True
                if peer.connection is not None:
                    peer.connection.close(max(0.0, end_s - time.monotonic()))
        self._peers.clear()
        self._ready.clear()
        self._selector.close()
        self._wakeup.close()

    def _tidy(self) -> None:
        """Listens again; forgets who is late."""
        now = time.monotonic()
        for stranger in [stranger for stranger, end_s in self._strangers.items() if now > end_s]:
            self._refuse(stranger, "nothing that he said in time")
        for peer in [p for p in self._peers.values() if p.connection is None and now - p.lost_s > _SESSION_S]:
            self._forget(peer)
        if not self._accepting and len(self._strangers) < _MOST_STRANGERS:
            self._accepting = True
            self._selector.register(self._listener, _IN, self._accept)

    def _accept(self, _: int) -> None:
        """Takes whoever connected in; pauses while there are no descriptors or too many strangers."""
        try:
            while len(self._strangers) < _MOST_STRANGERS:
                stranger = self._listener.accept()
                if stranger is None:
                    return
                self._selector.register(stranger, _IN, partial(self._hear, stranger))
                self._strangers[stranger] = time.monotonic() + _STRANGER_S
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS:  # of one connection, which is gone
                return
            _LOG.warning("%s: cannot take connections now: %s", self.address, error)
        self._accepting = False
        self._selector.unregister(self._listener)

    def _hear(self, stranger: Stranger, _: int) -> None:
        try:
            found = stranger.hear(self._secret, self._greet)
        except Exception as error:  # whatever he said, it ends nobody but him
            self._refuse(stranger, error)
            return
        if found is not None:
            del self._strangers[stranger]
            self._selector.unregister(stranger)
            self._join(*found)

    def _refuse(self, stranger: Stranger, why: object) -> None:
        self.num_refused += 1
        _LOG.debug("%s: refused a stranger: %s", self.address, why)
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()

    def _greet(self, hello: Hello) -> Welcome:
        """For somebody who proved that he knows the secret: a session he had, or a new one."""
        peer = self._peers.get(hello.session)
        if peer is None:
            peer = Peer(secrets.randbits(63) | 1)
            self._peers[peer.number] = peer
        elif peer.connection is not None:  # it broke, and this side does not know yet
            self._lose(peer)
        return Welcome(self.incarnation, peer.number, peer.session.received, self.limits)

    def _join(self, connection: Connection, hello: Hello, number: int) -> None:
        peer = self._peers[number]
        with peer.lock:
            peer.connection = connection
            self._selector.register(connection, _IN, partial(self._handle, peer))
            for parts in peer.session.resume(hello.received if hello.session == number else 0):
                self._put(peer, parts)

    def _handle(self, peer: Peer, mask: int) -> None:
        if mask & _OUT:
            self._watch(peer)
        if mask & _IN and peer not in self._ready:
            self._ready.append(peer)

    def _watch(self, peer: Peer) -> None:
        """Sends on; waits for the file to be writable while something is left."""
        with peer.lock, suppress(ConnectionLost):
            if peer.connection is not None:
                flushed = peer.connection.flush()
                self._selector.modify(
                    peer.connection, _IN if flushed else _IN | _OUT, partial(self._handle, peer)
                )

    def _put(self, peer: Peer, parts: list[NDArray[np.uint8]]) -> None:
        """Sends; what does not go at once, the server's thread sends. Under the peer's lock."""
        with self._counting:
            self.bytes_sent += total_bytes(parts)
        with suppress(ConnectionLost):  # the server's thread sees it too
            if peer.connection is not None and not peer.connection.send(parts):
                self._blocked.append(peer)
                self._wakeup.ask()

    def _receive(self, peer: Peer) -> None:
        """Takes one message of a peer."""
        connection = peer.connection
        if connection is None:
            return
        try:
            parts = connection.receive()
            if parts is None:
                return
            request = self._take(peer, parts)
        except Exception as error:  # one bad message ends one connection
            self.num_damaged += not isinstance(error, ConnectionLost)
            _LOG.debug("%s: %s", self.address, error)
            self._lose(peer)
            return
        del parts  # its memory may be wanted back before the next one comes
        if not peer.gone:
            self._ready.append(peer)
        if request is not None:
            self._call(request)

    def _take(self, peer: Peer, parts: list[NDArray[np.uint8]]) -> Request | None:
        """A request, if the message is a new one."""
        self.bytes_received += total_bytes(parts)
        header, frame = unpack(parts, self.limits)
        with peer.lock:
            is_new = peer.session.hear(header)
        if header.status == GOODBYE:
            self._forget(peer)
        if header.status != REQUEST or not is_new:
            return None
        answer, buffer = partial(self._answer, peer, header.number), partial(self._buffer, peer)
        return Request(frame, peer.number, self.limits, answer, buffer)

    def _call(self, request: Request) -> None:
        try:
            self._handler(request)
        except Exception as error:
            try:
                request.fail(error)
            except WireError:
                kind = request.frame.kind
                _LOG.exception("%s: the handler of kind %d failed after it replied", self.address, kind)

    def _lose(self, peer: Peer) -> None:
        with peer.lock:
            connection, peer.connection, peer.lost_s = peer.connection, None, time.monotonic()
            if connection is not None:
                self._selector.unregister(connection)
                connection.close()

    def _forget(self, peer: Peer) -> None:
        peer.gone = True
        self._peers.pop(peer.number, None)
        if peer.connection is not None:
            self._lose(peer)
