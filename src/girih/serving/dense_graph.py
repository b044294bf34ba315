"""``dense.json``: the network of a user's class, as a list of operators. The file is data, not code.

    {"inputs": 3, "tensors": [names], "parameters": 4, "nodes": [[operator, args, kwargs], ...], "output": 41}

All values have numbers. Inputs come first, then the parameters and the other tensors of ``dense.safetensors``, then
nodes. Arguments are JSON values. A string has a prefix for its meaning: ``node:7``, ``text:tanh``,
``is:torch.float32``, ``is:-inf``.

A file can only name operators that :func:`operator_named` allows. These only compute a result from their arguments.
They open no file, write to no argument, draw no random numbers, and check all indices and shapes. They run once on an
example before the network serves. The size of each result is known before memory is allocated for it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram

from girih.errors import CheckpointError
from girih.files.sealed import parse
from girih.hierarchical.graph.runnable import leaves, mapped
from girih.models.embeddings import Embeddings
from girih.serving.program import MODULE, quietly

_UNSAFE = frozenset(
    {
        "_embedding_bag.default", "_fft_c2r.default", "_fft_r2c.default", "_local_scalar_dense.default",
        "_native_batch_norm_legit.no_stats", "as_strided.default", "empty.memory_format", "empty_strided.default",
        "native_dropout.default", "native_group_norm.default", "rand.default", "randn.default", "randperm.default",
    }
)  # fmt: skip
"""Core operators that no file may name. They check no sizes, expose uninitialized memory, read values, or draw random
numbers.
"""
_COMPOSITE = frozenset(
    {
        "_prelu_kernel.default", "addcmul.default", "baddbmm.default", "batch_norm.default", "bilinear.default",
        "bucketize.Tensor", "celu.default", "cosine_similarity.default", "einsum.default", "group_norm.default",
        "hardsigmoid.default", "hardswish.default", "index_add.default", "index_copy.default", "layer_norm.default",
        "linalg_vector_norm.default", "linear.default", "log_softmax.int", "logsumexp.default", "masked_fill.Scalar",
        "masked_fill.Tensor", "matmul.default", "mish.default", "rms_norm.default", "scaled_dot_product_attention.default",
        "selu.default", "silu.default", "softmax.int", "softplus.default", "stack.default", "tril_indices.default",
        "triu_indices.default", "unfold.default",
    }
)  # fmt: skip
"""Operators of usual layers that stay whole. Their parts would be slower, or would differ in the last bit."""
_WORDS: Mapping[str, object] = {
    str(value): value
    for value in (
        torch.bfloat16, torch.bool, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.uint8, torch.device("cpu"), torch.strided, torch.channels_last, torch.contiguous_format,
        torch.preserve_format, math.inf, -math.inf, math.nan,
    )
}  # fmt: skip
"""Arguments that JSON cannot hold."""
_MOST_ELEMENTS = 1 << 28
"""The maximum number of elements in all results together, for the example."""


def _on_numbers(function: Callable[..., float]) -> Callable[..., float]:
    """Restricts a Python operator to sizes. With lists or large integers, it could fill the memory."""

    def compute(*numbers: object) -> float:
        result = function(*numbers) if all(isinstance(each, int | float) for each in numbers) else None
        if result is None or abs(result) >= 1 << 63:
            raise ValueError(f"{function.__name__}: expected numbers below 2^63")
        return result

    return compute


def _item(values: Sequence[Tensor], index: int) -> Tensor:
    """Returns one result of an operator."""
    return {number: each for number, each in enumerate(values) if isinstance(each, Tensor)}[index]


def _repeat(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Checks the numbers, then runs ``repeat_interleave``.

    Without the check, it accepts numbers whose sum overflows an integer.
    """
    if not 0 <= float(repeats.double().sum()) <= _MOST_ELEMENTS or bool((repeats < 0).any()):
        raise ValueError("repeat_interleave: expected repeats of at least 0, and fewer of them")
    return torch.repeat_interleave(repeats, output_size=output_size)


