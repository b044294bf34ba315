"""Schedules: how the two halves are joined, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.spans import Spans
from girih.tiles import DenseHalf, Loss, SparseHalf

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
    """Trains on batches in turn; yields once a step's updates are applied or on their way."""

    def __call__(
        self,
        batches: Iterable[tuple[Batch, Token]],
        sparse: SparseHalf,
        dense: DenseHalf,
        loss: Loss,
        lr_scale: Callable[[], float],
        spans: Spans,
    ) -> Iterator[Step[Token]]:
        """``lr_scale`` multiplies the sparse learning rates, asked once a step."""
        ...


def in_step(
    batches: Iterable[tuple[Batch, Token]],
    sparse: SparseHalf,
    dense: DenseHalf,
    loss: Loss,
    lr_scale: Callable[[], float],
    spans: Spans,
) -> Iterator[Step[Token]]:
    """Pull, forward, backward, push: each batch sees all updates before it; staleness is 0."""
    for batch, token in batches:
        value, refused = math.nan, None
        with spans("pull"):
            pulled = sparse.pull(batch)
            embeddings = pulled.wait()
        try:
            with spans("forward"):
                logits = dense.forward(batch, embeddings)
                labels = torch.from_numpy(batch.labels).to(logits.device)
                weights = None
                if batch.example_weights is not None:
                    weights = torch.from_numpy(batch.example_weights).to(logits.device)
                mean_loss, gradient = loss(logits, labels, weights)
                value = mean_loss.item()
            if not math.isfinite(value):
                feature = embeddings.first_nonfinite()
                raise NonFiniteError(
                    f"the loss is {value}" + (f", and so is feature {feature!r}" if feature else "")
                )
            with spans("backward"):
                dense.backward(gradient)
            with spans("push"):
                sparse.push(pulled, lr_scale()).wait()
            with spans("apply"):
                dense.apply()
        except NonFiniteError as error:
            dense.discard()
            refused = error
        yield Step(token, batch.num_examples, value, refused=refused)
