"""Turns a tagged graph into one runnable partition for each device (HT §3.2.2)."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from girih.hierarchical.graph.batches import packing_of
from girih.hierarchical.graph.building import LEFT
from girih.hierarchical.graph.operator_costs import free_nodes, name_of
from girih.hierarchical.graph.runnable import RunnableGraph, attribute_of
from girih.hierarchical.graph.tracing import TracedNet, net_of
from girih.models.embeddings import Embeddings
from girih.planner.operators import DisjointSets, OperatorGraph, Tagging
from girih.planner.tagging.components import components as tagging_components
from girih.planner.tagging.index import Index

Server = int | None
"""A server's number, or None for the trainer."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node's server and level."""

    server: Server
    level: int


def placed(net: RunnableGraph, tagging: Tagging, graph: OperatorGraph) -> dict[fx.Node, PlacedNode]:
    """Returns the device and level of each node. Free nodes are missing, because they are copied to their readers.

    Args:
        graph: facts of the same net.

    Raises:
        ConfigError: the tagging lacks an operator or has an unknown operator; it names no device; it moves an operator
            that must stay on trainers; or it separates operators of one module.
    """
    index = Index(graph)
    devices = index.placed(tagging)
    server_of = {
        operator.name: devices[bundle] - 1 if devices[bundle] else None
        for operator, bundle in zip(index.operators, index.bundle_of, strict=True)
    }
    stage_of = {name: each.stage for each in tagging_components(graph, tagging) for name in each.operators}
    free = free_nodes(net.graph)
    places: dict[fx.Node, PlacedNode] = {}
    for node in net.graph.nodes:
        if node in free:
            continue
        before = [places[each] for each in node.all_input_nodes if each not in free]
        if node.meta.get("glue"):
            places[node] = before[0]
            continue
        name = str(name_of(node))
        server = server_of.get(name)  # embeddings as a whole are not an operator
        if server is None:
            level = max([0, *(each.level + (each.server is not None) for each in before)])
        else:
            level = 2 * stage_of[name] + 1
        places[node] = PlacedNode(server, level)
    return places


def components(nodes: Mapping[fx.Node, PlacedNode], net: RunnableGraph) -> list[list[fx.Node]]:
    """The nodes of servers as connected components of one server and level, each in the graph's order.

    Nodes that read the same parameter count as connected, so that the parameter has one place. Nodes that read the
    same value from another device count as connected too, so that the value is sent once.
    """
    sets = DisjointSets(node for node, where in nodes.items() if where.server is not None)
    readers: dict[tuple[PlacedNode, fx.Node], fx.Node] = {}
    arriving: dict[tuple[PlacedNode, fx.Node], fx.Node] = {}
    for node, where in nodes.items():
        for each in node.all_input_nodes if where.server is not None else ():
            if nodes.get(each) == where:
                sets.join(each, node)
            elif each in nodes:
                sets.join(arriving.setdefault((where, each), node), node)
            for parameter in _parameters_behind(each, nodes):
                sets.join(readers.setdefault((where, parameter), node), node)
    return sets.sets()


def _parameters_behind(node: fx.Node, nodes: Mapping[fx.Node, PlacedNode]) -> set[fx.Node]:
    """The attributes that a free node depends on, including the node itself."""
    if node in nodes:
        return set()
    if node.op == "get_attr":
        return {node} if node.target != "training" else set()
    return set[fx.Node]().union(*(_parameters_behind(each, nodes) for each in node.all_input_nodes))


STAGES, PACKED_ALIKE = "_stages", "_packed_alike"
Exchange = Callable[[list[tuple[str, list[Tensor]]]], list[list[Tensor]]]
"""Runs the parts of one stage in parallel: (part, inputs) of each → outputs of each."""


@dataclass(frozen=True, eq=False)
class ServerPart:
    """Nodes that a server runs without returning to the trainer.

    Attributes:
        name: the name of its first operator.
        server: the server's number.
        module: ``module(*tensors) -> tuple of tensors``; its parameters are the model's, by their names. It changes no
            input. Parts of one server may share parameters, if a module is called at several stages: pickle them
            together.
        inputs, outputs: numbers of tensors. Integers travel as tensors int64[].
    """

    name: str
    server: int
    module: RunnableGraph
    inputs: int
    outputs: int


@dataclass(frozen=True, eq=False)
class Partitioned:
    """A net over the devices of a group.

    Attributes:
        parts: the parts of all servers, in the order of stages.
        stages: the names of the parts of each stage.
    """

    traced: TracedNet
    parts: tuple[ServerPart, ...]
    stages: tuple[tuple[str, ...], ...]
    _graph: fx.Graph
    _objects: dict[str, Any]

    def trainer(self, exchange: Exchange) -> nn.Module:
        """The trainer's partition: ``forward(numeric, embeddings) -> logits``, with the model's loss if it has one.

        Its parameters are the model's, by their names, without the parameters of parts.

        Args:
            exchange: called once for each stage, in order.
        """
        by_name = {part.name: part for part in self.parts}
        stages = {
            f"{STAGES}.{number}": Stage([(name, by_name[name].inputs) for name in names], exchange)
            for number, names in enumerate(self.stages)
        }
        check = {PACKED_ALIKE: PackedAlike(packing_of(self.traced.example[1]))}
        return net_of(
            self.traced.model,
            self.traced.left,
            {**self._objects, **stages, **check},
            copy.deepcopy(self._graph),
        )


def partition(traced: TracedNet, tagging: Tagging) -> Partitioned:
    """Partitions a net by device.

    In one process, the partitions compute the same as the net, bit for bit. An operator that works in place is
    replaced by a module that does not, because other nodes may read its input.

    Args:
        tagging: operator → "trainer", "server 0" and so on.

    Raises:
        ConfigError: the tagging does not fit the net, see :func:`girih.hierarchical.graph.partitioning.placed`.
    """
    where = placed(traced.net, tagging, traced.graph)
    cut = [_Cut(traced.net, where, nodes) for nodes in components(where, traced.net)]
    cut.sort(key=lambda each: each.where.level)
    levels = sorted({each.where.level for each in cut})
    stages = [[each for each in cut if each.where.level == level] for level in levels]
    graph, objects = _trainer(traced.net, where, dict(zip(levels, stages, strict=True)))
    names = tuple(tuple(each.name for each in stage) for stage in stages)
    return Partitioned(traced, tuple(each.part() for each in cut), names, graph, objects)


class Stage(nn.Module):
    """One exchange with servers.

    Args:
        parts: name and number of inputs of each.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], exchange: Exchange) -> None:
        super().__init__()
        self.parts, self.exchange = tuple(parts), exchange

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Maps the inputs of all parts, in order, to their outputs."""
        rest = iter(tensors)
        stage = [(name, [next(rest) for _ in range(inputs)]) for name, inputs in self.parts]
        return tuple(output for outputs in self.exchange(stage) for output in outputs)

    def __deepcopy__(self, memo: dict[int, object]) -> Stage:
        return Stage(self.parts, self.exchange)  # connections cannot be copied


class PackedAlike(nn.Module):
    """Refuses embeddings with a different packing than in tracing."""

    def __init__(self, packing: tuple[object, ...]) -> None:
        super().__init__()
        self.packing = packing

    def forward(self, embeddings: Embeddings) -> None:
        """Raises a ValueError if the packing differs."""
        if packing_of(embeddings) != self.packing:
            raise ValueError(
                f"embeddings packed as {packing_of(embeddings)}; expected {self.packing}, as in tracing: trace the net again"
            )


class _Copy:
    """Nodes of a net in another graph, copied together with the free nodes that they depend on."""

    def __init__(self, net: RunnableGraph) -> None:
        self.net, self.graph = net, fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.objects: dict[str, Any] = {}
        self._numbers: dict[fx.Node, fx.Node] = {}

    def copied(self, node: fx.Node) -> fx.Node:
        """The node's copy. A missing copy of a free node is made."""
        if node not in self.nodes:
            for each in node.all_input_nodes:
                self.copied(each)
            self.nodes[node] = self.graph.node_copy(node, self.copied)
            if node.op in ("call_module", "get_attr"):
                self.objects[str(node.target)] = _out_of_place(attribute_of(self.net, node))
        return self.nodes[node]

    def arrived(self, node: fx.Node, tensor: fx.Node) -> None:
        """Uses a tensor of this graph as the value of a node on another device."""
        is_number = node.meta.get("is_number")
        self.nodes[node] = self.graph.call_method("item", (tensor,)) if is_number else tensor

    def leaving(self, node: fx.Node) -> fx.Node:
        """The tensor that leaves for another device as the value of a node."""
        if not node.meta.get("is_number"):
            return self.copied(node)
        if node not in self._numbers:
            self._numbers[node] = self.graph.call_function(torch.tensor, (self.copied(node),))
        return self._numbers[node]


