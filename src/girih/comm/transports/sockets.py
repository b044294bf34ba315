"""Connections over sockets: who listens, strangers, and who dials."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress

from girih.comm.rpc import handshake
from girih.comm.rpc.handshake import CHALLENGE_BYTES, HELLO_BYTES, WELCOME_BYTES, Hello, Welcome
from girih.comm.rpc.transport import Connection, ConnectionLost
from girih.comm.transports.addresses import TCP, Local
from girih.comm.transports.lanes import LANE_BYTES, LaneFile
from girih.comm.transports.shared import SharedConnection
from girih.comm.transports.streams import Stream
from girih.errors import WireError
from girih.kernels.buffers import Buffers

_LOG = logging.getLogger(__name__)


class SocketListener:
    """Takes connections at an address.

    Args:
        endpoint, listener, address: where, the socket that listens there, and what others connect to.
    """

    def __init__(self, endpoint: TCP | Local, listener: socket.socket, address: str) -> None:
        self.endpoint, self.address, self.buffers = endpoint, address, Buffers()
        self._listener = listener
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
            self.endpoint.prepare(connection)
        return SocketStranger(connection, self)

    def lanes(self) -> list[LaneFile]:
        """Memory for both directions of a connection on this host, where there is any."""
        if isinstance(self.endpoint, TCP):
            return []
        made: list[LaneFile] = []
        try:
            for _ in range(2):
                made.append(LaneFile.make(LANE_BYTES))
        except OSError as error:
            _LOG.warning("%s: all goes through the socket: %s", self.address, error)
            for lane in made:
                lane.close()
            return []
        return made

    def close(self) -> None:
        self._listener.close()
        self.endpoint.leave()


class SocketStranger:
    """Somebody who connected, and is asked for a proof at once."""

    def __init__(self, connection: socket.socket, listener: SocketListener) -> None:
        self._socket, self._listener = connection, listener
        self._challenge = handshake.challenge()
        self._said = b""
        with suppress(OSError):  # he left, as will be read
            connection.send(self._challenge)

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self, secret: bytes) -> Hello | None:
        with suppress(BlockingIOError):
            heard = self._socket.recv(HELLO_BYTES - len(self._said))
            if not heard:
                raise ConnectionLost("a stranger who left")
            self._said += heard
        if len(self._said) < HELLO_BYTES:
            return None
        return handshake.unpack_hello(secret, self._challenge, self._said)

    def welcome(self, secret: bytes, welcome: Welcome) -> Connection:
        said = handshake.pack_welcome(secret, self._challenge, self._said, welcome)
        stream = Stream(self._socket, self._listener.buffers)
        lanes = self._listener.lanes()
        if not lanes:
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

    def __init__(self, endpoint: TCP | Local) -> None:
        self._endpoint, self._buffers = endpoint, Buffers()
        self._socket: socket.socket | None = None
        self._stopped = False

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        end_s = time.monotonic() + timeout_s
        connection, sockaddr = self._endpoint.dial()
        self._socket = connection
        files: list[int] = []
        try:
            if self._stopped:
                raise ConnectionLost("stopped")
            connection.settimeout(timeout_s)
            connection.connect(sockaddr)
            self._endpoint.prepare(connection)
            challenged = _read(connection, CHALLENGE_BYTES, end_s, files)
            said = handshake.pack_hello(secret, challenged, hello)
            connection.sendall(said)
            welcome = handshake.unpack_welcome(
                secret, challenged, said, _read(connection, WELCOME_BYTES, end_s, files)
            )
            stream = Stream(connection, self._buffers)
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


def _read(connection: socket.socket, num_bytes: int, end_s: float, files: list[int]) -> bytes:
    """Reads a number of bytes, until a moment at the latest; the files that come with them are put to the others."""
    said = b""
    while len(said) < num_bytes:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        heard, found, flags, _ = socket.recv_fds(connection, num_bytes - len(said), 2)
        files += found
        if flags & socket.MSG_CTRUNC:  # the other side will send by memory that did not arrive
            raise ConnectionLost("this process is out of file descriptors")
        if not heard:
            raise WireError("the other side closed the connection instead of greeting")
        said += heard
    return said
