"""Recordings of batches of several sizes become one graph that serves all of them.

A number that is the same in all recordings is a constant. One that differs follows from a size of a tensor,
c = a · size + b, or from whether the net trains; else the module that it occurs in is opaque.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from girih.hierarchical.graph.batches import read
from girih.hierarchical.graph.recording import (
    Attribute,
    Call,
    ConstantTensor,
    NetInput,
    Opaque,
    Recording,
    Ref,
    Result,
)
from girih.hierarchical.graph.runnable import CONSTANTS, leaves, mapped


def live(recording: Recording, more: Collection[Ref]) -> tuple[Recording, list[int]]:
    """The calls of which something comes of what is returned, or of ``more``; and their numbers before."""
    kept = (recording.logits, *more)
    needed = {ref.call for ref in kept if isinstance(ref, Result)}
    for number in reversed(range(len(recording.calls))):
        if number in needed:
            call = recording.calls[number]
            needed |= {ref.call for ref in leaves((call.args, call.kwargs)) if isinstance(ref, Result)}
    numbers = sorted(needed)
    places = {number: place for place, number in enumerate(numbers)}

    def moved(value: Any) -> Any:
        return replace(value, call=places[value.call]) if isinstance(value, Result) else value

    calls = []
    for call in (recording.calls[number] for number in numbers):
        args, kwargs = mapped((call.args, call.kwargs), moved)
        calls.append(replace(call, args=args, kwargs=kwargs))
    left = {where: moved(ref) for where, ref in recording.left.items() if more}
    return replace(recording, calls=calls, logits=moved(recording.logits), left=left), numbers


def check_alike(one: Recording, other: Recording) -> None:
    """Raises Opaque with the deeper scope where two recordings are not of the same calls."""
    for a, b in zip(one.calls, other.calls, strict=False):
        if not _alike(a, b):
            raise Opaque(
                max(a.scope, b.scope, key=len),
                f"its calls differ from batch to batch, or as it trains: {word_of(a)}, {word_of(b)}",
            )
    if (
        len(one.calls) != len(other.calls)
        or one.left.keys() != other.left.keys()
        or one.logits != other.logits
    ):
        scope = max(each.calls[-1].scope if each.calls else "" for each in (one, other))
        raise Opaque(scope, "it makes another number of calls in other batches, or as it trains")


def _alike(a: Call, b: Call) -> bool:
    if (a.kind, a.target, a.scope, a.ways) != (b.kind, b.target, b.scope, b.ways):
        return False
    pairs = list(zip(leaves((a.args, a.kwargs)), leaves((b.args, b.kwargs)), strict=False))
    if mapped((a.args, a.kwargs), lambda _: None) != mapped((b.args, b.kwargs), lambda _: None):
        return False
    return all(
        type(x) is type(y)
        and (x == y or not isinstance(x, (NetInput, Attribute, ConstantTensor, Result, str)))
        for x, y in pairs
    )


def flags_of(trained: Recording, evaluated: Recording) -> frozenset[tuple[int, int]]:
    """Arguments that follow the mode: the call's number, and the argument's place."""
    flags = set()
    for number, (a, b) in enumerate(zip(trained.calls, evaluated.calls, strict=True)):
        pairs = zip(leaves((a.args, a.kwargs)), leaves((b.args, b.kwargs)), strict=True)
        for place, (x, y) in enumerate(pairs):
            if x != y:
                if type(x) is not bool:
                    raise Opaque(a.scope, f"{word_of(a)} is given {x!r} as it trains, and else {y!r}")
                flags.add((number, place))
    return frozenset(flags)


def word_of(call: Call) -> str:
    """The name of what is called."""
    if call.kind == "function" and call.target is getattr:
        return str(call.args[1])
    return str(getattr(call.target, "__name__", call.target)).strip("_")


LEFT = "_left_for_loss"
NUMERIC, OUTPUT = "numeric", "logits"
"""Operators of the trainer: what a net is given and what it returns."""


@dataclass(frozen=True, slots=True)
class SideOutput:
    """A tensor that the forward pass leaves on a module, for the loss to take.

    Attributes:
        always: in evaluation mode too.
    """

    path: str
    attribute: str
    always: bool


@dataclass(frozen=True, slots=True)
class Built:
    """A graph, what it names that is no attribute of its model, and what it leaves on modules (the arguments of its node LEFT)."""

    graph: fx.Graph
    constants: Mapping[str, Tensor | nn.Module]
    left: tuple[SideOutput, ...]


def build(training: Sequence[Recording], evaluating: Recording) -> Built:
    """The graph of a net, of recordings in training mode at several sizes, and one in evaluation mode.

    Nodes have ``meta["operator"]``, the operator's name, or ``meta["glue"]`` where they only hand on what others have made.

    Raises:
        Opaque: the recordings differ in more than sizes and mode.
    """
    (first, numbers), *others = [live(each, each.left.values()) for each in training]
    for other, _ in others:
        check_alike(first, other)
    always = bool(evaluating.left)
    trained, compared = live(training[0], training[0].left.values() if always else ())
    evaluated, _ = live(evaluating, evaluating.left.values())
    check_alike(trained, evaluated)
    flags = {(numbers.index(compared[call]), place) for call, place in flags_of(trained, evaluated)}
    return _Builder([first, *(other for other, _ in others)], flags, always=always).built()


def whole(name: str) -> fx.Graph:
    """The graph of a model that is one operator."""
    graph = fx.Graph()
    numeric, embeddings = _beginning(graph)
    node = graph.call_module(name, (numeric, embeddings))
    node.meta["operator"] = name
    graph.output(node)
    return graph


def size_of(tensor: Tensor, dim: int) -> int:
    """A size as a number that a graph can compute with."""
    return tensor.shape[dim]


class _Builder:
    def __init__(
        self, recordings: Sequence[Recording], flags: Collection[tuple[int, int]], *, always: bool
    ) -> None:
        self._recordings, self._flags, self._always = recordings, flags, always
        self._graph = fx.Graph()
        self._nodes: dict[Ref, fx.Node] = {}
        self._sizes: dict[tuple[Ref, int], fx.Node] = {}
        self._shapes: dict[Ref, list[torch.Size]] = {}
        self._names = {NUMERIC, OUTPUT}
        self._constants: dict[str, Tensor] = {}
        self._training: fx.Node | None = None
        numeric, embeddings = _beginning(self._graph)
        self._nodes |= {NetInput("numeric"): numeric, NetInput("embeddings"): embeddings}
        for ref in recordings[0].shapes:
            self._shapes[ref] = [each.shapes[ref] for each in recordings]

    def built(self) -> Built:
        first = self._recordings[0]
        for number, call in enumerate(first.calls):
            self._emit(number, call, [each.calls[number] for each in self._recordings])
        left = tuple(SideOutput(*where, self._always) for where in first.left)
        if left:
            node = self._graph.call_module(LEFT, tuple(self._node(ref) for ref in first.left.values()))
            node.meta |= {"operator": self._unique("left for loss"), "stays": True}
        if first.logits is not None:
            self._graph.output(self._node(first.logits))
        return Built(self._graph, self._constants, left)

    def _emit(self, number: int, call: Call, calls: Sequence[Call]) -> None:
        columns = [list(leaves((each.args, each.kwargs))) for each in calls]
        refs = [ref for ref in columns[0] if isinstance(ref, (NetInput, Attribute, ConstantTensor, Result))]
        resolved = []
        for place, values in enumerate(zip(*columns, strict=True)):
            if (number, place) in self._flags:
                resolved.append(self._mode(values[0]))
            elif all(value == values[0] for value in values):
                is_ref = isinstance(values[0], (NetInput, Attribute, ConstantTensor, Result))
                resolved.append(self._node(values[0]) if is_ref else values[0])
            else:
                resolved.append(self._number(call, values, refs))
        arguments = iter(resolved)
        args, kwargs = mapped((call.args, call.kwargs), lambda _: next(arguments))
        node = self._graph.create_node(f"call_{call.kind}", call.target, args, kwargs)
        node.meta["operator"] = self._named(call)
        for leaf, way in enumerate(call.ways):
            ref = Result(number, leaf)
            self._shapes[ref] = [each.shapes[leaf] for each in calls]
            if not way:
                self._nodes[ref] = node
        if call.ways != ((),):
            self._nodes[Result(number, -1)] = node

    def _node(self, ref: Ref) -> fx.Node:
        if ref in self._nodes:
            return self._nodes[ref]
        if isinstance(ref, NetInput):
            node = self._graph.call_function(read, (self._nodes[NetInput("embeddings")], ref.kind, ref.key))
            node.meta["operator"] = self._unique(f"embeddings.{ref.kind}.{ref.key}")
        elif isinstance(ref, Attribute):
            node = self._graph.create_node("get_attr", ref.name)
        elif isinstance(ref, ConstantTensor):
            node = self._constant(ref)
        else:
            node = self._nodes[Result(ref.call, -1)]
            for key in self._recordings[0].calls[ref.call].ways[ref.leaf]:
                node = self._glue(operator.getitem, node, key)
        self._nodes[ref] = node
        return node

    def _constant(self, ref: ConstantTensor) -> fx.Node:
        tensors = [each.constants[ref.number] for each in self._recordings]
        if not all(torch.equal(each, tensors[0]) for each in tensors):
            raise Opaque("", "it makes a tensor beside torch's functions, which differs from batch to batch")
        name = f"{CONSTANTS}.number_{ref.number}"
        self._constants[name] = tensors[0].detach()
        return self._graph.create_node("get_attr", name)

    def _mode(self, value: object) -> fx.Node:
        if self._training is None:
            self._training = self._graph.create_node("get_attr", "training")
        return self._training if value else self._glue(operator.not_, self._training)

    def _number(self, call: Call, values: Sequence[object], refs: Sequence[Ref]) -> fx.Node:
        """A number that differs from recording to recording, as a function of a size."""
        numbers = [value for value in values if type(value) is int]
        if len(numbers) == len(values):
            for plain in (True, False):
                for ref, dim, factor, offset in self._sizes_like(numbers, refs):
                    if not plain or (factor, abs(offset) < 2) == (1, True):
                        node = self._size(ref, dim)
                        node = node if factor == 1 else self._glue(operator.mul, node, factor)
                        return node if offset == 0 else self._glue(operator.add, node, offset)
        raise Opaque(
            call.scope, f"{word_of(call)} is given {values[0]!r} or {values[1]!r}, which follows from no size"
        )

    def _sizes_like(self, values: Sequence[int], refs: Sequence[Ref]) -> Iterator[tuple[Ref, int, int, int]]:
        for ref in dict.fromkeys((*refs, *self._shapes)):
            for dim, sizes in enumerate(zip(*self._shapes.get(ref, ()), strict=False)):
                if sizes[0] != sizes[1]:
                    factor = (values[1] - values[0]) // (sizes[1] - sizes[0])
                    offset = values[0] - factor * sizes[0]
                    if factor and all(v == factor * s + offset for v, s in zip(values, sizes, strict=True)):
                        yield ref, dim, factor, offset

    def _size(self, ref: Ref, dim: int) -> fx.Node:
        if (ref, dim) not in self._sizes:
            self._sizes[ref, dim] = self._glue(size_of, self._node(ref), dim)
            self._sizes[ref, dim].meta["is_number"] = True
        return self._sizes[ref, dim]

    def _glue(self, function: Callable[..., object], *args: Argument) -> fx.Node:
        node = self._graph.call_function(function, args)
        node.meta |= {"glue": True, "is_number": function is not operator.getitem}
        return node

    def _named(self, call: Call) -> str:
        if call.kind == "module":
            return self._unique(str(call.target))
        return self._unique(f"{call.scope}.{word_of(call)}" if call.scope else word_of(call))

    def _unique(self, name: str) -> str:
        unique, number = name, 0
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        return unique


def _beginning(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    numeric, embeddings = graph.placeholder("numeric"), graph.placeholder("embeddings")
    numeric.meta["operator"] = NUMERIC
    return numeric, embeddings