def _batch_norm(
    values: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *rates: float
) -> tuple[Tensor]:
    """Runs batch norm in evaluation mode. The function that it calls checks sizes."""
    return (F.batch_norm(values, mean, var, weight, bias, False, *rates),)


_CHECKED: dict[str, Callable[..., object]] = {
    "operator.add": _on_numbers(operator.add),
    "operator.sub": _on_numbers(operator.sub),
    "operator.mul": _on_numbers(operator.mul),
    "operator.neg": _on_numbers(operator.neg),
    "operator.mod": _on_numbers(operator.mod),
    "operator.floordiv": _on_numbers(operator.floordiv),
    "operator.truediv": _on_numbers(operator.truediv),
    "operator.sym_float": _on_numbers(float),
    "operator.getitem": _item,
    "aten.repeat_interleave.Tensor": _repeat,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
}
"""Operators that need a check before they run."""


def operator_named(name: str) -> Callable[..., object] | None:
    """Returns the operator of a name, if files may name it: most of torch's core ATen operators, and a few others."""
    if name in _CHECKED:
        return _CHECKED[name]
    home, *rest = name.split(".")
    if home != "aten" or len(rest) != 2:
        return None
    found = getattr(getattr(torch.ops.aten, rest[0], None), rest[1], None)
    return found if isinstance(found, OpOverload) and _is_allowed(found) else None


def _is_allowed(operator: OpOverload) -> bool:
    name = str(operator).removeprefix("aten.")
    if name in _UNSAFE or name.endswith("_backward.default") or operator._schema.is_mutable:
        return False
    return name in _COMPOSITE or torch.Tag.core in operator.tags


def described(program: ExportedProgram) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Returns an exported program as the content of ``dense.json``, and its tensors by name.

    Args:
        program: a ``torch.export.ExportedProgram`` of a :class:`~girih.serving.program.FlatNet`.

    Raises:
        ValueError: the program has an operator that files may not name, or changes its buffers.
    """
    table = torch.export.default_decompositions()
    for each in [each for each in table if isinstance(each, OpOverload) and _is_allowed(each)]:
        del table[each]
    with quietly():
        program = program.run_decompositions(table)  # this also makes in-place operators functional
    signature, graph = program.graph_signature, program.graph
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate or len(signature.user_outputs) != 1:
        raise ValueError("its forward changes buffers or inputs, or returns more than logits")
    for node in reversed(graph.nodes):
        if isinstance(node.target, OpOverload) and not node.target._schema.returns:
            graph.erase_node(node)  # such an operator only checks sizes
    graph.eliminate_dead_code()
    parameters, placeholders = signature.inputs_to_parameters, graph.find_nodes(op="placeholder")
    names = parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    inputs = [node for node in placeholders if node.name not in names]
    held = [node for node in placeholders if node.name in names]  # parameters come first
    values = {**program.state_dict, **program.constants}
    tensors = {names[node.name].removeprefix(f"{MODULE}."): values[names[node.name]] for node in held}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    numbers = {node: number for number, node in enumerate([*inputs, *held, *calls])}

    def written(value: object) -> object:
        if isinstance(value, fx.Node):
            return f"node:{numbers[value]}"
        if isinstance(value, str):
            return f"text:{value}"
        if (word := str(value)) in _WORDS:
            return f"is:{word}"
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(f"an argument {value!r} cannot be served")

    content = {
        "inputs": len(inputs),
        "tensors": list(tensors),
        "parameters": len(parameters),
        "nodes": [
            [_name_of(node.target), mapped(node.args, written), mapped(node.kwargs, written)]
            for node in calls
        ],
        "output": numbers[graph.output_node().args[0][0]],
    }
    return content, tensors


def _name_of(target: Callable[..., object] | str) -> str:
    name = str(target) if isinstance(target, OpOverload | str) else f"operator.{target.__name__}"
    if operator_named(name) is None:
        raise ValueError(f"the operator {name} cannot be served")
    return name


class ProgramNet(nn.Module):
    """A model made from ``dense.json``, which replaces the exported module.

    It has the code of the graph. A plain module holds the tensors. So copies share the code, but not the tensors.
    """

    def __init__(self, code: Callable[..., Tensor], tensors: nn.Module) -> None:
        super().__init__()
        self._code, self.tensors = code, tensors

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Computes logits, float32[B, T], from numbers, float32[B, X], and embeddings."""
        logits: Tensor = self._code(self.tensors, numeric, *embeddings.tensors())
        return logits


