"""Combines recordings of batches of several sizes into one graph for all of them.

A number that is the same in all recordings is a constant. A different number depends on a size of a tensor, c = a ·
size + b, or on whether the net trains. Otherwise the module that contains the number is opaque.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from girih.hierarchical.graph.batches import read
from girih.hierarchical.graph.recording import Opaque, Recording
from girih.hierarchical.graph.runnable import leaves, mapped


def check_alike(one: Mapping[fx.Node, str], other: Mapping[fx.Node, str]) -> None:
    """Raises Opaque with the deeper scope if two recordings differ in their calls. See :meth:`Recording.nodes`."""
    places = {node: place for nodes in (one, other) for place, node in enumerate(nodes)}
    for a, b in zip(one, other, strict=False):
        if one[a] != other[b] or not _is_alike(a, b, places):
            raise Opaque(
                max(one[a], other[b], key=len),
                f"its calls differ between batches, or in evaluation: {word_of(a)}, {word_of(b)}",
            )
    if len(one) != len(other):
        scope = max(([*each.values()] or [""])[-1] for each in (one, other))
        raise Opaque(scope, "its number of calls differs between batches, or in evaluation")


def _ends(recording: Recording, nodes: Mapping[fx.Node, str], *, left: bool = True) -> Mapping[object, int]:
    """The positions, among the nodes of a recording, of the outputs and of the tensors left on modules."""
    places = {node: place for place, node in enumerate(nodes)}
    ends = [("logits", recording.logits), *(recording.left.items() if left else ())]
    return {name: places[node] for name, node in ends if node is not None}


def _is_alike(a: fx.Node, b: fx.Node, places: Mapping[fx.Node, int]) -> bool:
    structures = [mapped((each.args, each.kwargs), lambda _: None) for each in (a, b)]
    if (a.op, a.target) != (b.op, b.target) or structures[0] != structures[1]:
        return False
    for x, y in zip(_arguments(a), _arguments(b), strict=True):
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            if places[x] != places[y]:
                return False
        elif type(x) is not type(y) or (isinstance(x, str) and x != y):
            return False
    return True


def _arguments(node: fx.Node) -> list[object]:
    return list(leaves((node.args, node.kwargs)))


def word_of(node: fx.Node) -> str:
    """The name of the called function or module."""
    if node.target is getattr:
        return str(node.args[1])
    return str(getattr(node.target, "__name__", node.target)).strip("_")


LEFT = "_left_for_loss"
NUMERIC, OUTPUT = "numeric", "logits"
"""Operators of the trainer: the numeric input and the output of a net."""


@dataclass(frozen=True, slots=True)
class SideOutput:
    """A tensor that the forward pass leaves on a module for the loss.

    Attributes:
        always: whether the pass also leaves the tensor in evaluation mode.
    """

    path: str
    attribute: str
    always: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A graph, tensors that only the graph has, and tensors that it leaves on modules (arguments of its node LEFT)."""

    graph: fx.Graph
    constants: Mapping[str, Tensor]
    left: tuple[SideOutput, ...]


def build(training: Sequence[Recording], evaluating: Recording) -> Built:
    """Builds the graph of a net from recordings: in training mode at several sizes, and one in evaluation mode.

    Nodes have ``meta["operator"]``, the operator's name, or ``meta["glue"]`` if they only pass on tensors of other
    nodes.

    Raises:
        Opaque: the recordings differ in more than sizes and mode.
    """
    always = bool(evaluating.left)
    runs = [each.nodes() for each in training]
    trained, evaluated = training[0].nodes(left=always), evaluating.nodes()
    for run in runs[1:]:
        check_alike(runs[0], run)
    check_alike(trained, evaluated)
    ends = [_ends(recording, run) for recording, run in zip(training, runs, strict=True)]
    if ends != ends[:1] * len(ends) or _ends(training[0], trained, left=always) != _ends(
        evaluating, evaluated
    ):
        raise Opaque("", "the tensors that it returns or keeps differ between batches, or in evaluation")
    builder = _Builder(training)
    for a, b in zip(trained, evaluated, strict=True):
        for place, (x, y) in enumerate(zip(_arguments(a), _arguments(b), strict=True)):
            if x != y and not isinstance(x, fx.Node):
                if type(x) is not bool:
                    raise Opaque(trained[a], f"{word_of(a)} gets {x!r} in training, {y!r} in evaluation")
                builder.flags.add((a, place))
    for nodes in zip(*runs, strict=True):
        builder.add(nodes, runs[0][nodes[0]])
    return builder.built(always=always)


def begin_graph() -> fx.Graph:
    """Starts a graph with the inputs of a net."""
    graph = fx.Graph()
    graph.placeholder(NUMERIC).meta["operator"] = NUMERIC
    graph.placeholder("embeddings")
    return graph


def size_of(tensor: Tensor, dim: int) -> int:
    """Returns a size as a number that a graph can compute with."""
    return tensor.shape[dim]


