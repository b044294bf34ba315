"""The tiles that every strategy is laid from: two shapes, joined by one edge.

    batch ──► SPARSE HALF ──── embeddings ────► DENSE HALF ──► loss
                 ▲            (the cut)            │
                 └──────── their gradients ◄───────┘

A sparse half owns rows, a dense half owns parameters, and a schedule joins them. The cut is all they share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from girih.checkpoint import Storage
from girih.checkpoint.parts import PartReader
from girih.checkpoint.save import SparseSave
from girih.data import Dataset
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings

Loss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(logits[B,T], labels[B,T], example weights[B] or None) → (mean loss, its gradient[B,T])."""


class Pulled(Protocol):
    """Embeddings of one batch, on their way.

    Attributes:
        staleness: earlier batches of this trainer whose gradients were not applied when these rows were read;
            known once they are here.
    """

    staleness: int

    def wait(self) -> Embeddings:
        """Blocks until they are here. The packed tensors are leaves that collect gradients."""
        ...


class Pending(Protocol):
    """An update on its way."""

    def done(self) -> bool:
        """Whether it is applied, or failed."""
        ...

    def wait(self) -> None:
        """Blocks until it is applied."""
        ...


class Targets(NamedTuple):
    """What a batch's logits are to be: labels float32[B, T], weights float32[B] or None.

    ``share`` is the weight of these examples' mean loss in that of the step.
    """

    labels: Tensor
    weights: Tensor | None
    share: float


class SparseHalf(Protocol):
    """Owns the rows.

    Attributes:
        step: steps applied.
        wire_bytes: what this process has sent, by kind: ids, embeddings, gradients.
        by_columns: whether each trainer reads features of its own, of all examples; else its examples, all features.
    """

    step: int
    wire_bytes: Counter[str]
    by_columns: bool

    def columns_of(self, data: Dataset) -> Dataset:
        """What this tile reads of some data: all, or the features that it owns of every example."""
        ...

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

    def refuse(self, pulled: Any) -> Pending:
        """Ends a step that moves nothing, on all trainers."""
        ...

    def drop(self, pulled: Any) -> Pending:
        """Gives up a batch that was pulled and will not be trained on."""
        ...

    def drain(self) -> None:
        """Returns when all in flight is applied."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What happened so far: rows, hits, new, refused, evicted, dropped gradients."""
        ...

    def told(self) -> Mapping[str, Mapping[str, Any]]:
        """What the processes behind this tile count, by title: ``wire`` (bytes sent by kind) and ``spans``."""
        ...

    def rows(self) -> Mapping[str, int]:
        """Rows of each table."""
        ...

    def begin_save(self, writer: Storage) -> SparseSave:
        """All rows as they are now, to be written as parts of a checkpoint while training goes on."""
        ...

    def load(self, reader: PartReader) -> None:
        """Replaces all rows by those saved, whatever the number of shards then and now.

        Raises:
            CheckpointError: damaged, or of another layout; names the part.
        """
        ...


class DenseHalf(Protocol):
    """Owns the parameters.

    Attributes:
        own_dropout: whether this copy draws masks of its own, as it sees examples of its own.
    """

    own_dropout: bool

    @property
    def wire_bytes(self) -> Counter[str]:
        """What this process has sent, by kind: dense (gradients and parameters), partials."""
        ...

    @property
    def staleness_max(self) -> int:
        """The most steps of all trainers between the parameters of a gradient and its step."""
        ...

    def forward(self, batch: Batch, embeddings: Embeddings, *, train: bool = True) -> Tensor:
        """Logits, float32[B, T], detached; with ``train`` kept for :meth:`backward`, dropout and the like active."""
        ...

    def targets(self, batch: Batch, *, train: bool = True) -> Targets:
        """What the logits of :meth:`forward` are compared with: labels, weights, and the share of the step's loss."""
        ...

    def backward(
        self, logits_gradient: Tensor, loss: float = 0.0, refused: NonFiniteError | None = None
    ) -> float:
        """Adds to the parameters' gradients; the embeddings collect theirs.

        Args:
            logits_gradient: float32[B, T], of this trainer's part of the step's mean loss.
            loss: that part.
            refused: why this trainer refuses the step already, or None.

        Returns:
            The step's mean loss: the sum of its parts.

        Raises:
            NonFiniteError: a trainer refuses the step; raised on all of them.
        """
        ...

    def apply(self) -> None:
        """Moves the parameters by their gradients and clears them."""
        ...

    def drain(self) -> None:
        """Returns when all that this trainer has sent is applied."""
        ...

    def refresh(self) -> None:
        """Takes the newest parameters, where others move them."""
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
