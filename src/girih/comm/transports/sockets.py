"""Connections over sockets: listeners, strangers and dialers."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress

from girih.comm.rpc import transport
from girih.comm.rpc.transport import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    WELCOME_BYTES,
    Connection,
    ConnectionLost,
    Hello,
    SilentPeer,
    Welcome,
)
from girih.comm.transports.addresses import TCP, LocalAddress
from girih.comm.transports.shared_memory import LANE_BYTES, LaneFile, SharedConnection
from girih.comm.transports.streams import SocketStream
from girih.comm.transports.tls import SecureSocket
from girih.errors import WireError
from girih.kernels.buffers import Buffers

_LOG = logging.getLogger(__name__)


class SocketListener:
    """Accepts connections at an address.

    Args:
        endpoint, listener, address: the endpoint, its listening socket, and the address for clients.
    """

    def __init__(self, endpoint: TCP | LocalAddress, listener: socket.socket, address: str) -> None:
        self.endpoint, self.address, self.buffers = endpoint, address, Buffers()
        self._listener = listener
        self._listener.setblocking(False)

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> SocketStranger | None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:
            return None
        connection.setblocking(False)
        with suppress(OSError):
            self.endpoint.prepare(connection)
        origin = str(peer[0]) if isinstance(peer, tuple) else "this host"
        return SocketStranger(connection, self, origin)

    def lanes(self) -> list[LaneFile]:
        """Returns shared memory for both directions of a connection on this host.

        The list is empty for TCP, or if the system has no memory.
        """
        if isinstance(self.endpoint, TCP):
            return []
        made: list[LaneFile] = []
        try:
            for _ in range(2):
                made.append(LaneFile.make(LANE_BYTES))
        except OSError as error:
            _LOG.warning("%s: no shared memory, all goes through the socket: %s", self.address, error)
            for lane in made:
                lane.close()
            return []
        return made

    def close(self) -> None:
        self._listener.close()
        self.endpoint.leave()


class SocketStranger:
    """A connected peer that must prove that it knows the secret. With TLS, it first proves that it has the key."""

    def __init__(self, connection: socket.socket, listener: SocketListener, origin: str) -> None:
        self.origin = origin
        self._socket: socket.socket | SecureSocket = connection
        self._listener = listener
        self._challenge = transport.challenge()
        self._said = b""
        self._is_asked = not listener.endpoint.encrypted
        if self._is_asked:
            self._ask()

    def _ask(self) -> None:
        with suppress(OSError):  # if the peer left, the next read raises an error
            self._socket.send(self._challenge)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_hello(self, secret: bytes) -> Hello | None:
        if not self._is_asked:
            if isinstance(self._socket, socket.socket):
                self._socket = SecureSocket(self._socket, secret, server=True)
            if not self._socket.shake():
                return None
            self._is_asked = True
            self._ask()
        with suppress(BlockingIOError):
            while len(self._said) < HELLO_BYTES:  # TLS may have more bytes than the system reports
                heard = self._socket.recv(HELLO_BYTES - len(self._said))
                if not heard:
                    raise SilentPeer("it left") if not self._said else WireError("incomplete proof")
                self._said += heard
        if len(self._said) < HELLO_BYTES:
            return None
        return transport.unpack_hello(secret, self._challenge, self._said)

    def welcome(self, secret: bytes, welcome: Welcome) -> Connection:
        said = transport.pack_welcome(secret, self._challenge, self._said, welcome)
        stream = SocketStream(self._socket, self._listener.buffers)
        lanes = self._listener.lanes()
        if not lanes or isinstance(self._socket, SecureSocket):
            self._socket.sendall(said)
            return stream
        inward, outward = lanes
        try:
            socket.send_fds(self._socket, [said], [inward.file, outward.file])
        except BaseException:
            for lane in lanes:
                lane.close()
            raise
        return SharedConnection(stream, outward, inward)

    def close(self) -> None:
        self._socket.close()


class SocketDialer:
    """Connects to an address."""

    def __init__(self, endpoint: TCP | LocalAddress) -> None:
        self._endpoint, self._buffers = endpoint, Buffers()
        self._socket: socket.socket | SecureSocket | None = None
        self._stopped = False

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        end_s = time.monotonic() + timeout_s
        plain, sockaddr = self._endpoint.dial()
        connection: socket.socket | SecureSocket = plain
        self._socket = connection
        files: list[int] = []
        try:
            if self._stopped:
                raise ConnectionLost("stopped")
            plain.settimeout(timeout_s)
            plain.connect(sockaddr)
            self._endpoint.prepare(plain)
            if self._endpoint.encrypted:
                self._socket = connection = SecureSocket(plain, secret, server=False)
                if self._stopped:  # ``stop`` closed the plain socket, which the TLS socket has replaced
                    raise ConnectionLost("stopped")
                connection.shake()
            challenged = _read(connection, CHALLENGE_BYTES, end_s, files)
            said = transport.pack_hello(secret, challenged, hello)
            connection.sendall(said)
            welcome = transport.unpack_welcome(
                secret, challenged, said, _read(connection, WELCOME_BYTES, end_s, files)
            )
            stream = SocketStream(connection, self._buffers)
            if len(files) != 2:
                return stream, welcome
            outward = LaneFile(files.pop(0))
            try:
                inward = LaneFile(files.pop(0))
            except BaseException:
                outward.close()
                raise
            return SharedConnection(stream, outward, inward), welcome
        except BaseException:
            connection.close()
            raise
        finally:
            self._socket = None
            for file in files:
                os.close(file)

    def stop(self) -> None:
        self._stopped = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _read(connection: socket.socket | SecureSocket, num_bytes: int, end_s: float, files: list[int]) -> bytes:
    """Reads a number of bytes before a deadline. Appends the files that arrive with the bytes to ``files``."""
    said = b""
    while len(said) < num_bytes:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        if isinstance(connection, SecureSocket):
            heard = connection.recv(num_bytes - len(said))
        else:
            heard, found, flags, _ = socket.recv_fds(connection, num_bytes - len(said), 2)
            files += found
            if flags & socket.MSG_CTRUNC:  # the other side will use shared memory whose files are lost
                raise ConnectionLost("this process is out of file descriptors")
        if not heard:
            raise WireError("the other side closed the connection instead of greeting")
        said += heard
    return said
