"""The client side: calls from any thread.

The calling thread sends its call. A thread that waits for its reply receives all replies meanwhile, because a change of
thread takes longer than an empty call. While no thread waits, the client's thread receives them. The receiving thread
finishes calls and runs callbacks. The client's thread also connects and reconnects.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from numpy.typing import DTypeLike, NDArray

from girih.comm.rpc.frames import Frame, Header, PackedFrame, Status, unpack
from girih.comm.rpc.poller import IN, LINGER_S, Poller, SessionLink
from girih.comm.rpc.transport import Connection, ConnectionLost, Dialer, Hello, Welcome
from girih.errors import Lost, RemoteError, WireError, WireTimeout
from girih.telemetry.busy import waiting


class Reply(Future[Frame]):
    """The future answer to one call. The receiving thread runs callbacks, so they must be quick.

    Args:
        receive: ``receive(reply, timeout_s)`` may receive replies until this reply is done. It returns the rest of the time.

    Attributes:
        address, kind: the server and the kind of the call.
        made_s: the time of the call.
    """

    def __init__(self, address: str, kind: int, receive: Receive) -> None:
        super().__init__()
        self.address, self.kind = address, kind
        self.made_s = time.monotonic()
        self._receive = receive

    def wait(self, timeout_s: float | None = None) -> Frame:
        """Returns the answer. Its arrays are read-only views of the received memory.

        Raises:
            RemoteError: the other side failed.
            WireTimeout: the server cannot be reached, or did not answer within ``timeout_s``. It may still answer.
            Lost: the process that was called was restarted.
            WireError: the client was closed.
        """
        try:
            return self.result(timeout_s)
        except TimeoutError as error:
            if isinstance(error, WireTimeout):
                raise
            raise WireTimeout(
                f"{self.address}: kind {self.kind}: no answer within {timeout_s} s; the call goes on"
            ) from None

    def result(self, timeout: float | None = None) -> Frame:
        """See :class:`Future`. The wait does not count as busy time."""
        if not self.done():
            with waiting():
                return super().result(self._receive(self, timeout))
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`Future`. The wait does not count as work."""
        if not self.done():
            with waiting():
                return super().exception(self._receive(self, timeout))
        return super().exception()

    def add_done_callback(self, fn: Callable[[Future[Frame]], object]) -> None:
        """Calls ``fn`` when the reply is done. Then drops ``fn``, which may refer to this reply and its arrays."""
        held = [fn]
        super().add_done_callback(lambda reply: held.pop()(reply))

    def finish(self, result: Frame | Exception) -> None:
        """Sets the result. The receiving thread calls it once."""
        if isinstance(result, Exception):
            self.set_exception(result)
        else:
            self.set_result(result)


Receive = Callable[[Reply, float | None], float | None]
_LOG = logging.getLogger(__name__)
_HANDSHAKE_S: Final = 5.0
_LEAST_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 0.25
_GONE_S: Final = 0.5  # a server counts as dead after refusing connections for this time
_LASTING_S: Final = 1.0
_LOOK_S: Final = 0.1  # the time after which a receiving caller notices that the client was closed
_MOST_UNACKNOWLEDGED_BYTES: Final = 1 << 22  # replies whose memory the server still holds


