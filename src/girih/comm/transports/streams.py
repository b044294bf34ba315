"""Messages on a stream of bytes, read and written without waiting: the parts of one are sent and received in place.

sign       4 bytes
parts      how many, uint32
sizes      of each in bytes, uint64, little-endian
the parts
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import Limits, Part
from girih.errors import WireError
from girih.kernels.buffers import Buffers

_SIGN: Final = b"GRM1"
_HEAD: Final = struct.Struct("<4sI")
_SCRATCH_BYTES: Final = 1 << 16
_SLACK_BYTES: Final = 1 << 16  # of a first part, beside its small arrays
_SLACK_PARTS: Final = 2  # the first part; the places of those in shared memory
_STRANGER_BYTES: Final = 1 << 16
_MOST_VIEWS: Final = 512  # of one call of the system
_NOTHING: Final = memoryview(b"")


class LostError(WireError):
    """The connection is of no use any more."""


class GarbageError(LostError):
    """What came over it is no message."""


class Stream:
    """One connection. What arrives is checked against the limits before memory is taken for it.

    Args:
        connection: a socket, from here on the stream's.
        buffers: where arrays that arrive get their memory.

    Attributes:
        peer: whose it is; empty until that is known.
        readable: whether there may be bytes to read: set by who polls.
        unsent: messages, of which the first may have gone in part.
    """

    def __init__(self, connection: socket.socket, limits: Limits, buffers: Buffers, *, trusted: bool) -> None:
        self.socket = connection
        self.peer = b""
        self.readable = False
        self.unsent: deque[list[memoryview]] = deque()
        self._begun = False  # the first of these
        self._most_parts = limits.most_arrays + _SLACK_PARTS
        self._most_bytes = limits.most_bytes + _SLACK_BYTES if trusted else _STRANGER_BYTES
        self._buffers = buffers
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = self._end = 0  # of what the scratch has
        self._skip = 0  # bytes of a message that is refused
        self._head = memoryview(bytearray(_HEAD.size))
        self._wanted = self._head  # what is to be filled next
        self._sizes: NDArray[np.uint64] | None = None
        self._num_filled = 0
        self._parts: list[Part] | None = None

    def trust(self, limits: Limits) -> None:
        """From here on, messages may be as large as the limits say, and not only as a stranger's."""
        self._most_bytes = limits.most_bytes + _SLACK_BYTES

    def fileno(self) -> int:
        return self.socket.fileno()

    def holds_more(self) -> bool:
        """Whether there are bytes of which polling does not tell."""
        return self._end > self._start or self.readable

    def close(self) -> None:
        self.socket.close()

    def send(self, parts: Sequence[Part]) -> None:
        """Sends what goes at once, and keeps the rest for ``flush``.

        Raises:
            LostError: the connection broke.
        """
        self.unsent.append(laid_out(parts))
        if len(self.unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Sends on.

        Raises:
            LostError: the connection broke.
        """
        while self.unsent:
            views = self.unsent[0]
            try:
                num_bytes = self.socket.sendmsg(views[:_MOST_VIEWS])
            except BlockingIOError:
                return
            except OSError as error:
                raise LostError(f"cannot send: {error}") from error
            self._begun = True
            done = 0
            while done < len(views) and num_bytes >= len(views[done]):
                num_bytes -= len(views[done])
                done += 1
            del views[:done]
            if views:
                views[0] = views[0][num_bytes:]
            else:
                self.unsent.popleft()
                self._begun = False

    def unbegun(self) -> deque[list[memoryview]]:
        """Messages of which nothing was sent yet, for another stream to the same peer."""
        if self._begun:
            self.unsent.popleft()
        return self.unsent

    def receive(self) -> list[Part] | None:
        """The next message; None when it is not there yet.

        Raises:
            LostError: the connection ended, or what comes is no message.
            WireError: a message beyond the limits, which is passed over.
        """
        while self._fill():
            if self._parts is not None:
                self._num_filled += 1
            elif self._sizes is None:
                self._read_head()
                continue
            else:
                self._check_sizes()
            if self._num_filled < len(self._sizes):  # type: ignore[arg-type]
                part = self._buffers.take(np.uint8, int(self._sizes[self._num_filled]))  # type: ignore[index]
                self._parts.append(part)  # type: ignore[union-attr]
                self._wanted = part.data
            else:
                parts, self._parts, self._sizes = self._parts, None, None
                self._wanted, self._num_filled = self._head, 0
                return parts
        return None

    def _read_head(self) -> None:
        sign, num_parts = _HEAD.unpack(self._head)
        if sign != _SIGN or num_parts > self._most_parts:
            raise GarbageError(
                f"{sign!r} and {num_parts} parts; expected {_SIGN!r} and at most {self._most_parts} parts"
            )
        self._sizes = np.empty(num_parts, "<u8")
        self._wanted = self._sizes.data.cast("B") if num_parts else _NOTHING

    def _check_sizes(self) -> None:
        num_bytes = sum(self._sizes.tolist())  # type: ignore[union-attr]
        if num_bytes > self._most_bytes:
            self._skip, self._sizes, self._wanted = num_bytes, None, self._head
            raise WireError(f"a message of {num_bytes:,} bytes; at most {self._most_bytes:,}")
        self._parts = []

    def _fill(self) -> bool:
        """Whether all that is wanted is there."""
        while self._skip or self._wanted:
            have = self._end - self._start
            if self._skip:
                passed = min(have, self._skip)
                self._skip -= passed
                self._start += passed
                if self._skip and not self._more():
                    return False
            elif have:
                num_bytes = min(have, len(self._wanted))
                self._wanted[:num_bytes] = self._scratch[self._start : self._start + num_bytes]
                self._wanted = self._wanted[num_bytes:]
                self._start += num_bytes
            elif len(self._wanted) < _SCRATCH_BYTES:
                if not self._more():
                    return False
            else:
                num_bytes = self._read(self._wanted)
                if not num_bytes:
                    return False
                self._wanted = self._wanted[num_bytes:]
        return True

    def _more(self) -> bool:
        self._start, self._end = 0, self._read(self._scratch)
        return self._end > 0

    def _read(self, into: memoryview) -> int:
        """How many bytes were there."""
        if not self.readable:
            return 0
        try:
            num_bytes = self.socket.recv_into(into)
        except BlockingIOError:
            self.readable = False
            return 0
        except OSError as error:
            self.readable = False
            raise LostError(f"cannot receive: {error}") from error
        if not num_bytes:
            self.readable = False
            raise LostError("the other side closed the connection")
        self.readable = num_bytes == len(into)  # less: that was all
        return num_bytes


def laid_out(parts: Sequence[Part]) -> list[memoryview]:
    """A message as it is sent."""
    head = struct.pack(f"<4sI{len(parts)}Q", _SIGN, len(parts), *map(len, parts))
    return [memoryview(head), *(part.data for part in parts)]
