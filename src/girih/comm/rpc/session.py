"""A session: messages between a client and a server that arrive once and in order, over connections that may break.

A stream never loses, duplicates or reorders messages. Only a broken connection does. So each side counts its messages,
and keeps them until the other side confirms them. Each message says how many of the other side's messages arrived.
After a broken connection each side resends what the other side lacks, and drops what the other side has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from girih.comm.rpc.frames import Header, PackedFrame
from girih.errors import WireError


class RpcSession:
    """One side of a session. It knows no connection, no clock and no thread.

    Attributes:
        number: the server's number for the session, or 0 before it is known.
        received: number of the other side's last message.
        kept_bytes: size of the messages that the other side may not have yet.
    """

    def __init__(self, number: int) -> None:
        self.restart(number)

    def restart(self, number: int) -> None:
        """Begins another session, and drops the kept messages."""
        self.number = number
        self.received = self._last = self.kept_bytes = 0
        self._over = False
        self._kept: deque[tuple[Header, PackedFrame]] = deque()

    def keep(self, status: int, request: int, packed: PackedFrame) -> Header:
        """Counts and keeps a message before it is sent; returns its header."""
        self._last += 1
        header = Header(status, self._last, request, self.received)
        if not self._over:
            self.kept_bytes += packed.num_bytes
            self._kept.append((header, packed))
        return header

    def end(self) -> None:
        """Drops all kept messages, and keeps none from now on, because nobody will fetch them."""
        self._over, self.kept_bytes = True, 0
        self._kept.clear()

    def on_message(self, header: Header) -> bool:
        """Records a message from the other side, or False if it came before.

        Raises:
            WireError: an earlier message is missing. It arrives after the next reconnection.
        """
        if header.number > self.received + 1:
            raise WireError(f"message {header.number} came after {self.received}")
        self._forget(header.acknowledged)
        if 0 < header.number <= self.received:
            return False
        self.received = max(self.received, header.number)
        return True

    def resume(self, received: int) -> Iterable[tuple[Header, PackedFrame]]:
        """Returns the messages to resend to a side that has received ``received`` messages."""
        self._forget(received)
        return [(header._replace(acknowledged=self.received), packed) for header, packed in self._kept]

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0][0].number <= received:
            self.kept_bytes -= self._kept.popleft()[1].num_bytes
