"""The asking side: calls from any thread.

Who calls sends by itself. A thread of the client's own, the poller, does all else: it connects, and connects again,
receives replies, finishes calls and calls back.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc.frames import (
    ACKNOWLEDGE,
    FAILED,
    GOODBYE,
    REPLY,
    REQUEST,
    Frame,
    Header,
    Limits,
    Packed,
    total_bytes,
    unpack,
)  # fmt: skip
from girih.comm.rpc.handshake import Hello, Welcome
from girih.comm.rpc.reply import Reply
from girih.comm.rpc.session import Session
from girih.comm.rpc.transport import Connection, ConnectionLost, Dialer
from girih.comm.transports.wakeup import Wakeup
from girih.errors import Lost, RemoteError, WireError, WireTimeout
from girih.kernels.buffers import Buffers

LINGER_S: Final = 0.3
_LOG = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_LEAST_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 0.25
_GONE_S: Final = 0.5  # a server that left and refuses connections for so long is dead
_LASTING_S: Final = 1.0
_MOST_UNACKNOWLEDGED_BYTES: Final = 1 << 22  # of replies, for which the server holds memory
_NO_FRAME: Final = Packed(Frame(0), Limits())
_IN: Final = selectors.EVENT_READ
_OUT: Final = selectors.EVENT_WRITE


class Client:
    """Calls one server. Made by ``connect``.

    Args:
        dial: what connects to an address.
        address, secret, timeout_s, resolve: see ``connect``.

    Attributes:
        address: the server's, as last resolved.
        incarnation: the server's; None before the first connection.
        bytes_sent, bytes_received: of all messages, headers included; what is sent twice counts twice.
        num_reconnects: connections after the first one.
        num_lost: calls that failed with ``Lost``.
        num_damaged: messages that could not be read; each ended its connection.
    """

    def __init__(
        self,
        dial: Callable[[str], Dialer],
        address: str,
        *,
        secret: bytes,
        timeout_s: float,
        resolve: Callable[[], str] | None,
    ) -> None:
        self.address = address
        self.incarnation: int | None = None
        self.bytes_sent = self.bytes_received = 0
        self.num_reconnects = self.num_lost = self.num_damaged = 0
        self._dial, self._resolve, self._secret, self._timeout_s = dial, resolve, secret, timeout_s
        self._dialer = dial(address)
        self._limits = Limits()
        self._buffers = Buffers()
        self._lock = threading.Lock()  # of all below, and of sending
        self._connection: Connection | None = None
        self._session, self._session_number = Session(), 0
        self._unsent: dict[Reply, Packed] = {}  # made while there is no connection
        self._waiting: dict[int, Reply] = {}  # sent, by number
        self._deadline_s = math.inf  # the first of all calls
        self._received = 0  # messages that the server had when it was connected last
        self._unacknowledged_bytes = 0
        self._blocked = False  # something is left to send
        self._pause_s = 0.0  # before the next attempt to connect
        self._connected_s = 0.0
        self._lost_s = time.monotonic()  # when there was a useful connection last
        self._closed = False
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup.fileno(), _IN)
        self._thread = threading.Thread(target=self._run, name=f"girih client {address}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(
        self,
        kind: int,
        fields: Sequence[int] = (),
        arrays: Sequence[NDArray[Any]] = (),
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Asks; from any thread, as often as you like before the first reply. Never waits.

        The arrays are given away: nobody may write to them again.

        Args:
            timeout_s: after so long it fails with ``WireTimeout``; by default it lasts while there is a connection.

        Raises:
            WireError: the frame is beyond the limits, or the client is closed.
        """
        packed = Packed(Frame(kind, tuple(fields), tuple(arrays)), self._limits)
        reply = Reply(self.address, kind, timeout_s)
        with self._lock:
            if self._closed:
                raise WireError(f"{self.address}: kind {kind}: the connection was closed on this side")
            if self._connection is None:
                self._unsent[reply] = packed
            else:
                self._send(reply, packed)
            wakes = self._connection is None or reply.deadline_s < self._deadline_s
            self._deadline_s = min(self._deadline_s, reply.deadline_s)
        if wakes:
            self._wakeup.ask()
        return reply

    def buffer(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """An array to fill that ``call`` sends without a copy."""
        connection = self._connection
        array = None if connection is None else connection.buffer(np.dtype(dtype), shape)
        return self._buffers.take(dtype, *shape) if array is None else array

    def close(self) -> None:
        """Calls that are not answered raise ``WireError``."""
        with self._lock:
            self._closed = True
        self._wakeup.ask()
        self._dialer.stop()
        if threading.current_thread() is self._thread:
            return  # a callback may close its client: it ends after the callback
        self._thread.join()

    def _run(self) -> None:
        why = "the connection was closed on this side"
        try:
            while not self._closed:
                connection = self._connection
                if connection is None:
                    self._connect()
                else:
                    self._receive(connection)
                self._expire()
        except Exception as error:
            _LOG.exception("%s: the client failed and is closed", self.address)
            why += f": {error!r}"
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(ConnectionLost):
                connection.send(self._session.uncounted(GOODBYE, _NO_FRAME))
            connection.close(LINGER_S)
        self._fail([*self._waiting.values(), *self._unsent], WireError, why)
        self._selector.close()
        self._wakeup.close()

    def _connect(self) -> None:
        """Tries once; where it fails, waits for a moment, or until there is a call."""
        try:
            if self._resolve is not None and self._pause_s:
                self.address = self._resolve()
                self._dialer = self._dial(self.address)
            if self._closed:  # too late to be stopped
                return
            hello = Hello(self._session_number, self._session.received)
            connection, welcome = self._dialer.dial(self._secret, hello, min(_HANDSHAKE_S, self._timeout_s))
        except (OSError, LookupError) as error:  # WireError is an OSError
            self._give_up(error)
            self._pause()
            return
        self._begin(connection, welcome)

    def _begin(self, connection: Connection, welcome: Welcome) -> None:
        """Goes on with the session, or begins another one."""
        lost: list[Reply] = []
        refused: list[tuple[Reply, WireError]] = []
        before, self.incarnation = self.incarnation, welcome.incarnation
        with self._lock:
            self.num_reconnects += before is not None
            self._limits, self._connected_s = welcome.limits, time.monotonic()
            self._selector.register(connection, _IN)
            self._connection = connection
            if welcome.session == self._session_number:
                if welcome.received > self._received:
                    self._pause_s = 0.0  # the last connection was of use
                for parts in self._session.resume(welcome.received):
                    self._put(parts)
            else:
                lost = list(self._waiting.values())
                self._waiting.clear()
                self._session, self._session_number = Session(), welcome.session
            self._received = welcome.received
            for reply, packed in self._unsent.items():
                try:
                    self._send(reply, packed)
                except WireError as error:
                    refused.append((reply, error))
            self._unsent.clear()
        for reply, why in refused:
            reply.finish(why)
        self.num_lost += len(lost)
        lives = f"incarnation {before}, now {welcome.incarnation}"
        if before == welcome.incarnation:
            lives = f"incarnation {before}, which does not know this connection any more"
        self._fail(lost, Lost, f"lost, as the process that was called was restarted ({lives})")

    def _send(self, reply: Reply, packed: Packed) -> None:
        packed.check(self._limits)  # those of the server, which the call may not have known
        self._unacknowledged_bytes = 0
        number, parts = self._session.message(REQUEST, 0, packed)
        self._waiting[number] = reply
        self._put(parts)

    def _put(self, parts: list[NDArray[np.uint8]]) -> None:
        """Sends; what does not go at once, the poller sends."""
        self.bytes_sent += total_bytes(parts)
        with suppress(ConnectionLost):  # the poller sees it too
            if self._connection is not None and not self._connection.send(parts):
                self._blocked = True
                self._wakeup.ask()

    def _receive(self, connection: Connection) -> None:
        """Waits, then takes all messages that are there."""
        try:
            if self._blocked:
                with self._lock:
                    self._blocked = not connection.flush()
                self._selector.modify(connection, _IN | _OUT if self._blocked else _IN)
            self._wait(None)
            parts = connection.receive()
            while parts is not None and not self._closed:
                self.bytes_received += total_bytes(parts)
                header, frame = unpack(parts, self._limits)
                del parts  # whoever waits may drop its memory before the next one comes
                self._take(header, frame)
                del frame
                parts = connection.receive()
        except WireError as error:
            self.num_damaged += not isinstance(error, ConnectionLost)
            _LOG.debug("%s: %s", self.address, error)
            self._lose(connection, error)

    def _take(self, header: Header, frame: Frame) -> None:
        self._pause_s = 0.0
        with self._lock:
            if not self._session.hear(header):
                return
            reply = self._waiting.pop(header.request, None)
            self._unacknowledged_bytes += sum(array.nbytes for array in frame.arrays)
            if self._unacknowledged_bytes >= _MOST_UNACKNOWLEDGED_BYTES:
                self._unacknowledged_bytes = 0
                self._put(self._session.uncounted(ACKNOWLEDGE, _NO_FRAME))
        if reply is None:  # it was given up
            return
        if header.status == REPLY:
            reply.finish(frame)
        elif header.status == FAILED and frame.arrays:
            reply.finish(RemoteError(bytes(frame.arrays[0]).decode(errors="replace")))
        else:
            reply.finish(WireError(f"{self.address}: an answer of status {header.status}"))

    def _lose(self, connection: Connection, error: WireError) -> None:
        now = time.monotonic()
        if not self._pause_s or now - self._connected_s > _LASTING_S:  # it was of use
            self._lost_s = now
        with self._lock:
            self._connection = None
            self._selector.unregister(connection)
            connection.close()
        self._give_up(error)
        self._pause()

    def _pause(self) -> None:
        """Waits before the next attempt: not at all after a connection that was of use."""
        pause_s, self._pause_s = self._pause_s, min(max(2 * self._pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        if pause_s:
            self._wait(pause_s)

    def _wait(self, seconds: float | None) -> None:
        """For messages, for ``_wakeup``, and for the first deadline."""
        end_s = math.inf if seconds is None else time.monotonic() + seconds
        until_s = min(end_s, self._deadline_s)
        left_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
        for key, _ in self._selector.select(left_s):
            if key.fd == self._wakeup.fileno():
                self._wakeup.heard()

    def _give_up(self, error: Exception) -> None:
        """Fails calls that found no connection for too long, or at once where nobody listens any more."""
        now = time.monotonic()
        refused = isinstance(error, (ConnectionRefusedError, FileNotFoundError)) and self._resolve is None
        gone = refused and self.incarnation is not None and now - self._lost_s > _GONE_S
        why = "the connection was lost, and nobody listens there any more"
        if not gone:
            why = f"no lasting connection for {self._timeout_s} s: {error}"

        def hopeless(reply: Reply) -> bool:
            return gone or now - max(self._lost_s, reply.made_s) > self._timeout_s

        self._drop(hopeless, f"{why}; is that process alive, and does it have the same secret?")

    def _expire(self) -> None:
        """Fails calls whose time is over."""
        now = time.monotonic()
        if now >= self._deadline_s:
            self._drop(lambda reply: reply.deadline_s <= now, "no answer within the time given for it")
            with self._lock:
                replies = (*self._waiting.values(), *self._unsent)
                self._deadline_s = min((reply.deadline_s for reply in replies), default=math.inf)

    def _drop(self, hopeless: Callable[[Reply], bool], why: str) -> None:
        with self._lock:
            dropped = [reply for reply in (*self._waiting.values(), *self._unsent) if hopeless(reply)]
            self._waiting = {number: reply for number, reply in self._waiting.items() if reply not in dropped}
            self._unsent = {reply: packed for reply, packed in self._unsent.items() if reply not in dropped}
        self._fail(dropped, WireTimeout, why)

    def _fail(self, replies: Sequence[Reply], kind: type[Exception], why: str) -> None:
        for reply in replies:
            reply.finish(kind(f"{self.address}: kind {reply.kind}: {why}"))
