"""What a role is: a class that a launcher runs in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Role(Protocol):
    """One process of a run beside the trainers; it reaches its process by pickle, through a private pipe.

    Attributes:
        name: as in a strategy's ``roles``.
        index: which of its kind.
    """

    name: str
    index: int

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Works until ``stop`` is set; says where it listens by ``ready``, once."""
        ...
