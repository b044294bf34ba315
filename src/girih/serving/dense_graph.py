"""``dense.json``: the network of a user's class as a list of operators, which is data and not code.

    {"inputs": 3, "parameters": [names], "buffers": [names], "nodes": [[operator, args, kwargs], ...], "output": 41}

Values are numbered: inputs, parameters, buffers, then nodes. Arguments are JSON values. A string has a prefix that says what
it stands for: ``node:7``, ``text:floor``, ``float:-inf``, ``dtype:float32``. Tensors lie in ``dense.safetensors``.

A file can only name operators that :func:`operator_named` allows. These compute a result from their arguments and do nothing
else: they open no file, write to no argument, draw no random numbers, and check all indices and shapes. Operators run once on
an example before the network serves. A size is known before memory is allocated for it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from girih.dense.graph.structures import leaves, mapped
from girih.errors import CheckpointError
from girih.models.embeddings import Embeddings
from girih.serving.program import quietly

_aten = torch.ops.aten
_UNSAFE = frozenset(
    f"aten.{name}"
    for name in (
        "_embedding_bag.default", "_fft_c2r.default", "_fft_r2c.default", "_local_scalar_dense.default",
        "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_no_training.default", "as_strided.default",
        "empty.memory_format", "empty_strided.default", "native_dropout.default", "native_group_norm.default",
        "rand.default", "randn.default", "randperm.default",
    )
)  # fmt: skip
"""Core operators that check no sizes, show memory as it was before, look at values, or draw random numbers."""
_COMPOSITE = frozenset(
    f"aten.{name}"
    for name in (
        "_prelu_kernel.default", "addcmul.default", "baddbmm.default", "batch_norm.default", "bilinear.default",
        "celu.default", "cosine_similarity.default", "einsum.default", "group_norm.default", "hardsigmoid.default",
        "hardswish.default", "index_add.default", "index_copy.default", "layer_norm.default", "linalg_vector_norm.default", "linear.default", "log_softmax.int",
        "logsumexp.default", "masked_fill.Scalar", "masked_fill.Tensor", "matmul.default", "mish.default",
        "rms_norm.default", "scaled_dot_product_attention.default", "selu.default", "silu.default", "softmax.int",
        "softplus.default", "stack.default",
    )
)  # fmt: skip
"""Operators of usual layers, which stay whole: taken apart, they are slower, or differ in their last bit."""
_MOST_ELEMENTS = 1 << 28
"""Elements of all results for the example together."""
_KINDS: dict[str, dict[str, Any]] = {
    "dtype": {
        name: getattr(torch, name)
        for name in ("bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")
    },
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name) for name in ("channels_last", "contiguous_format", "preserve_format")
    },
    "float": {str(value): value for value in (math.inf, -math.inf)} | {"nan": math.nan},
}  # fmt: skip


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of Python for sizes alone: on lists or large integers it could fill memory."""

    def compute(*numbers: Any) -> Any:
        result = function(*numbers) if all(isinstance(each, int | float) for each in numbers) else None
        if result is None or abs(result) >= 1 << 63:
            raise ValueError(f"{function.__name__} of {numbers}: expected numbers below 2^63")
        return result

    return compute


def _item(values: Sequence[Tensor], index: int) -> Any:
    """One of the results of an operator."""
    if not isinstance(values, tuple | list) or not isinstance(index, int):
        raise TypeError(f"getitem: received {type(values).__name__} and {type(index).__name__}")
    return values[index]


def _repeat(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """The operator ``repeat_interleave``, which does not check that the sum of its numbers is one."""
    if not 0 <= float(repeats.double().sum()) <= _MOST_ELEMENTS or bool((repeats < 0).any()):
        raise ValueError("repeat_interleave: expected at least 0 repeats, and not too many")
    return torch.repeat_interleave(repeats, output_size=output_size)


_NUMBERS = {
    f"operator.{function.__name__}": _on_numbers(function)
    for function in (
        operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.neg,
    )
}  # fmt: skip
_CHECKED = {**_NUMBERS, "operator.getitem": _item, "aten.repeat_interleave.Tensor": _repeat}


def operator_named(name: str) -> Callable[..., Any] | None:
    """The operator of a name, if files may name it: those of ATen that torch calls core, less a few, and a few more."""
    if name in _CHECKED:
        return _CHECKED[name]
    home, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(_aten, packet, None), overload, None) if home == "aten" else None
    return found if isinstance(found, OpOverload) and _is_allowed(found) else None


