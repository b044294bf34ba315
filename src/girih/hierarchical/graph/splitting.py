"""Cuts fully connected layers into parts that servers compute in parallel (HT §4.1).

Shapes: B examples, I inputs and O outputs of a layer, k servers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import Argument

from girih.errors import ConfigError, nearest
from girih.hierarchical.graph.operator_costs import operator_graph
from girih.hierarchical.graph.runnable import RunnableGraph, named_by
from girih.hierarchical.graph.tracing import CutParameter, TracedNet, net_of
from girih.planner.operators import ELEMENTWISE as BY_ELEMENT

ELEMENTWISE = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Dropout, nn.Identity)  # fmt: skip
ELEMENTWISE_NAMES = frozenset(
    {"relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "sigmoid", "tanh", "softplus", "dropout"}
)


def split_fc(traced: TracedNet, num_servers: int, layers: Collection[str] | None = None) -> TracedNet:
    """Cuts fully connected layers into a part for each server.

    Vertical cuts split weight rows, y = [W_1 x, …, W_k x] + b. Horizontal cuts split weight columns, y = W_1 x_1 + … +
    W_k x_k + b. A layer is cut along its longer side: vertically if O ≥ I.

    Some pairs of layers have only an elementwise activation between them, with O > I in the first layer and I > O in
    the second. The first is then cut vertically and the second horizontally at the same places. So the activations
    between them stay on their server.

    Results are equal up to the order of summation. Dropout between the layers draws different numbers.

    Args:
        layers: operators to cut. By default, layers with more than half of a server's even share of all parameters,
            because whole layers of that size do not spread evenly.

    Returns:
        The same model. Copies of the parts replace each cut parameter: see ``splits``.

    Raises:
        ConfigError: ``num_servers`` is below 1, or an operator is not a fully connected layer.
    """
    if num_servers < 1:
        raise ConfigError(f"num_servers = {num_servers}: expected at least 1")
    graph = copy.deepcopy(traced.net.graph)
    by_name = {each.name: each for each in _layers(traced.net, graph)}
    for name in layers or ():
        if name not in by_name:
            raise ConfigError(f"layers: {name!r} is no fully connected layer{nearest(name, by_name)}")
    share = sum(each.numel() for each in traced.net.parameters()) / num_servers
    wanted = [
        name
        for name in by_name
        if (by_name[name].weight.numel() > share / 2 if layers is None else name in layers)
    ]
    if num_servers == 1 or not wanted:
        return traced
    cutter = _Cutter(graph, num_servers)
    pending = [by_name[name] for name in wanted]
    while pending:
        first = pending.pop(0)
        between, second = _second(traced.net, first, pending)
        if second is not None:
            pending.remove(second)
            cutter.together(first, between, second)
        elif len(first.weight) >= first.weight.shape[1]:
            cutter.vertically(first)
        else:
            cutter.horizontally(first)
    objects = traced.net.objects() | cutter.objects
    net = net_of(traced.model, traced.left, {name: objects[name] for name in named_by(graph)}, graph)
    operators = replace(operator_graph(net, traced.example), cut=(*traced.graph.cut, *wanted))
    return replace(traced, net=net, graph=operators, splits=(*traced.splits, *cutter.splits))


def split_as(asked: bool | str, traced: TracedNet, num_servers: int, optimizer: str) -> TracedNet:
    """Cuts the fully connected layers of a net according to ``strategy.split_fc``.

    Args:
        asked: True cuts all of them. "auto" cuts the layers that :func:`split_fc` chooses, unless the optimizer needs
            them whole.
        optimizer: the name of its class.
    """
    if asked is False or (asked == "auto" and optimizer not in BY_ELEMENT):
        return traced
    return split_fc(traced, num_servers, None if asked == "auto" else fc_layers(traced))


def fc_layers(traced: TracedNet) -> list[str]:
    """The operators that :func:`split_fc` can cut."""
    return [each.name for each in _layers(traced.net, traced.net.graph) if max(each.weight.shape) > 1]


@dataclass(frozen=True, eq=False)
class _Layer:
    """A fully connected layer: operator, node, weight [O, I], bias [O], their names, and the prefix of parts' names."""

    name: str
    node: fx.Node
    weight: Tensor
    bias: Tensor | None
    names: tuple[str, str]
    parts: str

    @property
    def x(self) -> Argument:
        """The current input of the layer in the graph."""
        return self.node.args[0]