class _Cut:
    """A component of a net: the values that it reads from other devices, and its own values that other devices read."""

    def __init__(self, net: RunnableGraph, where: dict[fx.Node, PlacedNode], nodes: list[fx.Node]) -> None:
        self.net, self.nodes, self.where = net, nodes, where[nodes[0]]
        inside = set(nodes)
        self.inputs = list(
            dict.fromkeys(
                each
                for node in nodes
                for each in node.all_input_nodes
                if each in where and each not in inside
            )
        )
        self.outputs = [node for node in nodes if any(user not in inside for user in node.users)]
        self.name = str(next(node.meta["operator"] for node in nodes if "operator" in node.meta))

    def part(self) -> ServerPart:
        """Makes the part."""
        copy_ = _Copy(self.net)
        places = [copy_.graph.placeholder(f"input_{number}") for number in range(len(self.inputs))]
        for node, place in zip(self.inputs, places, strict=True):
            copy_.arrived(node, place)
        for node in self.nodes:
            copy_.copied(node)
        copy_.graph.output(tuple(copy_.leaving(node) for node in self.outputs))
        module = RunnableGraph(copy_.objects, copy_.graph)
        module.training = self.net.training
        return ServerPart(self.name, int(self.where.server or 0), module, len(self.inputs), len(self.outputs))