def net_of(
    text: str | bytes,
    tensors: Mapping[str, Tensor],
    example: tuple[Tensor, Embeddings],
    outputs: int,
    where: object,
) -> ProgramNet:
    """Returns the network that ``dense.json`` describes, after a trial on an example.

    Args:
        tensors: from ``dense.safetensors``. example: a batch like later batches. outputs: number of logits.

    Raises:
        CheckpointError: the file is damaged, or names an operator that no file may name. No such operator has run.
    """
    try:
        content = parse(text)
        held = nn.Module()
        for number, name in enumerate(content["tensors"]):
            kind = nn.Parameter if number < content["parameters"] else nn.Buffer
            setattr(held, f"t{number}", kind(tensors[name]))
        inputs = example[0], *example[1].tensors()
        if content["inputs"] != len(inputs):  # checked before any nodes are made
            raise ValueError(f"it has {content['inputs']!r} inputs; expected {len(inputs)}")
        graph = _graph_of(content)
        with torch.no_grad():  # the trial runs before the graph becomes code
            logits = _Trial(held, graph=graph).run(*inputs)
        found, expected = (logits.dtype, tuple(logits.shape)), (torch.float32, (len(example[0]), outputs))
        if found != expected:
            raise ValueError(f"its output is {found}; expected {expected}")
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            node.target = F.linear  # :class:`~girih.dense.accel.arithmetic.LinearBy` recognizes this function
        return ProgramNet(type(fx.GraphModule(held, graph)).forward, held)
    except Exception as error:  # torch may raise anything on an invalid graph
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(f"{where}: damaged: {reason}; export the model again") from None


def _graph_of(content: Mapping[str, Any]) -> fx.Graph:
    """Builds the graph that a file describes.

    Torch turns it into code, so all names in it come from girih, never from the file.
    """
    graph = fx.Graph()
    known = dict(enumerate(graph.placeholder(f"input{number}") for number in range(content["inputs"])))
    for number in range(len(content["tensors"])):
        known[len(known)] = graph.get_attr(f"t{number}")

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        kind, _, name = value.partition(":")
        return known[int(name)] if kind == "node" else {"text": {name: name}, "is": _WORDS}[kind][name]

    for name, args, kwargs in content["nodes"]:
        function = operator_named(name)
        if function is None:
            raise ValueError(f"the operator {name!r} is not one that files may name")
        if not all(key.isidentifier() for key in kwargs):
            raise ValueError(f"{name}: {list(kwargs)!r} are not names of arguments")
        arguments = mapped((tuple(args), kwargs), read)
        if "trunc" in leaves(arguments):  # the smallest integer divided by -1 ends the process
            raise ValueError(f"{name}: rounding_mode = 'trunc' is not one that files may name")
        known[len(known)] = graph.call_function(function, *arguments)
    graph.output(known[content["output"]])
    return graph


class _Trial(fx.Interpreter):
    """Runs a graph, and checks the shape of each result before it is computed."""

    _left = _MOST_ELEMENTS

    def run_node(self, n: fx.Node) -> object:
        """See :class:`fx.Interpreter`."""
        if isinstance(n.target, OpOverload):
            from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

            with FakeTensorMode() as mode:
                args, kwargs = mapped(
                    self.fetch_args_kwargs_from_env(n),
                    lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value,
                )
                try:
                    results = n.target(*args, **kwargs)
                except DynamicOutputShapeException:  # as nonzero: its result is small
                    results = ()
            self._left -= sum(each.numel() for each in leaves(results) if isinstance(each, Tensor))
            if self._left < 0:
                raise ValueError(f"results of more than {_MOST_ELEMENTS:,} elements")
        return super().run_node(n)
