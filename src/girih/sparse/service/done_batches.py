"""Count of a trainer's batches that are applied or dropped, by number, so that it can be learnt anew."""

from __future__ import annotations


class DoneBatches:
    """The batches of one trainer that are done: all before a number, and some behind it."""

    def __init__(self) -> None:
        self._all_before, self._behind = 0, set[int]()

    @property
    def count(self) -> int:
        """How many are done."""
        return self._all_before + len(self._behind)

    def add(self, number: int) -> None:
        """Notes one as done; once more is no more."""
        if number >= self._all_before:
            self._behind.add(number)
            self._advance()

    def reach(self, number: int) -> None:
        """Notes all before a number as done."""
        if number > self._all_before:
            self._all_before = number
            self._behind = {other for other in self._behind if other >= number}
            self._advance()

    def _advance(self) -> None:
        while self._all_before in self._behind:
            self._behind.remove(self._all_before)
            self._all_before += 1
