"""A traced net, and what its loss takes beside logits."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from girih.dense.graph.building import LEFT, SideOutput
from girih.dense.graph.runnable import Objects, RunnableGraph
from girih.models.embeddings import Embeddings
from girih.planner.operators import OperatorGraph


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter of the model that a rewriting has cut.

    Attributes:
        parameter: its name in the net before. dim: along which it is cut. parts: the names of its parts, in order.
        sizes: their lengths along ``dim``.
    """

    parameter: str
    dim: int
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TracedNet:
    """A model as a graph of operators.

    Attributes:
        net: runs it, ``forward(numeric, embeddings) -> logits``; its parameters are the model's, by their names.
        graph: facts of its operators.
        model: what was traced.
        example: a batch, for facts of rewritten graphs.
        opaque: modules that are one operator each because they could not be recorded: path → why.
        left: what the forward pass leaves for the loss. splits: parameters that were cut.
    """

    net: RunnableGraph
    graph: OperatorGraph
    model: nn.Module
    example: tuple[Tensor, Embeddings]
    opaque: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[SideOutput] = ()
    splits: tuple[CutParameter, ...] = ()


def net_of(model: nn.Module, left: Sequence[SideOutput], objects: Objects, graph: fx.Graph) -> RunnableGraph:
    """A net that has the model's loss, with what its graph leaves for that.

    Args:
        objects: what the graph's nodes name, but for what takes what is left.
    """
    shell = (
        model if model in objects.values() else _shell(model)
    )  # a model that is one operator keeps what it leaves
    more = {LEFT: LeftForLoss(shell, left)} if left else {}
    net = RunnableGraph({**objects, **more}, graph)
    net.training = model.training
    if callable(getattr(model, "loss", None)):
        net.loss = Loss(shell)  # type: ignore[assignment]
    return net


class LeftForLoss(nn.Module):
    """Sets attributes of a model's shell to tensors that have a gradient, as its forward pass would."""

    def __init__(self, shell: nn.Module, left: Sequence[SideOutput]) -> None:
        super().__init__()
        self._shell, self._left = (shell,), tuple(left)  # in a tuple: no module of this one

    def forward(self, *values: Tensor) -> None:
        """The tensors in the order of what is left."""
        for each, value in zip(self._left, values, strict=True):
            kept = value.requires_grad and (self.training or each.always)
            setattr(self._shell[0].get_submodule(each.path), each.attribute, value if kept else None)


class Loss:
    """A model's ``loss(outputs, batch)``, of its shell."""

    def __init__(self, shell: nn.Module) -> None:
        self._shell = shell

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """The mean loss, 0-d."""
        loss: Tensor = self._shell.loss(outputs, batch)  # type: ignore[operator]
        return loss


def _shell(model: nn.Module) -> nn.Module:
    """The model with parameters that are its own, for a loss that may read them, and attributes that are not."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)
