"""What sparse halves have in common in which nothing is ever under way, and no other process has a part."""

from __future__ import annotations

from typing import Any

from girih.data import Dataset


class Done:
    """An update that is applied already."""

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Returns at once."""
        return


class ImmediateUpdates:
    """A sparse half that has applied an update when :meth:`push` returns."""

    by_columns = False

    def columns_of(self, data: Dataset) -> Dataset:
        """All of them."""
        return data

    def refuse(self, pulled: object) -> Done:
        """Nothing is kept for a batch."""
        return Done()

    def drop(self, pulled: object) -> Done:
        """Nothing is kept for a batch."""
        return Done()

    def drain(self) -> None:
        """Nothing is ever in flight."""
        return

    def told(self) -> dict[str, dict[str, Any]]:
        """There are no other processes."""
        return {}
