"""A session: messages between a client and a server that arrive once and in order, over connections that may break.

A stream never loses, doubles or reorders; only a broken connection does. So each side counts its messages, keeps them
until the other side says that it has them, and says in each message how many of the other side's it has. After a
connection broke each side sends again what the other has not got, and drops what it has got already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from girih.comm.rpc.frames import Header, PackedFrame
from girih.errors import WireError


class RpcSession:
    """One side of a session. It knows no connection, no clock and no thread.

    Attributes:
        number: what the server calls it; 0 before it does.
        received: number of the other side's last message.
        kept_bytes: of messages that the other side may not have yet.
    """

    def __init__(self, number: int) -> None:
        self.restart(number)

    def restart(self, number: int) -> None:
        """Begins another one; what was kept is dropped."""
        self.number = number
        self.received = self._last = self.kept_bytes = 0
        self._over = False
        self._kept: deque[tuple[Header, PackedFrame]] = deque()

    def keep(self, status: int, request: int, packed: PackedFrame) -> Header:
        """Counts and keeps a message that is to be sent; returns its header."""
        self._last += 1
        header = Header(status, self._last, request, self.received)
        if not self._over:
            self.kept_bytes += packed.num_bytes
            self._kept.append((header, packed))
        return header

    def end(self) -> None:
        """Drops what is kept: nobody will fetch it, nor what is sent from here on."""
        self._over, self.kept_bytes = True, 0
        self._kept.clear()

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

    def resume(self, received: int) -> Iterable[tuple[Header, PackedFrame]]:
        """The messages to send again to a side that has received so many."""
        self._forget(received)
        return [(header._replace(acknowledged=self.received), packed) for header, packed in self._kept]

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0].number <= received:
            self.kept_bytes -= self._kept.popleft()[1].num_bytes
