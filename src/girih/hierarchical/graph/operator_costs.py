"""Facts of a net's operators: floating-point operations, bytes, parameters, and use of random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.dropout import _DropoutNd

from girih.hierarchical.graph.batches import isolated, read
from girih.hierarchical.graph.building import OUTPUT, word_of
from girih.hierarchical.graph.runnable import RunnableGraph, attribute_of, is_importable, leaves
from girih.models.embeddings import Embeddings
from girih.planner.operators import DisjointSets, Edge, Operator, OperatorGraph

FORWARD_AND_BACKWARD = 3
"""Each matrix product is computed three times: for the output, and for the gradients of both factors."""


def operator_graph(net: RunnableGraph, example: tuple[Tensor, Embeddings]) -> OperatorGraph:
    """Returns the operators of a net and the tensors between them, per example of a batch.

    Matrix products are counted as in ``torch.utils.flop_counter``, three times for forward and backward. An operator
    without matrix products counts one operation for each number of its output, also three times. ``numeric``, each
    tensor of embeddings that is read, and "logits" are operators on trainers, so that transfers to and from them count
    too.
    """
    num_examples = max(1, len(example[0]))
    measured = _Measured(copy.deepcopy(net))  # a copy, because the run moves running moments
    with isolated(example[0].device), torch.no_grad():
        measured.run(*example)
    owners = owners_of(net)
    counted: set[int] = set()
    operators, edges = [], []
    for node in net.graph.nodes:
        name = name_of(node)
        if name is None:
            continue
        uncounted = {id(each): each for each in parameters_at(net, node) if id(each) not in counted}
        counted |= uncounted.keys()
        operators.append(
            Operator(
                name=name,
                kind=_kind(net, node),
                module=owners.get(node, ""),
                flops_per_example=measured.flops.get(node.name, 0.0) * FORWARD_AND_BACKWARD / num_examples,
                parameter_bytes=sum(each.nbytes for each in uncounted.values()),
                output_bytes_per_example=0.0
                if node.op == "output"
                else measured.num_bytes[node.name] / num_examples,
                movable=is_movable(net, node),
            )
        )
        edges += [
            Edge(
                producer=producer,
                consumer=name,
                bytes_per_example=measured.num_bytes[value.name] / num_examples,
                rows_per_example=measured.num_rows[value.name] / num_examples,
                number_bytes=measured.number_bytes[value.name],
            )
            for producer, value in _read(node)
        ]
    return OperatorGraph(operators=tuple(operators), edges=tuple(edges))


def name_of(node: fx.Node) -> str | None:
    """Returns the operator name of a node, or None if the node only passes on tensors of other nodes."""
    return OUTPUT if node.op == "output" else node.meta.get("operator")


def is_movable(net: RunnableGraph, node: fx.Node) -> bool:
    """Returns whether an operator can run on a server."""
    if node.op in ("placeholder", "output") or node.meta.get("stays"):
        return False
    if any(each.op == "placeholder" and each.target == "embeddings" for each in node.all_input_nodes):
        return False
    needed: list[Any] = [type(each) for each in _containers((node.args, node.kwargs))]
    if node.op == "call_module":
        needed += [type(each) for each in net.get_submodule(str(node.target)).modules()]
    if callable(node.target):
        needed.append(node.target)
    return all(map(is_importable, needed))


def free_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend only on parameters and constants, not on the batch. They are copied to their readers."""
    free: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (
            inputs and node.op in ("call_function", "call_method") and free.issuperset(inputs)
        ):
            free.add(node)
    return free


def parameters_at(net: RunnableGraph, node: fx.Node) -> Iterator[nn.Parameter]:
    """Parameters that a node names directly."""
    if node.op == "call_module":
        yield from net.get_submodule(str(node.target)).parameters()
    for each in node.all_input_nodes:
        if each.op == "get_attr":
            value = attribute_of(net, each)
            if isinstance(value, nn.Parameter):
                yield value


def owners_of(net: RunnableGraph) -> dict[fx.Node, str]:
    """Maps each operator to the module whose parameters it uses, directly or through free nodes.

    Modules count as one if one operator uses parameters of all of them, or if they share a parameter.
    """
    names: dict[int, str] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name.rpartition(".")[0] or name)
    sets = DisjointSets(names.values())
    free, used = free_nodes(net.graph), dict[fx.Node, set[str]]()
    for node in net.graph.nodes:
        owners = {names[id(each)] for each in parameters_at(net, node)}
        if node.op == "get_attr":
            value = attribute_of(net, node)
            owners = {names[id(value)]} if id(value) in names else set()
        owners = owners.union(*(used[each] for each in node.all_input_nodes if each in free))
        used[node] = owners
        for name in owners:
            first, second = sorted(
                (sets.root(name), sets.root(min(owners))), key=lambda each: (len(each), each)
            )
            sets.join(first, second)
    return {node: sets.root(min(owners)) for node, owners in used.items() if owners}


