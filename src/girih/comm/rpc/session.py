"""A session: messages between a client and a server that arrive once and in order, over connections that may break.

A stream never loses, doubles or reorders; only a broken connection does. So each side counts its messages, keeps them
until the other side says that it has them, and says in each message how many of the other side's it has. After a
connection broke each side sends again what the other has not got, and drops what it has got already.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from girih.comm.rpc.frames import Header, Packed, Part


@dataclass(frozen=True, slots=True)
class _Sent:
    status: int
    number: int
    request: int
    packed: Packed


class Session:
    """One side of it. To be called under a lock.

    Attributes:
        received: number of the other side's last message.
        num_kept: messages that the other side may not have.
    """

    def __init__(self) -> None:
        self.received = 0
        self._last = 0
        self._kept: deque[_Sent] = deque()

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def message(self, status: int, request: int, packed: Packed) -> tuple[int, list[Part]]:
        """Counts and keeps a message; returns its number and its parts, to be sent now."""
        self._last += 1
        sent = _Sent(status, self._last, request, packed)
        self._kept.append(sent)
        return self._last, self._parts(sent)

    def uncounted(self, status: int, packed: Packed) -> list[Part]:
        """A message that may get lost."""
        return packed.parts(Header(status, 0, 0, self.received))

    def hear(self, header: Header) -> bool:
        """Takes note of a message from the other side; False if it came before."""
        self._forget(header.acknowledged)
        if 0 < header.number <= self.received:
            return False
        self.received = max(self.received, header.number)
        return True

    def resume(self, received: int) -> list[list[Part]]:
        """The messages to be sent again to a side that has received so many."""
        self._forget(received)
        return [self._parts(sent) for sent in self._kept]

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0].number <= received:
            self._kept.popleft()

    def _parts(self, sent: _Sent) -> list[Part]:
        return sent.packed.parts(Header(sent.status, sent.number, sent.request, self.received))