class _Cutter:
    """Rewrites a graph."""

    def __init__(self, graph: fx.Graph, num_servers: int) -> None:
        self.graph, self.num_servers = graph, num_servers
        self.objects: dict[str, nn.Module] = {}
        self.splits: list[CutParameter] = []

    def vertically(self, layer: _Layer) -> None:
        """Splits weight rows. The outputs are concatenated."""
        sizes = self._sizes(len(layer.weight))
        names = self._parts(layer, sizes, dim=0)
        with self.graph.inserting_before(layer.node):
            parts = [self._linear(layer, names[number], layer.x, number) for number in range(len(sizes))]
            whole = self._function(torch.cat, (parts, -1), f"{layer.name}.cat")
        self._replace(layer.node, whole)

    def horizontally(self, layer: _Layer) -> None:
        """Splits weight columns. The outputs are summed."""
        sizes = self._sizes(layer.weight.shape[1])
        names = self._parts(layer, sizes, dim=1)
        with self.graph.inserting_before(layer.node):
            parts = []
            for number, (begin, end) in enumerate(_bounds(sizes)):
                x = self._function(
                    torch.narrow, (layer.x, -1, begin, end - begin), f"{layer.name}.narrow_{number}"
                )
                parts.append(self._linear(layer, names[number], x, number))
            whole = self._sum(layer, parts)
        self._replace(layer.node, whole)

    def together(self, first: _Layer, between: Sequence[fx.Node], second: _Layer) -> None:
        """Splits the first layer's rows and the second layer's columns at the same places."""
        sizes = self._sizes(len(first.weight))
        rows, columns = self._parts(first, sizes, dim=0), self._parts(second, sizes, dim=1)
        with self.graph.inserting_before(second.node):
            parts = []
            for number in range(len(sizes)):
                x, before = self._linear(first, rows[number], first.x, number), first.node
                for each in between:
                    others = {before: x}
                    part = self.graph.node_copy(each, lambda node, others=others: others.get(node, node))  # type: ignore[misc]
                    part.meta["operator"] = f"{each.meta['operator']}.part_{number}"
                    x, before = part, each
                parts.append(self._linear(second, columns[number], x, number))
            whole = self._sum(second, parts)
        self._replace(second.node, whole)
        for each in (*reversed(between), first.node):
            self.graph.erase_node(each)

    def _sizes(self, width: int) -> list[int]:
        return [len(each) for each in torch.arange(width).tensor_split(min(self.num_servers, width))]

    def _parts(self, layer: _Layer, sizes: list[int], dim: int) -> list[str]:
        """Makes the linear layers that replace a layer."""
        names = [f"{layer.parts}{number}" for number in range(len(sizes))]
        weights = layer.weight.detach().split(sizes, dim)  # type: ignore[no-untyped-call]
        biases: Any = [None] * len(sizes)
        if layer.bias is not None:
            biases = layer.bias.detach().split(sizes) if dim == 0 else [layer.bias.detach(), *biases[1:]]  # type: ignore[no-untyped-call]
            owners = names if dim == 0 else names[:1]
            of_bias = sizes if dim == 0 else [len(layer.bias)]
            self.splits.append(
                CutParameter(layer.names[1], 0, tuple(f"{each}.bias" for each in owners), tuple(of_bias))
            )
        self.splits.append(
            CutParameter(layer.names[0], dim, tuple(f"{each}.weight" for each in names), tuple(sizes))
        )
        for name, weight, bias in zip(names, weights, biases, strict=True):
            self.objects[name] = _linear_of(weight, bias, layer.weight.requires_grad)
        return names

    def _linear(self, layer: _Layer, target: str, x: Argument, number: int) -> fx.Node:
        node = self.graph.create_node("call_module", target, (x,))
        node.meta["operator"] = f"{layer.name}.part_{number}"
        return node

    def _function(self, function: Callable[..., Tensor], args: tuple[Argument, ...], name: str) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta["operator"] = name
        return node

    def _sum(self, layer: _Layer, parts: Sequence[fx.Node]) -> fx.Node:
        total = parts[0]
        for number, part in enumerate(parts[1:], start=1):
            total = self._function(torch.add, (total, part), f"{layer.name}.add_{number}")
        return total

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        node.replace_all_uses_with(other)
        named = [each for each in node.all_input_nodes if each.op == "get_attr"]
        self.graph.erase_node(node)
        for each in named:
            if not each.users:
                self.graph.erase_node(each)


