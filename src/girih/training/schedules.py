"""Schedules: how the two halves are joined, step by step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from girih.data.batch import Batch
from girih.errors import NonFiniteError, WireError
from girih.models.embeddings import Embeddings
from girih.runs.spans import Spans
from girih.training.halves import DenseHalf, Loss, Pending, Pulled, SparseHalf

Token = TypeVar("Token")


@dataclass(frozen=True, slots=True)
class Step(Generic[Token]):
    """One batch that was trained on, or refused.

    Attributes:
        token: what came with the batch: where the data goes on after it.
        loss: its mean loss.
        staleness: earlier batches whose gradients were not applied when its rows were read.
        refused: why nothing was applied, or None.
    """

    token: Token
    num_examples: int
    loss: float
    staleness: int = 0
    refused: NonFiniteError | None = None


class Schedule(Protocol):
    """Trains on batches in turn; yields once a step's updates are applied or on their way.

    Closed early, it lets go of what it has read ahead.
    """

    def __call__(
        self,
        batches: Iterable[tuple[Batch, Token]],
        sparse: SparseHalf,
        dense: DenseHalf,
        loss: Loss,
        lr_scale: Callable[[], float],
        spans: Spans,
    ) -> Generator[Step[Token], None, None]:
        """``lr_scale`` multiplies the sparse learning rates, asked once a step."""
        ...


def in_step(
    batches: Iterable[tuple[Batch, Token]],
    sparse: SparseHalf,
    dense: DenseHalf,
    loss: Loss,
    lr_scale: Callable[[], float],
    spans: Spans,
) -> Generator[Step[Token], None, None]:
    """Pull, forward, backward, push: each batch sees all updates before it; staleness is 0."""
    for batch, token in batches:
        with spans("pull"):
            pulled = sparse.pull(batch)
        step, pending = _train(batch, token, pulled, sparse, dense, loss, lr_scale, spans)
        with spans("wait for update"):
            pending.wait()
        yield step


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Up to ``staleness`` batches are pulled before the gradients of earlier ones are applied.

    So lookups of later batches and updates of earlier ones go on beside dense compute (Persia §3, §4.2.1). With
    0 it is :func:`in_step`.
    """

    staleness: int

    def __call__(
        self,
        batches: Iterable[tuple[Batch, Token]],
        sparse: SparseHalf,
        dense: DenseHalf,
        loss: Loss,
        lr_scale: Callable[[], float],
        spans: Spans,
    ) -> Generator[Step[Token], None, None]:
        """Yields once a step's update is on its way."""
        source = iter(batches)
        ahead: deque[tuple[Batch, Token, Pulled]] = deque()
        under_way: deque[Pending] = deque()
        ended = False
        try:
            while True:
                while under_way and under_way[0].done():
                    under_way.popleft().wait()
                while not ended and len(ahead) + len(under_way) <= self.staleness:
                    item = next(source, None)
                    if item is None:
                        ended = True
                    else:
                        ahead.append((*item, sparse.pull(item[0])))
                if ahead:
                    step, pending = _train(*ahead.popleft(), sparse, dense, loss, lr_scale, spans)
                    under_way.append(pending)
                    yield step
                elif under_way:
                    with spans("wait for update"):
                        under_way.popleft().wait()
                else:
                    return
        finally:
            for _, _, pulled in ahead:
                with suppress(WireError):  # what broke off the connection has been raised, or will be
                    sparse.drop(pulled)


def _train(
    batch: Batch,
    token: Token,
    pulled: Pulled,
    sparse: SparseHalf,
    dense: DenseHalf,
    loss: Loss,
    lr_scale: Callable[[], float],
    spans: Spans,
) -> tuple[Step[Token], Pending]:
    """One batch whose rows are on their way: forward, backward, push."""
    value, refused = math.nan, None
    with spans("wait for rows"):
        embeddings = pulled.wait()
    try:
        with spans("forward"):
            logits = dense.forward(batch, embeddings)
            targets = dense.targets(batch)
            mean_loss, gradient = loss(logits, targets.labels, targets.weights)
            value = mean_loss.item()
        with spans("backward"):
            value = _backward(dense, targets.share, embeddings, value, gradient)
        with spans("push"):
            pending = sparse.push(pulled, lr_scale())
        with spans("apply"):
            dense.apply()
    except NonFiniteError as error:
        dense.discard()
        refused, pending = error, sparse.refuse(pulled)
    return Step(token, num_examples_of(batch), value, pulled.staleness, refused), pending


def num_examples_of(batch: Batch) -> int:
    """Of the step's batch, over all trainers."""
    return batch.num_examples if batch.share is None else batch.share.num_examples


def _backward(
    dense: DenseHalf, share: float, embeddings: Embeddings, value: float, gradient: Tensor
) -> float:
    """Weighs this trainer's mean loss and its gradient; returns the step's mean loss."""
    refused = None
    if not math.isfinite(value):
        feature = embeddings.first_nonfinite()
        refused = NonFiniteError(
            f"the loss is {value}" + (f", and so is feature {feature!r}" if feature else "")
        )
    return dense.backward(gradient * share, value * share, refused)
