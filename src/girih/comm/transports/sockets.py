"""Connections over sockets: who listens, strangers, and who dials."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from girih.comm.rpc.frames import Limits
from girih.comm.rpc.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    WELCOME_BYTES,
    Hello,
    Welcome,
    challenge,
    pack_hello,
    pack_welcome,
    unpack_hello,
    unpack_welcome,
)
from girih.comm.rpc.transport import Connection, ConnectionLost
from girih.comm.transports.addresses import TCP, Local
from girih.comm.transports.streams import Stream
from girih.errors import WireError
from girih.kernels.buffers import Buffers


class SocketListener:
    """Takes connections at an address.

    Raises:
        WireError: it cannot be listened there.
    """

    def __init__(self, place: TCP | Local, limits: Limits) -> None:
        self._place, self._limits, self._buffers = place, limits, Buffers()
        self._listener, self.address = place.listen()
        self._listener.setblocking(False)

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> SocketStranger | None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        connection.setblocking(False)
        with suppress(OSError):
            self._place.prepare(connection)
        return SocketStranger(connection, self.welcome)

    def welcome(self, connection: socket.socket, said: bytes, limits: Limits) -> Connection:
        """Says the last word of the handshake; from here on it is a connection."""
        connection.sendall(said)
        return Stream(connection, limits, self._buffers)

    def close(self) -> None:
        self._listener.close()
        self._place.leave()


class SocketStranger:
    """Somebody who connected, and is asked for a proof at once."""

    def __init__(
        self, connection: socket.socket, welcome: Callable[[socket.socket, bytes, Limits], Connection]
    ) -> None:
        self._socket, self._welcome = connection, welcome
        self._challenge = challenge()
        self._said = b""
        with suppress(OSError):  # he left, as will be read
            connection.send(self._challenge)

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self, secret: bytes, greet: Callable[[Hello], Welcome]) -> tuple[Connection, Hello, int] | None:
        with suppress(BlockingIOError):
            heard = self._socket.recv(HELLO_BYTES - len(self._said))
            if not heard:
                raise ConnectionLost("a stranger who left")
            self._said += heard
        if len(self._said) < HELLO_BYTES:
            return None
        hello = unpack_hello(secret, self._challenge, self._said)
        welcome = greet(hello)
        said = pack_welcome(secret, self._challenge, self._said, welcome)
        return self._welcome(self._socket, said, welcome.limits), hello, welcome.session

    def close(self) -> None:
        self._socket.close()


class SocketDialer:
    """Connects to an address."""

    def __init__(self, place: TCP | Local) -> None:
        self._place, self._buffers = place, Buffers()
        self._socket: socket.socket | None = None
        self._stopped = False

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        end_s = time.monotonic() + timeout_s
        connection, place = self._place.dial()
        self._socket = connection
        try:
            if self._stopped:
                raise ConnectionLost("stopped")
            connection.settimeout(timeout_s)
            connection.connect(place)
            self._place.prepare(connection)
            challenged = read(connection, CHALLENGE_BYTES, end_s)
            said = pack_hello(secret, challenged, hello)
            connection.sendall(said)

            def check(answer: bytes) -> Welcome:
                return unpack_welcome(secret, challenged, said, answer)

            return self.finish(connection, check, end_s)
        except BaseException:
            connection.close()
            raise
        finally:
            self._socket = None

    def finish(
        self, connection: socket.socket, check: Callable[[bytes], Welcome], end_s: float
    ) -> tuple[Connection, Welcome]:
        """Hears the last word of the handshake."""
        welcome = check(read(connection, WELCOME_BYTES, end_s))
        return Stream(connection, welcome.limits, self._buffers), welcome

    def stop(self) -> None:
        self._stopped = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def read(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """So many bytes, waited for until a moment."""
    said = b""
    while len(said) < num_bytes:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        heard = connection.recv(num_bytes - len(said))
        if not heard:
            raise WireError("the other side closed the connection instead of greeting")
        said += heard
    return said