class _Builder:
    """Builds a graph from recordings.

    Attributes:
        flags: arguments that follow the mode: a node of the first recording, and the argument's place.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.flags = set[tuple[fx.Node, int]]()
        self._recordings, self._graph = recordings, begin_graph()
        self._nodes = dict(zip(recordings[0].graph.nodes, self._graph.nodes, strict=False))  # for the inputs
        self._alike = {nodes[0]: nodes for nodes in zip(*(each.inputs for each in recordings), strict=True)}
        self._sizes: dict[tuple[fx.Node, int], fx.Node] = {}
        self._names = {NUMERIC, OUTPUT}
        self._constants: dict[str, Tensor] = {}
        self._training: fx.Node | None = None

    def add(self, nodes: tuple[fx.Node, ...], scope: str) -> None:
        """Adds a node to the graph, from the matching nodes of all recordings."""
        node, resolved = nodes[0], list[object]()
        if node in self._nodes:
            return
        if node.target in self._recordings[0].constants:
            self._keep(str(node.target))
        for place, values in enumerate(zip(*map(_arguments, nodes), strict=True)):
            if (node, place) in self.flags:
                resolved.append(self._mode(values[0]))
            elif isinstance(values[0], fx.Node):
                resolved.append(self._nodes[values[0]])
            elif all(value == values[0] for value in values):
                resolved.append(values[0])
            else:
                resolved.append(self._number(node, scope, values))
        self._make(node, resolved, scope)
        self._alike[node] = nodes

    def built(self, *, always: bool) -> Built:
        """Returns the whole graph. See :class:`SideOutput`."""
        first = self._recordings[0]
        left = tuple(SideOutput(*where, always) for where in first.left)
        if left:
            node = self._graph.call_module(LEFT, tuple(self._nodes[each] for each in first.left.values()))
            node.meta |= {"operator": self._unique("left for loss"), "stays": True}
        self._graph.output(self._nodes[first.logits])
        return Built(self._graph, self._constants, left)

    def _make(self, node: fx.Node, arguments: Iterable[object], scope: str) -> fx.Node:
        values = iter(arguments)
        args, kwargs = mapped((node.args, node.kwargs), lambda _: next(values))
        made = self._nodes[node] = self._graph.create_node(node.op, node.target, args, kwargs)
        if node.target is operator.getitem:
            made.meta |= {"glue": True, "is_number": False}
        elif node.target is read:
            made.meta["operator"] = self._unique(f"embeddings.{args[1]}.{args[2]}")
        elif node.op == "call_module":
            made.meta["operator"] = self._unique(str(node.target))
        elif node.op != "get_attr":
            made.meta["operator"] = self._unique(f"{scope}.{word_of(node)}" if scope else word_of(node))
        return made

    def _keep(self, name: str) -> None:
        tensors = [each.constants[name] for each in self._recordings]
        if not all(torch.equal(each, tensors[0]) for each in tensors):
            raise Opaque("", "it makes a tensor without torch's functions, which differs between batches")
        self._constants[name] = tensors[0].detach()

    def _mode(self, value: object) -> fx.Node:
        if self._training is None:
            self._training = self._graph.create_node("get_attr", "training")
        return self._training if value else self._glue(operator.not_, self._training)

    def _number(self, node: fx.Node, scope: str, values: Sequence[object]) -> fx.Node:
        """Makes a node for a number that varies between recordings, as a function of a size."""
        numbers = [value for value in values if type(value) is int]
        if len(numbers) == len(values):
            for plain in (True, False):
                for read_from, dim, factor, offset in self._sizes_like(numbers, node.all_input_nodes):
                    if not plain or (factor, abs(offset) < 2) == (1, True):
                        size = self._size(read_from, dim)
                        size = size if factor == 1 else self._glue(operator.mul, size, factor)
                        return size if offset == 0 else self._glue(operator.add, size, offset)
        raise Opaque(
            scope, f"{word_of(node)} is given {values[0]!r} or {values[1]!r}, which depends on no size"
        )

    def _sizes_like(
        self, values: Sequence[int], inputs: Sequence[fx.Node]
    ) -> Iterator[tuple[fx.Node, int, int, int]]:
        for node in dict.fromkeys((*inputs, *self._alike)):
            shapes = [each.meta.get("shape", ()) for each in self._alike[node]]
            for dim, sizes in enumerate(zip(*shapes, strict=True)):
                if sizes[0] != sizes[1]:
                    factor = (values[1] - values[0]) // (sizes[1] - sizes[0])
                    offset = values[0] - factor * sizes[0]
                    if factor and all(v == factor * s + offset for v, s in zip(values, sizes, strict=True)):
                        yield node, dim, factor, offset

    def _size(self, node: fx.Node, dim: int) -> fx.Node:
        if (node, dim) not in self._sizes:
            made = self._nodes.get(node)
            if made is None:  # an input that nothing else reads
                made = self._make(node, [self._nodes.get(each, each) for each in _arguments(node)], "")
            self._sizes[node, dim] = self._glue(size_of, made, dim)
            self._sizes[node, dim].meta["is_number"] = True
        return self._sizes[node, dim]

    def _glue(self, function: Callable[..., object], *args: Argument) -> fx.Node:
        node = self._graph.call_function(function, args)
        node.meta |= {"glue": True, "is_number": True}
        return node

    def _unique(self, name: str) -> str:
        unique, number = name, 0
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        return unique
