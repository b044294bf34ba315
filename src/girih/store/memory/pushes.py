"""The pushes that a shard has applied, recorded in its arena. A push that is sent again updates each row only once.

Each push has a lane and a number. Numbers in a lane increase. A push whose number is not above the last number of its
lane was applied already. The senders define lanes and numbers. Pushes that may overtake each other need separate lanes.

For each lane the shard knows the last push that was applied completely. It also knows a push that was cut short, and
the number of its keys that were served. If the push is sent again with the same keys in the same order, it continues
after these keys.

The progress of a push is recorded after each row. This costs one more word next to the record of the row that is being
updated. After a crash, the row that was being updated counts as served, and only this row may be incomplete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from girih.errors import ConfigError
from girih.kernels.cpu import layout
from girih.kernels.cpu.rows import noted
from girih.store.spec import Longs

LANES = 88
_LAST, _CUT, _NUM_KEYS, _DONE = range(4)
LANE_WORDS = 4
_MOST = (1 << 62) - 1


class Push(NamedTuple):
    """The identity of a push: its lane, from 0, and its number in the lane, from 1."""

    lane: int
    number: int


class CutPush(NamedTuple):
    """A push that was cut short: the number of its keys, and the number of its first keys that were served."""

    push: Push
    num_keys: int
    done: int


class Pushes:
    """The record of pushes of a shard.

    Args:
        words: int64[1 + 88 · 4] of the arena, all 0 at first. The first word is the lane of the running push + 1. Each
            lane has four words: the numbers of the last push and of the push that was cut short, the number of keys of
            the latter, and the number of its keys that were served.
        state: the words of the arena's header that the shard uses.
    """

    def __init__(self, words: Longs, state: Longs) -> None:
        self._lane, self._lanes, self._state = words[:1], words[1:].reshape(LANES, LANE_WORDS), state

    @contextlib.contextmanager
    def taking(self, push: Push, num_keys: int) -> Iterator[int]:
        """Records a push as running at the start, and as applied at the end. Call it only during a change.

        Yields:
            The number of keys that were served before. All keys were served if the push was applied already.

        Raises:
            ConfigError: the lane or number is out of range, or the push has another number of keys than when it was
                cut short.
        """
        lane, number = push
        if not (0 <= lane < LANES and 1 <= number <= _MOST):
            raise ConfigError(
                f"push {number} of lane {lane}: expected lanes 0 to {LANES - 1}, numbers from 1 to 2⁶² - 1"
            )
        words = self._lanes[lane]
        if number <= words[_LAST]:
            yield num_keys
            return
        if words[_CUT] != number:
            words[_CUT] = 0
            words[_NUM_KEYS], words[_DONE] = num_keys, 0
            words[_CUT] = number
        elif words[_NUM_KEYS] != num_keys:
            raise ConfigError(
                f"push {number} of lane {lane}: {num_keys:,} keys, expected {words[_NUM_KEYS]:,} as when it was cut"
                " short; send the same keys again"
            )
        self._state[layout.AMID] = int(words[_DONE]) << 32
        self._lane[0] = lane + 1
        try:
            yield int(words[_DONE])
            words[_LAST] = number
            words[_CUT] = 0
        finally:
            self.settle()

    def settle(self) -> None:
        """Records the progress of a running push, if there is one. The row that was being updated counts as served."""
        if self._lane[0]:
            _, row, position = noted(int(self._state[layout.AMID]))
            self._lanes[self._lane[0] - 1, _DONE] = position + (row >= 0)
            self._lane[0] = 0

    def last(self, lane: int) -> int:
        """Returns the number of the last push of a lane that was applied completely, or 0 before the first push."""
        return int(self._lanes[lane, _LAST])

    def cut(self) -> list[CutPush]:
        """Returns the pushes that were cut short and not sent again."""
        return [
            CutPush(Push(lane, int(words[_CUT])), int(words[_NUM_KEYS]), int(words[_DONE]))
            for lane, words in enumerate(self._lanes)
            if words[_CUT]
        ]

    def clear(self) -> None:
        """Forgets all pushes."""
        self._lane[:] = 0
        self._lanes[:] = 0