def _is_allowed(found: OpOverload) -> bool:
    name = str(found)
    if name in _UNSAFE or name.endswith("_backward.default") or found._schema.is_mutable:
        return False
    return name in _COMPOSITE or torch.Tag.core in found.tags


def described(program: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An exported program as the content of ``dense.json``, and all its tensors by name.

    Args:
        program: a ``torch.export.ExportedProgram`` of a :class:`~girih.serving.program.FlatNet`.

    Raises:
        ValueError: it has an operator that files may not name, or changes its buffers.
    """
    table = torch.export.default_decompositions()
    for each in list(table):
        if isinstance(each, OpOverload) and _is_allowed(each):
            del table[each]
    with quietly():
        program = program.run_decompositions(table)  # which makes operators in place plain ones, too
    signature, graph = program.graph_signature, program.graph
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate or len(signature.user_outputs) != 1:
        raise ValueError("its forward changes buffers or inputs, or returns more than logits")
    _restore_batch_norm(graph)
    named: dict[str, list[tuple[Any, str]]] = {"inputs": [], "parameters": [], "buffers": []}
    for node in graph.find_nodes(op="placeholder"):
        if (name := signature.inputs_to_parameters.get(node.name)) is not None:
            named["parameters"].append((node, name.partition(".")[2]))
        elif (name := signature.inputs_to_buffers.get(node.name)) is not None:
            named["buffers"].append((node, name.partition(".")[2]))
        elif (name := signature.inputs_to_lifted_tensor_constants.get(node.name)) is not None:
            named["buffers"].append((node, f"constant/{name}"))  # no module has a slash in its name
        else:
            named["inputs"].append((node, node.name))
    values = dict(program.state_dict) | dict(program.constants)
    tensors = {
        name: values[f"module.{name}" if "/" not in name else name.partition("/")[2]]
        for _, name in (*named["parameters"], *named["buffers"])
    }
    order = [node for each in named.values() for node, _ in each]
    nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_check(node.target)]
    numbers = {node: number for number, node in enumerate([*order, *nodes])}

    def written(value: Any) -> Any:
        return _written(value, numbers)

    content = {
        "inputs": len(named["inputs"]),
        "parameters": [name for _, name in named["parameters"]],
        "buffers": [name for _, name in named["buffers"]],
        "nodes": [
            [_name_of(node), mapped(node.args, written), mapped(node.kwargs, written)] for node in nodes
        ],
        "output": numbers[graph.output_node().args[0][0]],
    }
    return content, tensors


def _is_check(target: Any) -> bool:
    """Whether an operator checks sizes and returns nothing."""
    return isinstance(target, OpOverload) and not target._schema.returns


def _restore_batch_norm(graph: fx.Graph) -> None:
    """Has batch norm computed by the operator that checks sizes."""
    for node in graph.find_nodes(
        op="call_function", target=_aten._native_batch_norm_legit_no_training.default
    ):
        tensors, (momentum, eps) = node.args[:5], node.args[5:]
        for user in [each for each in node.users if each.args[1] == 0]:
            with graph.inserting_before(user):
                checked = graph.call_function(
                    _aten.batch_norm.default, (*tensors, False, momentum, eps, False)
                )
            user.replace_all_uses_with(checked)
    graph.eliminate_dead_code()


def _name_of(node: fx.Node) -> str:
    target: Any = node.target
    name = str(target) if isinstance(target, OpOverload) else f"operator.{target.__name__}"
    if operator_named(name) is None:
        raise ValueError(f"the operator {name} cannot be served")
    return name


def _written(value: Any, numbers: Mapping[Any, int]) -> Any:
    """A leaf of an operator's arguments as JSON has it."""
    if isinstance(value, fx.Node):
        return f"node:{numbers[value]}"
    if isinstance(value, str):
        return f"text:{value}"
    for kind, members in _KINDS.items():
        for name, member in members.items():
            if type(value) is type(member) and (value == member or value != value == member != member):
                return f"{kind}:{name}"
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"an argument {value!r} cannot be served")


