"""A request for rows while it is in the queues of the shards of an embedding server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc import Request
from girih.sparse.routing.sorted_keys import SortedKeys
from girih.store import Store
from girih.telemetry.stats import Stats


@dataclass(eq=False)
class QueuedLookup:
    """Reads the rows of a request, part by part, and then answers the request.

    Attributes:
        stores: the shards of the process, by group.
        asked: the keys of the request, by group.
        step: the step of the batch.
        staleness: the batches of the trainer without an update yet, which the answer tells.
        train: True creates missing rows; False marks them as absent.
    """

    request: Request
    stores: Sequence[Sequence[Store]]
    asked: Sequence[SortedKeys]
    step: int
    staleness: int
    train: bool
    stats: Stats
    _allocating: threading.Lock = field(default_factory=threading.Lock)
    _rows: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def num_keys(self) -> int:
        """The number of keys of all groups."""
        return sum(len(keys.keys) for keys in self.asked)

    def concerns(self, shards: range) -> bool:
        """Returns whether any key belongs to one of these shards."""
        return any(keys.has_keys_of(shards) for keys in self.asked)

    def read(self, shards: range) -> None:
        """Reads the rows of some shards. Several threads may do this at the same time."""
        for stores, keys, out in zip(self.stores, self.asked, self._memory(), strict=True):
            keys.read(stores, shards, self.step, out, train=self.train)

    def answer(self, error: Exception | None) -> None:
        """Answers the request when all shards have read their rows, or one has failed."""
        if error is not None:
            self.request.fail(error)
            return
        absent = [] if self.train else [keys.absent() for keys in self.asked]
        arrays: tuple[NDArray[Any], ...] = (*self._memory(), *absent)
        self.stats.sent("embeddings", sum(array.nbytes for array in arrays))
        self.request.reply((self.staleness,), arrays)

    def _memory(self) -> list[NDArray[np.float32]]:
        """Returns memory for the rows. Requests in queues have none yet."""
        with self._allocating:
            if not self._rows:
                self._rows.extend(
                    self.request.buffer(np.float32, len(keys.keys), stores[0].spec.dim)
                    for stores, keys in zip(self.stores, self.asked, strict=True)
                )
        return self._rows