def _trainer(
    net: RunnableGraph, where: dict[fx.Node, PlacedNode], stages: dict[int, list[_Cut]]
) -> tuple[fx.Graph, dict[str, object]]:
    """The trainer's graph with a call for each stage, and the objects that its nodes name, except stages."""
    copy_ = _Copy(net)
    trainer_nodes = [node for node, at in where.items() if at.server is None]
    trainer_nodes.sort(key=lambda node: (node.op == "output", where[node].level))
    pending = dict(stages)
    checked = False
    for node in trainer_nodes:
        while pending and min(pending) < where[node].level:
            _exchange(copy_, len(stages) - len(pending), pending.pop(min(pending)))
        if node.op != "placeholder" and not checked:
            copy_.graph.call_module(PACKED_ALIKE, (copy_.nodes[_embeddings(net)],))
            checked = True
        copy_.copied(node)
    return copy_.graph, {name: value for name, value in copy_.objects.items() if name != LEFT}


def _exchange(copy_: _Copy, number: int, cuts: Iterable[_Cut]) -> None:
    cuts = list(cuts)
    sent = [copy_.leaving(node) for cut in cuts for node in cut.inputs]
    stage = copy_.graph.call_module(f"{STAGES}.{number}", tuple(sent))
    for place, node in enumerate(node for cut in cuts for node in cut.outputs):
        copy_.arrived(node, copy_.graph.call_function(operator.getitem, (stage, place)))


def _embeddings(net: RunnableGraph) -> fx.Node:
    node: fx.Node = next(each for each in net.graph.nodes if each.target == "embeddings")
    return node


def _out_of_place(value: object) -> object:
    """Returns the module, or a copy that does not work in place."""
    if not isinstance(value, nn.Module) or getattr(value, "inplace", False) is not True:
        return value
    copied: Any = copy.copy(value)
    copied.inplace = False
    return copied