class ProgramNet(nn.Module):
    """A model made of ``dense.json``: it stands where the module itself stood.

    It has the code of its graph, and a plain module that holds its tensors, so that copies share the code alone.
    """

    def __init__(self, code: Callable[..., Tensor], tensors: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._code, self.tensors, self._names = code, tensors, tuple(names)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        logits: Tensor = self._code(self.tensors, numeric, *embeddings.tensors())
        return logits

    def train(self, mode: bool = True) -> Self:
        """Notes the mode alone: a program computes as it was exported, in evaluation mode, and has no other."""
        self.training = mode
        return self

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes all tensors by their names in ``dense.safetensors``."""
        self.tensors.load_state_dict({f"t{n}": parameters[name] for n, name in enumerate(self._names)})


def net_of(
    text: str | bytes,
    tensors: Mapping[str, Tensor],
    example: tuple[Tensor, Embeddings],
    outputs: int,
    where: Any,
) -> ProgramNet:
    """The network that ``dense.json`` describes; tried on an example.

    Args:
        tensors: of ``dense.safetensors``. example: a batch as others will be. outputs: logits of an example.

    Raises:
        CheckpointError: damaged, or it names what no file may name; nothing was run that is not allowed.
    """
    try:
        content = json.loads(text)
        names = [*content["parameters"], *content["buffers"]]
        held = nn.Module()
        for number, name in enumerate(names):
            if number < len(content["parameters"]):
                held.register_parameter(f"t{number}", nn.Parameter(tensors[name]))
            else:
                held.register_buffer(f"t{number}", tensors[name])
        graph = _graph_of(content, len(names))
        given = (example[0], *example[1].tensors())
        with torch.no_grad():
            logits = _Trial(fx.GraphModule(held, graph)).run(*given)
        if not isinstance(logits, Tensor) or logits.dtype != torch.float32:
            raise ValueError(
                f"its output is no float32 tensor: {getattr(logits, 'dtype', type(logits).__name__)}"
            )
        if logits.shape != (len(example[0]), outputs):
            raise ValueError(
                f"its output has shape {list(logits.shape)}; expected {[len(example[0]), outputs]}"
            )
        for node in graph.find_nodes(op="call_function", target=_aten.linear.default):
            node.target = F.linear  # which :class:`~girih.dense.accel.linear.LinearBy` knows
        return ProgramNet(type(fx.GraphModule(held, graph)).forward, held, names)
    except Exception as error:  # whatever torch says of a graph that is none
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{where}: damaged: {reason}; export the model again") from None


def _graph_of(content: Mapping[str, Any], num_tensors: int) -> fx.Graph:
    """The graph of a content; names in it are ours, never the file's."""
    graph = fx.Graph()
    known = [graph.placeholder(f"input{number}") for number in range(_size(content["inputs"]))]
    known += [graph.get_attr(f"t{number}") for number in range(num_tensors)]

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        kind, _, name = value.partition(":")
        if kind == "node":
            return known[_size(int(name))]
        return name if kind == "text" else _KINDS[kind][name]

    for name, args, kwargs in content["nodes"]:
        function = operator_named(name)
        if function is None:
            raise ValueError(f"the operator {name!r} is not one that files may name")
        if (
            not isinstance(args, list)
            or not isinstance(kwargs, dict)
            or any(isinstance(each, dict) for each in args)
        ):
            raise TypeError(f"{name}: expected a list and a mapping of arguments")
        read_args, read_kwargs = mapped(tuple(args), read), mapped(kwargs, read)
        if "trunc" in leaves((read_args, read_kwargs)):  # the smallest integer by -1 ends the process
            raise ValueError(f"{name}: rounding_mode = 'trunc' is not one that files may name")
        known.append(graph.call_function(function, read_args, read_kwargs))
    graph.output(known[_size(content["output"])])
    return graph


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 20:
        raise ValueError(f"{value!r} is no number of a value")
    return value


class _Trial(fx.Interpreter):
    """Runs a graph; the shape of each result is known before it is computed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._left = _MOST_ELEMENTS

    def run_node(self, n: fx.Node) -> Any:
        """See :class:`fx.Interpreter`."""
        if n.op == "call_function" and isinstance(n.target, OpOverload):
            from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

            with FakeTensorMode() as mode:
                args, kwargs = mapped(
                    self.fetch_args_kwargs_from_env(n),
                    lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value,
                )
                try:
                    results = n.target(*args, **kwargs)
                except DynamicOutputShapeException:  # as of nonzero: no larger than its input has dimensions
                    results = ()
            self._left -= sum(each.numel() for each in leaves(results) if isinstance(each, Tensor))
            if self._left < 0:
                raise ValueError(f"results of more than {_MOST_ELEMENTS:,} elements")
        return super().run_node(n)
