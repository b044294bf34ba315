"""Saves in which several ranks write: each its own files, rank 0 learns what they wrote.

TrainerGroup write in threads of their own while training goes on, so what they tell each other goes by the store at
which they met, not by collectives.
"""

from __future__ import annotations

import json
import time
from typing import Any

from girih.comm.group import TrainerGroup
from girih.errors import GirihError, RoleError, StorageFullError
from girih.sparse.groups.local_shards import ShardsSave

PATIENCE_S = 1800.0


class GroupSave:
    """This rank's part of a save; ``write`` of rank 0 returns the files of all ranks."""

    def __init__(self, ranks: TrainerGroup, own: ShardsSave) -> None:
        self._ranks, self._own = ranks, own
        self._number = ranks.next_number()

    def write(self) -> dict[str, Any]:
        """Writes this rank's files; on rank 0, waits for the others'.

        Raises:
            StorageFullError: a rank found no room on its disk.
        """
        if self._ranks.first:
            files = self._own.write()
            for rank in range(1, self._ranks.size):
                files |= self._of(rank)
            return files
        try:
            told: dict[str, Any] = {"files": self._own.write()}
        except BaseException as error:
            full = isinstance(error, StorageFullError)
            self._tell({"error": f"trainer {self._ranks.rank}: {error}", "full": full})
            raise
        self._tell(told)
        return dict(told["files"])

    def close(self) -> None:
        """Ends what was not written."""
        self._own.close()

    def _tell(self, what: dict[str, Any]) -> None:
        self._ranks.put(f"save/{self._number}/{self._ranks.rank}", json.dumps(what))

    def _of(self, rank: int) -> dict[str, Any]:
        key, until = f"save/{self._number}/{rank}", time.monotonic() + PATIENCE_S
        while (text := self._ranks.take(key)) is None:
            if self._ranks.lost.is_set():
                raise RoleError(f"trainer {rank} wrote no shards: a process of the run is gone")
            if time.monotonic() > until:
                raise GirihError(f"trainer {rank} wrote no shards for {PATIENCE_S:.0f} s; is its disk hung?")
            time.sleep(0.01)
        told = json.loads(text)
        if "error" in told:
            raise (StorageFullError if told["full"] else GirihError)(told["error"])
        return dict(told["files"])
