"""Which parts of a file are in use: segments are filled, lose their records one by one, and are used again."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from girih.errors import StorageFullError
from girih.store.spec import Longs
from girih.store.tiers.direct_file import DirectFile

_GROWTH = 8  # the file grows by an eighth, so that it is claimed in few and large parts
_MOST_GROWTH_BYTES = 256 << 20
_LEAST_SPARE = 4


class FileSegments:
    """The segments of a file, and how many records of each somebody refers to.

    A segment that nobody refers to any more may still be read, by who asked before; so each read takes a *ticket*,
    and a segment is used again when all tickets are back that were out when it was given up.

    Args:
        segment_bytes: of each.

    Attributes:
        num_live: int64[·] by segment; the first :attr:`num_segments` count.
        memory: int64[·] by segment: the address of its memory where it is not on the disk yet, else 0.
    """

    def __init__(self, file: DirectFile, segment_bytes: int) -> None:
        self._file, self._segment_bytes = file, segment_bytes
        self.num_segments = 0
        self.num_live: Longs = np.zeros(16, np.int64)
        self.memory: Longs = np.zeros(16, np.int64)
        self._free: list[int] = []  # heaps: the file is used from its front
        self._holes: list[int] = []
        self._given_up: deque[tuple[int, int]] = deque()
        self._tickets: dict[int, Callable[[], object] | None] = {}
        self._num_tickets = 0
        self._has_holes = True

    @property
    def num_used(self) -> int:
        """Segments with records, live or not."""
        return self.num_segments - len(self._free) - len(self._holes) - len(self._given_up)

    @property
    def num_bytes(self) -> int:
        """The space that the file takes."""
        return (self.num_segments - len(self._holes)) * self._segment_bytes

    def reserve(self, count: int, *, wait: bool = False) -> None:
        """Makes sure that ``count`` segments can be taken.

        Args:
            wait: for those that were given up and are still read.

        Raises:
            StorageFullError: the disk is full.
        """
        self._settle(wait=wait)
        while len(self._free) < count and self._holes:
            start = self._holes[0] * self._segment_bytes
            self._file.claim(start, start + self._segment_bytes)
            heapq.heappush(self._free, heapq.heappop(self._holes))
        if len(self._free) < count:
            self._grow(count - len(self._free))

    def take(self) -> int:
        """A segment that was reserved."""
        return heapq.heappop(self._free)

    def give_up(self, segment: int) -> None:
        """Takes back a segment without live records."""
        self._given_up.append((self._num_tickets, segment))

    def ticket(self, wait: Callable[[], object] | None = None) -> int:
        """A number to give back; what is given up from now on stays as it is until then.

        Args:
            wait: returns when the ticket is back, where that happens by itself.
        """
        self._num_tickets += 1
        self._tickets[self._num_tickets - 1] = wait
        return self._num_tickets - 1

    def give_back(self, ticket: int) -> None:
        """Called by any thread."""
        self._tickets.pop(ticket, None)

    def _settle(self, *, wait: bool) -> None:
        """Frees what was given up and is read by nobody; gives back to the file system what is far too much."""
        while self._given_up and self.memory[self._given_up[0][1]] == 0:
            number, segment = self._given_up[0]
            if not self._are_back(number, wait):
                break
            self._given_up.popleft()
            heapq.heappush(self._free, segment)
        spare = max(_LEAST_SPARE, self.num_used // _GROWTH)
        if len(self._free) > 2 * spare and self._has_holes:
            self._free.sort()
            while len(self._free) > spare and self._has_holes:
                start = self._free[-1] * self._segment_bytes
                self._has_holes = self._file.let_go(start, start + self._segment_bytes)
                if self._has_holes:
                    heapq.heappush(self._holes, self._free.pop())

    def _are_back(self, number: int, wait: bool) -> bool:
        """Whether no ticket below ``number`` is out."""
        for ticket in list(self._tickets):
            if ticket >= number:
                break
            until = self._tickets.get(ticket)
            if ticket not in self._tickets:  # another thread gave it back just now
                continue
            if not wait or until is None:
                return False
            until()
            self.give_back(ticket)
        return True

    def _grow(self, count: int) -> None:
        most = max(count, min(self.num_segments // _GROWTH, _MOST_GROWTH_BYTES // self._segment_bytes))
        try:
            self._file.grow(most * self._segment_bytes)
        except StorageFullError:
            if most == count:
                raise
            most = count
            self._file.grow(most * self._segment_bytes)
        first, self.num_segments = self.num_segments, self.num_segments + most
        while len(self.num_live) < self.num_segments:
            self.num_live = np.append(self.num_live, np.zeros_like(self.num_live))
            self.memory = np.append(self.memory, np.zeros_like(self.memory))
        for segment in range(first, self.num_segments):
            heapq.heappush(self._free, segment)