class _Measured(fx.Interpreter):
    """Runs a net and records operations and bytes of each node."""

    def __init__(self, net: RunnableGraph) -> None:
        super().__init__(net)
        self.flops: dict[str, float] = {}
        self.num_bytes: dict[str, int] = {}
        self.num_rows: dict[str, int] = {}  # without tensors whose only dimension is the batch
        self.number_bytes: dict[str, int] = {}  # 0 if no codec applies

    def run_node(self, n: fx.Node) -> object:
        """Runs a node."""
        from torch.utils.flop_counter import FlopCounterMode  # late, because it loads triton if present

        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        tensors = [each for each in leaves(result) if isinstance(each, Tensor)]
        self.num_bytes[n.name] = sum(each.nbytes for each in tensors)
        self.num_rows[n.name] = sum(
            each.numel() // max(1, each.shape[-1]) for each in tensors if each.dim() > 1
        )
        coded = {each.dtype for each in tensors} in ({torch.float32}, {torch.bfloat16})
        self.number_bytes[n.name] = tensors[0].itemsize if coded else 0
        if n.op.startswith("call") and n.target is not read:
            self.flops[n.name] = counter.get_total_flops() or sum(each.numel() for each in tensors)
        return result


def _read(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Operators whose tensors a node reads, each with the value read."""
    for value in node.all_input_nodes:
        producer = value
        while producer.meta.get("glue") and producer.all_input_nodes:
            producer = producer.all_input_nodes[0]
        name = name_of(producer)
        if name is not None and node.target is not read:
            yield name, value


def _kind(net: RunnableGraph, node: fx.Node) -> str:
    if node.op == "call_module":
        return type(net.get_submodule(str(node.target))).__name__
    if node.op in ("placeholder", "output"):
        return {"placeholder": "input"}.get(node.op, node.op)
    if node.target is read:
        return "input"
    return word_of(node)


def _containers(value: object) -> Iterator[object]:
    """Named tuples, which the other process has to know."""
    if isinstance(value, (tuple, list, dict)):
        if hasattr(value, "_fields"):
            yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)


FUNCTIONS = ("dropout", "gumbel", "fractional_max_pool", "rand", "uniform_", "normal_", "lowrank", "lobpcg")
"""Parts of the names of torch's Python functions that draw random numbers. Operators that draw have a tag."""
ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions that draw random numbers if their ``dropout_p`` is not 0, with the position of this argument."""
MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
KNOWN = ("torch", "girih")
"""Packages that draw random numbers only in the functions above and in dropout modules."""
PLAIN = ("operator", "_operator", "builtins", "math", "aten", "prims")
"""Python's own functions and namespaces of torch's operators."""


def draws(part: fx.GraphModule) -> bool:
    """Returns whether a part may draw random numbers: by dropout, directly, or in user code, which is unknown."""
    return any(_draws(part, node) for node in part.graph.nodes)


def _draws(part: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(_module_draws(each) for each in part.get_submodule(str(node.target)).modules())
    if node.op not in ("call_function", "call_method"):
        return False
    if callable(node.target) and _package(node.target) not in (*KNOWN, *PLAIN):
        return True
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    name = name.partition(".")[0]  # an operator's name includes its overload
    if name in ATTENTION:
        place = ATTENTION[name]
        probability = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(probability, (int, float)) or probability > 0
    return any(each in name for each in FUNCTIONS) or _is_seeded(name)


def _package(function: Callable[..., object]) -> str:
    """The package of a function. Built-in functions without a package belong to torch."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).partition(".")[0]  # the name starts with the namespace
    return (getattr(function, "__module__", None) or "torch").partition(".")[0]


@cache
def _is_seeded(name: str) -> bool:
    """Returns whether torch marks one of its operators as drawing random numbers."""
    operator = getattr(torch.ops.aten, name, None)
    if not isinstance(operator, OpOverloadPacket):
        return False
    names: list[str] = operator.overloads()  # type: ignore[no-untyped-call]
    overloads = (getattr(operator, name) for name in names)
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _module_draws(module: nn.Module) -> bool:
    if type(module).__module__.partition(".")[0] not in KNOWN:
        return True
    if isinstance(module, _DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0.0)  # attention and recurrent layers have this attribute
    return isinstance(module, MODULES) or (isinstance(dropout, float) and dropout > 0)