def _layers(net: RunnableGraph, graph: fx.Graph) -> Iterator[_Layer]:
    """Finds linear modules and ``F.linear`` calls that no other operator shares parameters with."""
    readers = _num_readers(net, graph)
    for node in graph.nodes:
        if node.op == "call_module":
            module = net.get_submodule(str(node.target))
            if type(module) is nn.Linear and all(readers[each] == 1 for each in module.parameters()):
                names = f"{node.target}.weight", f"{node.target}.bias"
                yield _Layer(
                    node.meta["operator"], node, module.weight, module.bias, names, f"{node.target}.part_"
                )
        if node.op == "call_function" and node.target is F.linear and not node.kwargs:
            _, *parameters = (*node.args, None)[:3]
            weight, bias = (_parameter(net, each, readers) for each in parameters)
            if weight is not None and (parameters[1] is None or bias is not None):
                names = str(parameters[0].target), str(getattr(parameters[1], "target", ""))
                yield _Layer(node.meta["operator"], node, weight, bias, names, f"{names[0]}_part_")


def _parameter(net: RunnableGraph, node: object, readers: Counter[nn.Parameter]) -> nn.Parameter | None:
    """The parameter that a node names, if only one operator reads it."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = net.objects()[str(node.target)]
    return value if isinstance(value, nn.Parameter) and readers[value] == 1 else None


def _num_readers(net: RunnableGraph, graph: fx.Graph) -> Counter[nn.Parameter]:
    """Counts the operators that read each parameter, under any name."""
    readers: Counter[nn.Parameter] = Counter()
    for node in graph.nodes:
        if node.op == "call_module":
            readers.update(net.get_submodule(str(node.target)).parameters())
        elif isinstance(value := net.objects().get(str(node.target)), nn.Parameter):
            readers[value] += len(node.users)
    return readers


def _second(
    net: RunnableGraph, first: _Layer, layers: Sequence[_Layer]
) -> tuple[list[fx.Node], _Layer | None]:
    """Finds the layer to cut together with another layer, and the nodes between them."""
    between: list[fx.Node] = []
    node, by_node = first.node, {each.node: each for each in layers}
    if len(first.weight) > first.weight.shape[1]:
        while len(node.users) == 1:
            node = next(iter(node.users))
            second = by_node.get(node)
            if second is not None:
                outputs, inputs = second.weight.shape
                return (between, second) if inputs > outputs else ([], None)
            if not _is_elementwise(net, node):
                break
            between.append(node)
    return [], None


def _is_elementwise(net: RunnableGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(net.get_submodule(str(node.target))) in ELEMENTWISE
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return (
        name in ELEMENTWISE_NAMES
        and len([each for each in node.all_input_nodes if each.op != "get_attr"]) == 1
    )


def _linear_of(weight: Tensor, bias: Tensor | None, requires_grad: bool) -> nn.Linear:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), requires_grad)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad)
    return linear


def _bounds(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return pairwise(ends)
