"""What a server remembers of one client, so that each request runs once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from girih.comm.rpc.frames import Limits, Packed
from girih.errors import WireError

NEW, UNDER_WAY, ANSWERED, FORGOTTEN = range(4)
_MOST_AHEAD: Final = 1 << 20


class Memory:
    """Requests under way, and replies that the client may not have yet.

    Numbers come nearly in order. Each up to the highest so far is missing, under way, or answered; so what was
    answered and may be forgotten needs no list.

    Args:
        client: its number.
        floor: its lowest request that counts.
    """

    def __init__(self, client: int, floor: int, limits: Limits) -> None:
        self.client = client
        self.heard_s = time.monotonic()
        self.under_way: set[int] = set()
        self.replies: OrderedDict[int, tuple[int, Packed]] = OrderedDict()  # number → status, frame
        self._floor = floor
        self._highest = floor - 1
        self._missing: set[int] = set()
        self._num_bytes = 0
        self._limits = limits

    def look(self, number: int) -> int:
        """Where a request stands: new (and from now on under way), under way, answered, or that and forgotten.

        Raises:
            WireError: the number is far beyond all before.
        """
        if number in self.under_way:
            return UNDER_WAY
        if number in self.replies:
            return ANSWERED
        if number > self._highest:
            if number - self._highest > _MOST_AHEAD:
                raise WireError(f"request {number} right after {self._highest}")
            self._missing.update(range(self._highest + 1, number))
            self._highest = number
        elif number in self._missing:
            self._missing.remove(number)
        else:
            return FORGOTTEN
        self.under_way.add(number)
        return NEW

    def acknowledge(self, floor: int, seen: Iterable[int] = ()) -> None:
        """The client waits for none below ``floor``, nor for those ``seen``."""
        self.heard_s = time.monotonic()
        for number in seen:
            self._drop(number)
        if floor > self._floor:
            self._floor = floor
            for number in [number for number in self.replies if number < floor]:
                self._drop(number)
            self._missing = {number for number in self._missing if number >= floor}

    def answered(self, number: int, status: int, packed: Packed) -> bool:
        """Keeps a reply; False if nobody waits for it any more."""
        self.under_way.discard(number)
        if number < self._floor:
            return False
        self.replies[number] = status, packed
        self._num_bytes += packed.num_bytes
        while len(self.replies) > 1 and (
            len(self.replies) > self._limits.most_replies or self._num_bytes > self._limits.most_reply_bytes
        ):
            self._drop(next(iter(self.replies)))
        return True

    def _drop(self, number: int) -> None:
        if number in self.replies:
            self._num_bytes -= self.replies.pop(number)[1].num_bytes
