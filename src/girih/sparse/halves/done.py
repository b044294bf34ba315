"""An update that is applied already."""

from __future__ import annotations


class Done:
    """An update that was applied when it was made, or that moves nothing."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""