class Client(Poller):
    """Calls one server. ``connect`` returns it.

    Args:
        dial: returns the dialer for an address.
        address, secret, timeout_s, resolve: see ``connect``.

    Attributes:
        address: the server's address, as last resolved.
        incarnation: the server's incarnation, or None before the first connection.
        num_reconnects: the number of connections after the first.
        num_lost: the number of calls that failed with ``Lost``.
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
        dialer = dial(address)  # first, because it may raise, and nothing has been opened yet
        super().__init__(address)
        self.incarnation: int | None = None
        self.num_reconnects = self.num_lost = 0
        self._dial, self._resolve, self._secret, self._timeout_s = dial, resolve, secret, timeout_s
        self._dialer = dialer
        self._session = SessionLink(0, self._stuck)  # its lock guards all attributes below
        self._unsent: dict[Reply, PackedFrame] = {}  # calls made without a connection
        self._waiting: dict[int, Reply] = {}  # sent, by number
        self._received = 0  # the number of messages that the server had received at the last connection
        self._unacknowledged_bytes = 0
        self._pause_s = 0.0  # before the next attempt to connect
        self._connected_s = 0.0
        self._receiving = threading.Lock()  # the thread that holds it receives messages
        self._broken: Exception | None = None  # why the receiving thread could not go on
        self._useful_s = time.monotonic()  # time of the last useful connection
        self._thread.start()

    def call(self, kind: int, fields: Sequence[int] = (), arrays: Sequence[NDArray[Any]] = ()) -> Reply:
        """Sends a call. Any thread may make any number of calls before the first reply. Never waits.

        The caller must not write to the arrays afterwards.

        Raises:
            WireError: the frame is beyond the limits, or the client is closed.
        """
        packed = PackedFrame(Frame(kind, tuple(fields), tuple(arrays)))
        reply = Reply(self.address, kind, self._receive_until)
        with self._session.lock:
            if self._closing:
                raise WireError(f"{self.address}: kind {kind}: the connection was closed on this side")
            if self._session.connection is not None:
                self._send(reply, packed)
                return reply
            self._unsent[reply] = packed
        self._wakeup.ask()
        return reply

    def buffer(self, dtype: DTypeLike, *shape: int) -> NDArray[Any]:
        """Returns an array to fill. ``call`` sends this array without a copy."""
        return self._buffer(self._session, dtype, *shape)

    def close(self) -> None:
        """Closes the client. Unanswered calls raise ``WireError``."""
        self._closing = True
        self._dialer.stop()
        super().close()

    def _turn(self) -> None:
        if self._session.connection is None:
            self._connect()
        else:
            self._wait(None)
            self._receive(self._session.connection)

    def _on_readable(self, session: SessionLink) -> None:
        """No-op: the next turn receives the messages."""

    def _end(self, why: str) -> None:
        with self._session.lock:
            self._session.send_status(Status.GOODBYE)
            replies = [*self._waiting.values(), *self._unsent]
        # A receiving caller notices the end soon, unless one of its callbacks closes the client.
        waited = self._receiving.acquire(timeout=2 * _LOOK_S)
        self._detach(self._session, LINGER_S)
        if waited:
            self._receiving.release()
        self._fail(replies, WireError, why)

    def _connect(self) -> None:
        """Tries to connect once. After a failure, waits for a moment, or until there is a call."""
        try:
            if self._resolve is not None and self._pause_s:
                self.address = self._resolve()
                self._dialer = self._dial(self.address)
            if self._closing:  # the client was closed during the dial, too late to stop the dial
                return
            hello = Hello(self._session.number, self._session.received)
            connection, welcome = self._dialer.dial(self._secret, hello, min(_HANDSHAKE_S, self._timeout_s))
        except (OSError, LookupError) as error:  # WireError is an OSError
            self._give_up(error)
        else:
            self._begin(connection, welcome)

    def _begin(self, connection: Connection, welcome: Welcome) -> None:
        """Continues the session over a new connection, or begins a new session."""
        lost: list[Reply] = []
        before, self.incarnation = self.incarnation, welcome.incarnation
        self.num_reconnects += before is not None
        with self._session.lock:
            self._connected_s = time.monotonic()
            if welcome.session != self._session.number:
                lost = list(self._waiting.values())
                self._waiting.clear()
                self._session.restart(welcome.session)
            elif welcome.received > self._received:
                self._pause_s = 0.0  # the last connection was useful
            self._received = welcome.received
            self._attach(self._session, connection, welcome.received)
            for reply, packed in self._unsent.items():
                self._send(reply, packed)
            self._unsent.clear()
        self.num_lost += len(lost)
        lives = f"incarnation {before}, now {welcome.incarnation}"
        if before == welcome.incarnation:
            lives = f"incarnation {before}, which does not know this connection any more"
        self._fail(lost, Lost, f"lost, because the called process restarted ({lives})")

    def _send(self, reply: Reply, packed: PackedFrame) -> None:
        self._unacknowledged_bytes = 0
        self._waiting[self._session.send(Status.REQUEST, 0, packed)] = reply

    def _receive(self, connection: Connection) -> None:
        """Receives on the client's thread, unless another thread does."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            self._take_all(connection)
            error, self._broken = self._broken, None
            if error is None:
                return
            if not isinstance(error, WireError):
                raise error
            self._detach(self._session)  # before another thread may receive
        finally:
            self._receiving.release()
        self.num_damaged += not isinstance(error, ConnectionLost)
        _LOG.debug("%s: %s", self.address, error)
        if not self._pause_s or time.monotonic() - self._connected_s > _LASTING_S:  # it was useful
            self._useful_s = time.monotonic()
        self._give_up(error)

    def _receive_until(self, reply: Reply, timeout_s: float | None) -> float | None:
        """Receives on the calling thread until a reply is done, unless another thread does. Returns the rest of the time.

        If the connection breaks, the client's thread goes on.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        session = self._session
        if not self._receiving.acquire(blocking=False):
            return timeout_s
        try:
            with session.lock:
                connection = session.connection
                session.lent = connection is not None
                self._watch(session, session.events & ~IN)
            if connection is not None:
                self._take_until(reply, connection, end_s)
        finally:
            with session.lock:
                session.lent = False
                self._watch(session, session.events | IN)
            self._receiving.release()
            if self._broken is not None:
                self._wakeup.ask()
        return None if end_s is None else max(0.0, end_s - time.monotonic())

    def _take_until(self, reply: Reply, connection: Connection, end_s: float | None) -> None:
        files = select.poll()
        files.register(connection, select.POLLIN)
        while not (reply.done() or self._closing or self._broken):
            left_s = _LOOK_S if end_s is None else min(_LOOK_S, end_s - time.monotonic())
            if left_s <= 0:
                return
            if files.poll(1e3 * left_s):
                self._take_all(connection)

    def _take_all(self, connection: Connection) -> None:
        """Handles all messages that have arrived. The caller holds the lock for receiving."""
        try:
            while self._broken is None and not self._closing and (parts := connection.receive()) is not None:
                header, frame = unpack(parts)
                del parts  # so that a waiting thread can free this memory before the next message arrives
                self._handle_message(header, frame)
                del frame
        except Exception as error:
            self._broken = error
        except BaseException:
            # A signal's handler raised it on the caller's thread, perhaps amid a message.
            self._broken = ConnectionLost("a receiving thread was interrupted")
            raise

    def _handle_message(self, header: Header, frame: Frame) -> None:
        self._pause_s = 0.0
        with self._session.lock:
            if not self._session.on_message(header):
                return
            reply = self._waiting.pop(header.request, None)
            self._unacknowledged_bytes += sum(array.nbytes for array in frame.arrays)
            if self._unacknowledged_bytes >= _MOST_UNACKNOWLEDGED_BYTES:
                self._unacknowledged_bytes = 0
                self._session.send_status(Status.ACKNOWLEDGE)
        if reply is None:  # the call was given up
            return
        if header.status == Status.REPLY:
            reply.finish(frame)
        elif header.status == Status.FAILED and frame.arrays:
            reply.finish(RemoteError(bytes(frame.arrays[0]).decode(errors="replace")))
        else:
            reply.finish(WireError(f"{self.address}: an answer of status {header.status}"))

    def _give_up(self, error: Exception) -> None:
        """Fails calls that waited too long for a connection. If no server listens any more, fails all calls now.

        Then waits before the next attempt to connect. After a useful connection, does not wait.
        """
        now = time.monotonic()
        refused = isinstance(error, (ConnectionRefusedError, FileNotFoundError)) and self._resolve is None
        gone = refused and self.incarnation is not None and now - self._useful_s > _GONE_S
        why = "the connection was lost, and no process listens at the address any more"
        if not gone:
            why = f"no lasting connection for {self._timeout_s} s: {error}"
        with self._session.lock:
            replies = (*self._waiting.values(), *self._unsent)
            hopeless = {r for r in replies if gone or now - max(self._useful_s, r.made_s) > self._timeout_s}
            self._waiting = {
                number: reply for number, reply in self._waiting.items() if reply not in hopeless
            }
            self._unsent = {reply: packed for reply, packed in self._unsent.items() if reply not in hopeless}
        self._fail(hopeless, WireTimeout, f"{why}; is that process alive, and does it have the same secret?")
        pause_s, self._pause_s = self._pause_s, min(max(2 * self._pause_s, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        if pause_s:
            self._wait(pause_s)

    def _fail(self, replies: Iterable[Reply], kind: type[Exception], why: str) -> None:
        for reply in replies:
            reply.finish(kind(f"{self.address}: kind {reply.kind}: {why}"))
