"""Turns a model into a graph: records it on batches of several sizes, and tries the graph on one more."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from girih.hierarchical.graph.batches import SIZES, batches_of, isolated
from girih.hierarchical.graph.building import LEFT, Built, SideOutput, begin_graph, build
from girih.hierarchical.graph.operator_costs import operator_graph
from girih.hierarchical.graph.recording import Opaque, record
from girih.hierarchical.graph.runnable import Objects, RunnableGraph, named_by
from girih.models.embeddings import Embeddings
from girih.models.loss import label_losses, loss_of
from girih.planner.operators import OperatorGraph


@dataclass(frozen=True, slots=True)
class CutParameter:
    """A parameter of the model that a rewriting has cut.

    Attributes:
        parameter: its name in the net before.
        dim: the dimension along which it is cut.
        parts: the names of its parts, in order.
        sizes: the lengths of the parts along ``dim``.
    """

    parameter: str
    dim: int
    parts: tuple[str, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TracedNet:
    """A model as a graph of operators.

    Attributes:
        net: runs the graph, ``forward(numeric, embeddings) -> logits``; its parameters are the model's, by their
            names.
        graph: facts of its operators.
        model: the traced model.
        example: a batch, for facts of rewritten graphs.
        opaque: modules that are one operator each because they could not be recorded: path → why.
        left: tensors that the forward pass leaves for the loss.
        splits: parameters that were cut.
    """

    net: RunnableGraph
    graph: OperatorGraph
    model: nn.Module
    example: tuple[Tensor, Embeddings]
    opaque: Mapping[str, str] = field(default_factory=dict)
    left: Sequence[SideOutput] = ()
    splits: tuple[CutParameter, ...] = ()


def net_of(model: nn.Module, left: Sequence[SideOutput], objects: Objects, graph: fx.Graph) -> RunnableGraph:
    """Makes a net with the model's loss and with the tensors that its graph leaves for the loss.

    Args:
        objects: the objects that the graph's nodes name, without the receiver of the tensors left for the loss.
    """
    shell = (
        model if model in objects.values() else _shell(model)
    )  # a model that is one operator keeps these tensors itself
    more = {LEFT: LeftForLoss(shell, left)} if left else {}
    net = RunnableGraph({**objects, **more}, graph)
    net.training = model.training
    if loss_of(model) is not label_losses:
        net.loss = Loss(shell)  # type: ignore[assignment]
    return net


class LeftForLoss(nn.Module):
    """Sets attributes of a model's shell to tensors that have a gradient, as its forward pass would."""

    def __init__(self, shell: nn.Module, left: Sequence[SideOutput]) -> None:
        super().__init__()
        self._shell, self._left = (shell,), tuple(left)  # in a tuple, so that it is not a submodule

    def forward(self, *values: Tensor) -> None:
        """Takes the tensors in the order of ``left``."""
        for each, value in zip(self._left, values, strict=True):
            kept = value.requires_grad and (self.training or each.always)
            setattr(self._shell[0].get_submodule(each.path), each.attribute, value if kept else None)


class Loss:
    """A model's ``loss(outputs, batch)``, called on its shell."""

    def __init__(self, shell: nn.Module) -> None:
        self._shell = shell

    def __call__(self, outputs: Tensor, batch: object) -> Tensor:
        """The mean loss, 0-d."""
        loss: Tensor = self._shell.loss(outputs, batch)  # type: ignore[operator]
        return loss


def _shell(model: nn.Module) -> nn.Module:
    """A copy of the model that shares its parameters, for a loss that may read them. Other attributes are separate."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


TRIED = 13
"""The size of the batch on which a graph is compared with its model."""


def trace(module: nn.Module, numeric: Tensor, embeddings: Embeddings) -> TracedNet:
    """Traces a model as a graph of operators.

    Each module of torch.nn is an operator. Other modules are opened, so that each torch function in them is an
    operator. The forward pass runs on real tensors. Plain Python code between the calls is not restricted, but it must
    not look into their data. A module becomes one operator, named by its path, if it does one of these things:

    - it looks into data
    - it works in place
    - it changes the state of gradients or autocast
    - it returns anything other than tensors

    In the worst case, this module is the whole model, which then stays on trainers.

    The graph serves batches of all sizes with the example's packing, under the autocast that is active during tracing,
    in training and in evaluation mode. The model does not change. Neither does the random state.

    Args:
        numeric, embeddings: float[B, X] and embeddings of an example batch with at least one example, as the model
            would receive them.

    Raises:
        ConfigError: the batch is empty.
    """
    *batches, tried = batches_of(numeric, embeddings, (*SIZES, TRIED))
    copied, opaque = copy.deepcopy(module), dict[str, str]()
    built = None
    with isolated(numeric.device):
        while built is None and "" not in opaque:
            try:
                built = _built(copied, batches, opaque)
                _try(copied, built, tried)
            except Opaque as error:
                built = None
                opaque[error.scope] = error.reason
    objects: dict[str, object] = {type(module).__name__: module}
    if built is None:
        built = Built(_whole(type(module).__name__), {}, ())
    else:
        objects = _objects(module, built)
    example = numeric.detach(), embeddings.mapped(Tensor.detach)
    net = net_of(module, built.left, objects, built.graph)
    return TracedNet(net, operator_graph(net, example), module, example, opaque, built.left)


def _whole(name: str) -> fx.Graph:
    """The graph of a model that is one operator."""
    graph = begin_graph()
    node = graph.call_module(name, tuple(graph.nodes))
    node.meta["operator"] = name
    graph.output(node)
    return graph


def _built(
    module: nn.Module, batches: Sequence[tuple[Tensor, Embeddings]], opaque: Mapping[str, str]
) -> Built:
    module.train()
    runs = [_fails(module, batch) for batch in batches]  # also makes the tensors that the model keeps
    for error in runs[:2]:
        if error is not None:
            raise Opaque("", error)
    # batch norm refuses to train on a batch of one example
    able = [batch for batch, error in zip(batches, runs, strict=True) if error is None]
    training = [record(module, *batch, opaque) for batch in able]
    module.eval()
    return build(training, record(module, *batches[0], opaque))


def _fails(module: nn.Module, batch: tuple[Tensor, Embeddings]) -> str | None:
    """The error that a model raises on a batch, or None."""
    try:
        module(*batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try(module: nn.Module, built: Built, batch: tuple[Tensor, Embeddings]) -> None:
    """Raises Opaque if the graph's logits differ from the model's, in training or in evaluation mode."""
    net = net_of(module, built.left, _objects(module, built), copy.deepcopy(built.graph))
    for training in (True, False):
        net.train(training)
        before = [buffer.clone() for buffer in module.buffers()]
        with isolated(batch[0].device):
            expected = module(*batch)
        for buffer, values in zip(module.buffers(), before, strict=True):
            buffer.copy_(values)
        if not torch.equal(net(*batch), expected):
            raise Opaque("", "its graph computes something else")


def _objects(module: nn.Module, built: Built) -> dict[str, object]:
    """Returns the objects that the nodes name, from a module."""
    objects: dict[str, Any] = dict(built.constants)
    for name in named_by(built.graph):
        if name not in objects and name != LEFT:
            objects[name] = attrgetter(name)(module)
    return objects
