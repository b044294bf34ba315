"""A model becomes a graph: recorded on batches of several sizes, and tried on one more."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from girih.dense.graph.batches import SIZES, apart, batches_of
from girih.dense.graph.building import LEFT, Built, build, whole
from girih.dense.graph.calls import Opaque
from girih.dense.graph.facts import operator_graph
from girih.dense.graph.recording import record
from girih.dense.graph.runnable import named_by
from girih.dense.graph.traced import TracedNet, net_of
from girih.models.embeddings import Embeddings

TRIED = 13
"""The size of the batch on which a graph is held to its model."""


def trace(module: nn.Module, numeric: Tensor, embeddings: Embeddings) -> TracedNet:
    """A model as a graph of operators.

    Each module of torch.nn is an operator; others are opened, so that each torch function in them is one. The forward pass
    runs on real tensors: plain Python around them may do as it likes, as long as it does not look into their data. A module
    that does, or that works in place, changes the gradient's or autocast's state or returns more than tensors, is one operator,
    named by its path; at worst that is the whole model, which then stays on trainers.

    The graph serves batches of all sizes, packed as the example is, under the autocast that is on as it is traced, in
    training and in evaluation mode. The model is left as it was, random state included.

    Args:
        numeric: float[B, X], and embeddings: those of an example batch of at least one example, as the model would get them.

    Raises:
        ConfigError: the batch is empty.
    """
    *batches, tried = batches_of(numeric, embeddings, (*SIZES, TRIED))
    copied, opaque = copy.deepcopy(module), dict[str, str]()
    built = None
    with apart(numeric.device):
        while built is None and "" not in opaque:
            try:
                built = _built(copied, batches, opaque)
                _try(copied, built, tried)
            except Opaque as error:
                built = None
                opaque[error.scope] = error.reason
    name = type(module).__name__
    if built is None:
        built = Built(whole(name), {name: module}, ())
    graph, left, objects = built.graph, built.left, _objects(module, built)
    example = (
        numeric.detach(),
        embeddings.mapped(Tensor.detach, lambda each: each._replace(values=each.values.detach())),
    )
    net = net_of(module, left, objects, graph)
    return TracedNet(net, operator_graph(net, example), module, example, opaque, left)


def _built(
    module: nn.Module, batches: Sequence[tuple[Tensor, Embeddings]], opaque: Mapping[str, str]
) -> Built:
    module.train()
    runs = [_fails(module, batch) for batch in batches]  # and what it keeps for later passes, it has made
    for error in runs[:2]:
        if error is not None:
            raise Opaque("", error)
    # batch norm refuses to train on the batch of one example
    able = [batch for batch, error in zip(batches, runs, strict=True) if error is None]
    training = [record(module, *batch, opaque) for batch in able]
    module.eval()
    return build(training, record(module, *batches[0], opaque))


def _fails(module: nn.Module, batch: tuple[Tensor, Embeddings]) -> str | None:
    """The error that a model raises on a batch."""
    try:
        module(*batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try(module: nn.Module, built: Built, batch: tuple[Tensor, Embeddings]) -> None:
    """Raises Opaque where the graph's logits are not the model's, training or not."""
    net = net_of(module, built.left, _objects(module, built), copy.deepcopy(built.graph))
    for training in (True, False):
        net.train(training)
        before = [buffer.clone() for buffer in module.buffers()]
        with apart(batch[0].device):
            expected = module(*batch)
        for buffer, values in zip(module.buffers(), before, strict=True):
            buffer.copy_(values)
        if not torch.equal(net(*batch), expected):
            raise Opaque("", "its graph computes something else")


def _objects(module: nn.Module, built: Built) -> dict[str, Any]:
    """Returns the objects that the nodes name, from a module."""
    found: dict[str, Any] = dict(built.constants)
    for name in named_by(built.graph):
        if name not in found and name != LEFT:
            owner, _, last = name.rpartition(".")
            found[name] = getattr(module.get_submodule(owner), last)
    return found
