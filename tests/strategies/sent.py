"""Bytes that this process has sent through TCP, as the kernel counts them: payload alone, each byte once."""

import socket
import struct

import girih.comm.rpc  # noqa: F401  it has to come before the transports that it imports
from girih.comm.group.process_group import _sockets
from girih.comm.transports.streams import SocketStream

BYTES_SENT = 200
"""Where ``struct tcp_info`` of Linux has ``tcpi_bytes_sent``, which ``tcpi_bytes_retrans`` follows."""


class Sent:
    """Bytes sent since it was made, by connections that were closed meanwhile too."""

    def __init__(self):
        self._closed, self._before = 0, sum(map(_sent, _sockets()))
        self._close = close = SocketStream.close

        def counted(stream, linger_s=0.0):
            if stream.socket.family in (socket.AF_INET, socket.AF_INET6) and stream.fileno() >= 0:
                self._closed += _sent(stream.socket)
            close(stream, linger_s)

        SocketStream.close = counted

    def end(self):
        """Counts no more; returns the number of bytes."""
        SocketStream.close = self._close
        return self._closed + sum(map(_sent, _sockets())) - self._before


def missing():
    """Why bytes cannot be counted here, or None."""
    with socket.socket() as connection:
        try:
            known = len(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
        except (AttributeError, OSError) as error:
            return f"no TCP_INFO here: {error}"
    return None if known >= BYTES_SENT + 16 else "this kernel's TCP_INFO has no tcpi_bytes_sent (Linux 4.19)"


def _sent(connection):
    sent, again = struct.unpack_from(
        "<QQ", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), BYTES_SENT
    )
    return sent - again
