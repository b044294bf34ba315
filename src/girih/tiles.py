"""The tiles that every strategy is laid from: two shapes, joined by one edge.

    batch ──► SPARSE HALF ──── embeddings ────► DENSE HALF ──► loss
                 ▲            (the cut)            │
                 └──────── their gradients ◄───────┘

A sparse half owns rows, a dense half owns parameters, and a schedule joins them. The cut is all they share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from girih.data.batch import Batch
from girih.models.embeddings import Embeddings

Loss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(logits[B,T], labels[B,T], example weights[B] or None) → (mean loss, its gradient[B,T])."""


class Pulled(Protocol):
    """Embeddings of one batch, on their way."""

    def wait(self) -> Embeddings:
        """Blocks until they are here. The packed tensors are leaves that collect gradients."""
        ...


class Pending(Protocol):
    """An update on its way."""

    def wait(self) -> None:
        """Blocks until it is applied."""
        ...


class SparseSave(Protocol):
    """Rows as they were when a save began; to be written once, by any thread."""

    def write(self) -> Mapping[str, Any]:
        """Writes the files; returns relative path → {"bytes", "crc32"}."""
        ...

    def close(self) -> None:
        """Ends the save, written or not."""
        ...


class SparseHalf(Protocol):
    """Owns the rows."""

    def pull(self, batch: Batch) -> Pulled:
        """Starts to read a batch's rows for training: new keys get rows, used rows are marked used."""
        ...

    def peek(self, batch: Batch) -> Pulled:
        """Reads for evaluation: no new rows, no mark of use."""
        ...

    def push(self, pulled: Any, lr_scale: float) -> Pending:
        """Starts to apply the gradients that embeddings from this tile's own :meth:`pull` collected.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; names the feature; nothing was applied.
        """
        ...

    def drain(self) -> None:
        """Returns when all in flight is applied."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What happened so far: rows, hits, new, refused, evicted, dropped gradients."""
        ...

    def rows(self) -> Mapping[str, int]:
        """Rows of each table."""
        ...

    def begin_save(self, directory: Path) -> SparseSave:
        """All rows as they are now, to be written below a directory while training goes on."""
        ...

    def load(self, directory: Path, files: Mapping[str, Any]) -> None:
        """Replaces all rows by those saved, whatever the number of shards then and now.

        Raises:
            CheckpointError: damaged, or of another layout; names the file.
        """
        ...


class DenseHalf(Protocol):
    """Owns the parameters."""

    def forward(self, batch: Batch, embeddings: Embeddings, *, train: bool = True) -> Tensor:
        """Logits, float32[B, T], detached; with ``train`` kept for :meth:`backward`, dropout and the like active."""
        ...

    def backward(self, logits_gradient: Tensor) -> None:
        """Adds to the parameters' gradients; the embeddings collect theirs."""
        ...

    def apply(self) -> None:
        """Moves the parameters by their gradients and clears them."""
        ...

    def discard(self) -> None:
        """Clears the gradients of a refused step."""
        ...

    def state(self) -> dict[str, Any]:
        """Parameters and optimizer state, for a checkpoint."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        ...
