"""Reports of trainers to rank 0 about what they wrote of a checkpoint.

They write in threads of their own while training goes on, so what they tell each other goes by the store at which
they met, not by collectives.
"""

from __future__ import annotations

import json
import time

from girih.checkpoint.coverage import Parts
from girih.comm.group import TrainerGroup
from girih.errors import GirihError, RoleError, StorageFullError

PATIENCE_S = 1800.0


class Reports:
    """Reports of one save; made by all trainers, in the same order."""

    def __init__(self, ranks: TrainerGroup) -> None:
        self._ranks = ranks
        self._number = ranks.next_number()

    def tell(self, parts: Parts) -> None:
        """Tells rank 0 what this trainer wrote."""
        self._put({"parts": parts})

    def tell_error(self, error: BaseException) -> None:
        """Tells rank 0 that this trainer could not."""
        full = isinstance(error, StorageFullError)
        self._put({"error": f"trainer {self._ranks.rank}: {error}", "full": full})

    def of(self, rank: int) -> Parts:
        """Waits for what a trainer wrote.

        Raises:
            StorageFullError, GirihError: it could not. RoleError: a process of the run is gone.
        """
        key, until = self._key(rank), time.monotonic() + PATIENCE_S
        while (text := self._ranks.take(key)) is None:
            if self._ranks.lost.is_set():
                raise RoleError(f"trainer {rank} wrote no shards: a process of the run is gone")
            if time.monotonic() > until:
                raise GirihError(f"trainer {rank} wrote no shards for {PATIENCE_S:.0f} s; is its disk hung?")
            time.sleep(0.01)
        told = json.loads(text)
        if "error" in told:
            raise (StorageFullError if told["full"] else GirihError)(told["error"])
        return dict(told["parts"])

    def _put(self, what: dict[str, object]) -> None:
        self._ranks.put(self._key(self._ranks.rank), json.dumps(what))

    def _key(self, rank: int) -> str:
        return f"save/{self._number}/{rank}"
