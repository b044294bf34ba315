"""A session: messages between a client and a server that arrive once and in order, over connections that may break.

A stream never loses, doubles or reorders; only a broken connection does. So each side counts its messages, keeps them
until the other side says that it has them, and says in each message how many of the other side's it has. After a
connection broke each side sends again what the other has not got, and drops what it has got already.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from girih.comm.rpc.frames import Frame, Header, PackedFrame
from girih.comm.rpc.transport import Connection, ConnectionLost
from girih.errors import WireError

_NO_FRAME: Final = PackedFrame(Frame(0))


class RpcSession:
    """One side of it, and the connection that it has. Methods are called under its lock.

    Args:
        stuck: called with it when a message did not go at once.

    Attributes:
        number: what the server calls it; 0 before it does.
        connection: None while it is broken, since ``lost_s``.
        received: number of the other side's last message.
        kept_bytes: of messages that the other side may not have yet.
    """

    def __init__(self, number: int, stuck: Callable[[RpcSession], None]) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.lost_s = time.monotonic()
        self._stuck = stuck
        self.restart(number)

    def restart(self, number: int) -> None:
        """Begins another one; what was kept is dropped."""
        self.number = number
        self.received = self._last = self.kept_bytes = 0
        self._over = False
        self._kept: deque[tuple[Header, PackedFrame]] = deque()

    def send(self, status: int, request: int, packed: PackedFrame) -> int:
        """Counts and keeps a message, and sends it where there is a connection; returns its number."""
        self._last += 1
        if self._over:
            return self._last
        self.kept_bytes += packed.num_bytes
        header = Header(status, self._last, request, 0)
        self._kept.append((header, packed))
        self._put(header, packed)
        return self._last

    def end(self) -> None:
        """Drops what is kept: nobody will fetch it, nor what is sent from here on."""
        self._over, self.kept_bytes = True, 0
        self._kept.clear()

    def send_status(self, status: int) -> None:
        """Sends a message without content, which may get lost."""
        self._put(Header(status, 0, 0, 0), _NO_FRAME)

    def on_message(self, header: Header) -> bool:
        """Takes note of a message from the other side; False if it came before.

        Raises:
            WireError: one before it did not come. It will, once the connection is made again.
        """
        if header.number > self.received + 1:
            raise WireError(f"message {header.number} came after {self.received}")
        self._forget(header.acknowledged)
        if 0 < header.number <= self.received:
            return False
        self.received = max(self.received, header.number)
        return True

    def resume(self, connection: Connection, received: int) -> None:
        """Goes on over a connection to a side that has received so many."""
        self.connection = connection
        self._forget(received)
        for header, packed in self._kept:
            self._put(header, packed)

    def flush(self) -> bool:
        """Sends on; whether nothing is left."""
        with suppress(ConnectionLost):
            return self.connection is None or self.connection.flush()
        return True

    def _put(self, header: Header, packed: PackedFrame) -> None:
        if self.connection is None:
            return
        parts = packed.parts(header._replace(acknowledged=self.received))
        with suppress(ConnectionLost):  # the thread that receives sees it too
            if not self.connection.send(parts):
                self._stuck(self)

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0].number <= received:
            self.kept_bytes -= self._kept.popleft()[1].num_bytes
