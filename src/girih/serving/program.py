"""The dense half as a program of its own: what ``torch.export`` makes of a model, and the same as ONNX.

Both take ``numeric`` and the tensors of the embeddings one by one, and give logits:

    numeric          float32 [B, X]
    pooled.<i>       float32 [B, F, D]   the features in the signature's ``features``, in this order
    first_order.<i>  float32 [B, F, 1]
    values.<name>    float32 [L, D]      the vectors of all ids of a sequence that is read whole
    offsets.<name>   int64 [B + 1]       where each example's begin

Shapes: B examples, X numeric features, T labels.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.models.embeddings import Block, Embeddings, Jagged

POOLED, FIRST_ORDER, VALUES, OFFSETS = "pooled", "first_order", "values", "offsets"
_MODULE = "module"  # the name of a FlatNet's one child
Inputs = Sequence[Mapping[str, Any]]
"""``{"name", "features"}`` of each tensor behind ``numeric``."""


class FlatNet(nn.Module):
    """A model that takes the tensors of embeddings one by one, and gives logits, float32[B, T].

    Args:
        inputs: as :func:`inputs_of` describes them.
    """

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs
        self._logits: Callable[[Tensor], Tensor] | None = getattr(module, "logits", None)

    def forward(self, numeric: Tensor, *tensors: Tensor) -> Tensor:
        """See the module."""
        outputs: Tensor = self.module(numeric, embeddings_of(tensors, self._inputs))
        return outputs if self._logits is None else self._logits(outputs)


class ProgramNet(nn.Module):
    """A model made of an exported program: it stands where the module itself stood.

    It has the program's code, and modules of its own that hold its tensors, so that copies have no part of what torch knows of programs.
    """

    def __init__(self, program: torch.fx.GraphModule) -> None:
        super().__init__()
        self._code: Callable[..., Sequence[Tensor]] = type(program).forward
        self.program = _tensors_in(program)

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """float32[B, X] and embeddings to logits float32[B, T]."""
        (logits,) = self._code(self.program, numeric, *embeddings.tensors())
        return logits

    def train(self, mode: bool = True) -> Self:
        """Notes the mode alone: a program computes as it was exported, in evaluation mode, and has no other."""
        self.training = mode
        return self

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Takes the parameters and buffers of the module by their names there; the program may have left some out."""
        known = self.program.state_dict()
        named = {f"{_MODULE}.{name}": tensor for name, tensor in parameters.items()}
        self.program.load_state_dict({name: tensor for name, tensor in named.items() if name in known})


def inputs_of(embeddings: Embeddings) -> list[dict[str, Any]]:
    """Describes the tensors of some embeddings, in the order of :meth:`~girih.models.embeddings.Embeddings.tensors`."""
    found = [
        {"name": f"{kind}.{number}", "features": list(block.features)}
        for kind, blocks in ((POOLED, embeddings.blocks), (FIRST_ORDER, embeddings.first_order))
        for number, block in enumerate(blocks)
    ]
    for name in embeddings.sequences:
        found += [{"name": f"{kind}.{name}", "features": [name]} for kind in (VALUES, OFFSETS)]
    return found


def embeddings_of(tensors: Sequence[Tensor], inputs: Inputs) -> Embeddings:
    """The inverse of :meth:`~girih.models.embeddings.Embeddings.tensors`."""
    blocks: dict[str, list[Block]] = {POOLED: [], FIRST_ORDER: []}
    sequences: dict[str, Jagged] = {}
    pairs = list(zip(tensors, inputs, strict=True))
    for tensor, described in pairs:
        kind, _, _ = described["name"].partition(".")
        if kind in blocks:
            blocks[kind].append(Block(tuple(described["features"]), tensor))
    for (values, described), (offsets, _) in pairwise(pairs):
        if described["name"].startswith(f"{VALUES}."):
            sequences[described["features"][0]] = Jagged(values, offsets)
    return Embeddings(tuple(blocks[POOLED]), sequences, tuple(blocks[FIRST_ORDER]))


def export_program(module: nn.Module, numeric: Tensor, embeddings: Embeddings) -> Any:
    """A model as a ``torch.export.ExportedProgram``, for batches of any size.

    Args:
        module: in evaluation mode. numeric, embeddings: an example batch, packed as others will be.

    Raises:
        Exception: whatever torch cannot follow, or a program that computes other logits than the model does.
    """
    net, tensors = FlatNet(module, inputs_of(embeddings)), embeddings.tensors()
    batch = torch.export.Dim("batch", min=1)
    shapes: list[dict[int, Any]] = []
    for described in inputs_of(embeddings):
        kind = described["name"].partition(".")[0]
        sizes = {VALUES: torch.export.Dim(f"ids_of_{len(shapes)}"), OFFSETS: batch + 1}
        shapes.append({0: sizes.get(kind, batch)})
    with torch.no_grad(), _quietly():
        program = torch.export.export(
            net,
            (numeric, *tensors),
            dynamic_shapes={"numeric": {0: batch}, "tensors": tuple(shapes)},
            strict=False,
        )
        found, expected = program.module()(numeric, *tensors), net(numeric, *tensors)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return program


def load_program(path: Path) -> ProgramNet:
    """The program in a file; its linear layers are computed as those of modules are.

    What torch checks of each batch, and how it packs arguments, is left out: batches are such as it was exported for.
    """
    with _quietly():
        loaded: Any = torch.export.load(path).module(check_guards=False)
    for node in loaded.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default:
            node.target = F.linear  # which :class:`~girih.dense.accel.linear.LinearBy` knows
    loaded.graph.set_codegen(torch.fx.graph.CodeGen())
    loaded.recompile()
    return ProgramNet(loaded)


def _tensors_in(module: nn.Module) -> nn.Module:
    """A plain module with the tensors of another one under their names."""
    found = nn.Module()
    found._parameters.update(module._parameters)
    found._buffers.update(module._buffers)
    found._non_persistent_buffers_set |= module._non_persistent_buffers_set
    for name, value in vars(module).items():
        if isinstance(value, Tensor):  # a constant
            setattr(found, name, value)
    for name, child in module.named_children():
        found.add_module(name, child if isinstance(child, torch.fx.GraphModule) else _tensors_in(child))
    return found


def missing_for_onnx() -> str | None:
    """The package without which no ONNX can be written; None where all are there."""
    return next((name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None), None)


def write_onnx(program: Any, inputs: Inputs, path: Path) -> None:
    """Writes an exported program as ONNX, its inputs and its output, ``logits``, by name.

    Raises:
        Exception: whatever the converter cannot follow.
    """
    names = ["numeric", *(described["name"] for described in inputs)]
    with _quietly():
        torch.onnx.export(
            program,
            f=str(path),
            input_names=names,
            output_names=["logits"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps to itself what torch says of its own workings on the way."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            redirect_stderr(io.StringIO()),
        ):  # it prints graphs that it cannot follow
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
