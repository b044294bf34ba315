"""A graph that runs as a module, and can be sent to other processes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import fx, nn
from torch.fx.node import _get_qualified_name, map_aggregate

from girih.config.user_code import is_found_by_others


def leaves(value: object) -> Iterator[object]:
    """All items in tuples, lists, dicts and slices, in order."""
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def mapped(value: object, function: Callable[[object], object]) -> Any:
    """Replaces each leaf of a structure by the function's result, in the order of :func:`leaves`."""
    arguments: Any = value
    return map_aggregate(arguments, function)  # type: ignore[arg-type]


CONSTANTS = "_constants"
"""The name of the module that holds a model's constant tensors, which are neither parameters nor buffers."""
Objects = Mapping[str, object]
"""Modules, parameters and buffers, by their names in a graph."""


@dataclass(frozen=True, slots=True)
class _Named:
    """A node in the arguments of another node, or a function, by name."""

    name: str


PlainNode = tuple[str, str, str | _Named, object, object, dict[str, object]]
"""A node as plain values: name, kind, target, arguments, keyword arguments and ``meta``."""


class RunnableGraph(fx.GraphModule):
    """The module of a graph over a model's tensors. Parameters keep their objects and names.

    In contrast to ``fx.GraphModule``, it is pickled node by node and its code is not traced again. A copy keeps its
    class.

    Args:
        objects: the objects that the graph's nodes name.
    """

    def __init__(self, objects: Objects, graph: fx.Graph) -> None:
        super().__init__(dict(objects), graph)
        if CONSTANTS in self._modules:
            constants = self.get_submodule(CONSTANTS)
            constants._non_persistent_buffers_set |= constants._buffers.keys()

    def __reduce__(self) -> tuple[object, ...]:
        return _loaded, (self.state(), nodes_of(self.graph))

    def __deepcopy__(self, memo: dict[int, object]) -> RunnableGraph:
        return _loaded(copy.deepcopy(self.state(), memo), nodes_of(self.graph))

    def objects(self) -> dict[str, object]:
        """Returns the objects that the graph's nodes name."""
        return {name: attrgetter(name)(self) for name in named_by(self.graph)}

    def state(self) -> dict[str, object]:
        """Everything except the graph."""
        without = (
            "_graph",
            "_code",
            "_lineno_map",
            "_prologue_start",
            "_tracer_cls",
            "_tracer_extras",
            "meta",
        )
        return {key: value for key, value in self.__dict__.items() if key not in without}


def attribute_of(net: nn.Module, node: fx.Node) -> object:
    """The module, parameter or buffer that a node names."""
    value: object = attrgetter(str(node.target))(net)
    return value


def named_by(graph: fx.Graph) -> list[str]:
    """The modules, parameters and buffers that a graph's nodes name."""
    names = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
    return list(dict.fromkeys(names))


def nodes_of(graph: fx.Graph) -> list[PlainNode]:
    """Turns a graph into plain values."""

    def plain(value: object) -> object:
        return _Named(value.name) if isinstance(value, fx.Node) else value

    return [
        (
            node.name,
            node.op,
            _Named(_get_qualified_name(node.target)) if callable(node.target) else node.target,
            mapped(node.args, plain),
            mapped(node.kwargs, plain),
            dict(node.meta),
        )
        for node in graph.nodes
    ]


def resolved(name: str) -> object:
    """Finds a function by its qualified name. Returns None if it does not exist."""
    if name == "getattr":
        return getattr
    owner, _, last = name.rpartition(".")
    while owner:
        try:
            target: Any = importlib.import_module(owner)
        except ImportError:
            owner, _, middle = owner.rpartition(".")
            last = f"{middle}.{last}"
            continue
        for each in last.split("."):
            target = getattr(target, each, None)
        return target
    return None


def _loaded(state: Mapping[str, object], nodes: Sequence[PlainNode]) -> RunnableGraph:
    graph, known = fx.Graph(), dict[str, fx.Node]()

    def node_of(value: object) -> object:
        return known[value.name] if isinstance(value, _Named) else value

    for name, op, target, args, kwargs, meta in nodes:
        function: Any = resolved(target.name) if isinstance(target, _Named) else target
        node = graph.create_node(op, function, mapped(args, node_of), mapped(kwargs, node_of), name)
        node.meta.update(meta)
        known[name] = node
    net = RunnableGraph.__new__(RunnableGraph)
    nn.Module.__init__(net)
    net.__dict__.update(state)
    net.meta, net._tracer_cls, net._tracer_extras = {}, None, {}
    net.graph = graph
    return net


def is_importable(target: type | Callable[..., object]) -> bool:
    """Returns whether another process can import a class or a function by its name."""
    name = (
        f"{target.__module__}.{target.__qualname__}"
        if isinstance(target, type)
        else _get_qualified_name(target)
    )
    home = name.partition(".")[0]
    if target is getattr:
        return True
    try:
        return home != "__main__" and is_found_by_others(home) and resolved(name) is target
    except (ImportError, ValueError):
        return False
