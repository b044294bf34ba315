"""The state of a store at one moment whose rows are still on their way to the host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.store.snapshot.columns import Chunk
from girih.store.snapshot.snapshot import Snapshot
from girih.store.snapshot.tensorfile import StoredTensor
from girih.store.state import ShardState


class Arriving(Protocol):
    """A shard as it was at one moment, on its way to the host."""

    def wait(self) -> ShardState:
        """Blocks until all of it is there; nothing changes it from then on.

        Raises:
            CheckpointError: it was closed before.
        """

    def close(self) -> None:
        """Ends it, arrived or not, and gives its memory back."""


class ArrivingSnapshot:
    """A :class:`Snapshot` of a shard that is on its way; whoever asks it for something waits until all of it is there."""

    where = "snapshot of a store"

    def __init__(self, arriving: Arriving, directory: str | os.PathLike[str] | None = None) -> None:
        self._arriving, self._directory = arriving, directory
        self._found: Snapshot | None = None

    @property
    def description(self) -> dict[str, Any]:
        """See :class:`Snapshot`."""
        return self._there().description

    @property
    def num_rows(self) -> int:
        """n."""
        return self._there().num_rows

    def tensors(self) -> list[StoredTensor]:
        """All columns and Bloom filters."""
        return self._there().tensors()

    def chunks(self) -> Iterator[Chunk]:
        """The columns of some rows at a time; each is overwritten when the next is asked for."""
        return self._there().chunks()

    def blooms(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """(table's name, its next Bloom cells), all cells of all tables."""
        return self._there().blooms()

    def bloom(self, table: str) -> NDArray[np.uint8] | None:
        """A table's Bloom cells, or None where it has none."""
        return self._there().bloom(table)

    def verify(self) -> None:
        """No-op: what lies in memory was checked when it came there."""

    def close(self) -> None:
        """Has verbs keep nothing any more."""
        if self._found is not None:
            self._found.close()
        self._arriving.close()

    def __enter__(self) -> ArrivingSnapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _there(self) -> Snapshot:
        if self._found is None:
            self._found = Snapshot(self._arriving.wait(), self._directory)
        return self._found


LiveSnapshot = Snapshot | ArrivingSnapshot
"""A snapshot that is read while verbs go on."""
