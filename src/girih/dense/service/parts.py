"""A part of a net: operators that run on one group server without coming back to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from girih.dense.service.splits import Split

Stage = list[tuple[str, list[Tensor]]]
"""Parts that may run side by side: the name of each, and its inputs."""
Exchange = Callable[[Stage], list[list[Tensor]]]
"""Runs the parts of a stage; returns the outputs of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A connected component of the dense net.

    Attributes:
        server: which of the group's servers holds it.
        module: ``module(*tensors) -> tuple of tensors``; its parameters have the names of the whole model.
        inputs, outputs: how many tensors.
    """

    name: str
    server: int
    module: nn.Module
    inputs: int
    outputs: int


class Partitioned(Protocol):
    """A net cut into parts, and what trainers keep of it."""

    @property
    def splits(self) -> Sequence[Split]: ...

    @property
    def parts(self) -> Sequence[Part]: ...

    def trainer(self, exchange: Exchange) -> nn.Module:
        """The trainer's partition: ``forward(numeric, embeddings) -> logits``, which has parts run by ``exchange``."""
        ...
