"""A session between a client and a server. Messages arrive once and in order, even if connections break.

A connection never loses, duplicates or reorders messages before it breaks. So messages can be lost only when a
connection breaks. Each side counts its messages, and keeps them until the other side confirms them. Each message has
the number of messages that its sender has received. After a reconnection, each side sends the messages again that the
other side has not received, and drops the messages that the other side has received.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from girih.comm.rpc.frames import Header, PackedFrame
from girih.errors import WireError


class RpcSession:
    """One side of a session. It does not depend on connections, clocks and threads.

    Attributes:
        number: the server's number for the session, or 0 before the number is known.
        received: the number of the last message that this side received.
        kept_bytes: the size of the messages that the other side has not confirmed yet.
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
        """Counts and keeps a message before it is sent. Returns the message's header."""
        self._last += 1
        header = Header(status, self._last, request, self.received)
        if not self._over:
            self.kept_bytes += packed.num_bytes
            self._kept.append((header, packed))
        return header

    def end(self) -> None:
        """Drops all kept messages, and keeps no messages from now on, because the other side left for good."""
        self._over, self.kept_bytes = True, 0
        self._kept.clear()

    def on_message(self, header: Header) -> bool:
        """Records a message from the other side. Returns False if the message was received before.

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
