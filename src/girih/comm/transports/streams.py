"""Messages on a stream of bytes, without blocking. Parts are sent from and received into separate memory.

sign       4 bytes
parts      number of parts, uint32
sizes      of each part in bytes, uint64, little-endian
the parts
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import MOST_ARRAYS, MOST_BYTES, OWN_PART_BYTES, Part
from girih.comm.rpc.transport import ConnectionLost
from girih.comm.transports.tls import SecureSocket
from girih.errors import WireError
from girih.kernels.buffers import Buffers

_SIGN: Final = b"GRM1"
_HEAD: Final = struct.Struct("<4sI")
_SCRATCH_BYTES: Final = 1 << 16
_MOST_PARTS: Final = MOST_ARRAYS + 2  # the first part, and the locations of parts in shared memory
_MOST_MESSAGE_BYTES: Final = MOST_BYTES + (1 << 16)  # a first part has more than its small arrays
_MOST_VIEWS: Final = 512  # the limit of one system call


class SocketStream:
    """A connection over a socket. The sizes of messages are checked against limits before memory is allocated.

    Args:
        connection: a socket, which the stream owns from now on.
        buffers: the pool of memory for received arrays.
    """

    def __init__(self, connection: socket.socket | SecureSocket, buffers: Buffers) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._unsent: deque[list[memoryview]] = deque()  # messages; a part of the first may be sent already
        self._buffers = buffers
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0  # the bytes in the scratch
        self._is_drained = False  # True if the last read took all bytes that had arrived
        self._parts: list[Part] = []  # parts of the message that is being received
        self._messages = self._read_messages()

    def fileno(self) -> int:
        return self.socket.fileno()

    def buffer(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[Any] | None:
        return None

    def close(self, linger_s: float = 0.0) -> None:
        end_s = time.monotonic() + linger_s
        with suppress(OSError):  # ConnectionLost is one
            while self._unsent and time.monotonic() < end_s:
                self.socket.settimeout(max(0.001, end_s - time.monotonic()))
                self.flush()
            if linger_s:
                self.socket.shutdown(socket.SHUT_WR)
        self.socket.close()

    def send(self, parts: Sequence[Part]) -> bool:
        self._unsent.append(laid_out(parts))
        return self.flush() if len(self._unsent) == 1 else False

    def flush(self) -> bool:
        while self._unsent:
            views = self._unsent[0]
            try:
                num_bytes = self.socket.sendmsg(views[:_MOST_VIEWS])
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionLost(f"cannot send: {error}") from error
            done = 0
            while done < len(views) and num_bytes >= len(views[done]):
                num_bytes -= len(views[done])
                done += 1
            del views[:done]
            if views:
                views[0] = views[0][num_bytes:]
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> list[Part] | None:
        if not next(self._messages):
            return None
        parts, self._parts = self._parts, []
        return parts

    def _read_messages(self) -> Iterator[bool]:
        """Yields True when ``_parts`` is a whole message, and False when no more bytes have arrived."""
        while True:
            yield from self._gather(_HEAD.size)
            sign, num_parts = _HEAD.unpack_from(self._scratch, self._start)
            if sign != _SIGN or num_parts > _MOST_PARTS:
                raise WireError(
                    f"{sign!r} and {num_parts} parts; expected {_SIGN!r} and at most {_MOST_PARTS} parts"
                )
            yield from self._gather(_HEAD.size + 8 * num_parts)
            sizes = struct.unpack_from(f"<{num_parts}Q", self._scratch, self._start + _HEAD.size)
            self._start += _HEAD.size + 8 * num_parts
            if sum(sizes) > _MOST_MESSAGE_BYTES:
                raise WireError(f"a message of {sum(sizes):,} bytes; at most {_MOST_MESSAGE_BYTES:,}")
            for size in sizes:
                if size < OWN_PART_BYTES:
                    yield from self._gather(size)
                    self._parts.append(np.frombuffer(bytes(self._take(size)), np.uint8))
                else:
                    self._parts.append(self._buffers.take(np.uint8, size))
                    yield from self._fill(self._parts[-1].data)
            yield True

    def _take(self, most: int) -> memoryview:
        """Returns received bytes from the scratch, at most a number. They are valid until the next read."""
        taken = self._scratch[self._start : min(self._start + most, self._end)]
        self._start += len(taken)
        return taken

    def _gather(self, num_bytes: int) -> Iterator[bool]:
        """Waits until the scratch has a number of bytes. Yields False each time that no bytes have arrived."""
        while self._end - self._start < num_bytes:
            if self._is_drained:
                self._is_drained = False
                yield False
                continue
            rest = bytes(self._scratch[self._start : self._end])
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest) + self._read(self._scratch[len(rest) :])

    def _fill(self, wanted: memoryview) -> Iterator[bool]:
        """Fills memory with received bytes. Yields False each time that no bytes have arrived."""
        taken = self._take(len(wanted))
        wanted[: len(taken)] = taken
        wanted = wanted[len(taken) :]
        while wanted:
            if self._is_drained:
                self._is_drained = False
                yield False
            else:
                wanted = wanted[self._read(wanted) :]

    def _read(self, into: memoryview) -> int:
        """Reads received bytes into a buffer. Returns their number."""
        try:
            num_bytes = self.socket.recv_into(into)
        except BlockingIOError:
            self._is_drained = True
            return 0
        except OSError as error:
            raise ConnectionLost(f"cannot receive: {error}") from error
        if not num_bytes:
            raise ConnectionLost("the other side closed the connection")
        # TLS may have more bytes than it returned.
        self._is_drained = num_bytes < len(into) and isinstance(self.socket, socket.socket)
        return num_bytes


def laid_out(parts: Sequence[Part]) -> list[memoryview]:
    """Returns the bytes of a message in the order in which they are sent."""
    head = struct.pack(f"<4sI{len(parts)}Q", _SIGN, len(parts), *map(len, parts))
    return [memoryview(head), *(part.data for part in parts)]
