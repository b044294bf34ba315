"""The dense half as a separate program, for ``dense.json`` and ``dense.onnx``: a model exported by ``torch.export``.

A program takes ``numeric`` and each tensor of the embeddings, and returns logits:

    numeric          float32 [B, X]
    pooled.<i>       float32 [B, F, D]   the features in the signature's ``features``, in this order
    first_order.<i>  float32 [B, F, 1]
    values.<name>    float32 [L, D]      the vectors of all ids of a sequence that is read whole
    offsets.<name>   int64 [B + 1]       the start of each example's vectors

Shapes: B examples, X numeric features, T labels.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from girih.models.embeddings import Block, Embeddings, Jagged

MODULE = "module"
"""The name of the only child of a FlatNet."""
POOLED, FIRST_ORDER, VALUES, OFFSETS = "pooled", "first_order", "values", "offsets"
_LENGTH = len


class InputTensor(TypedDict):
    """A tensor after ``numeric``."""

    name: str
    features: list[str]


Inputs = Sequence[InputTensor]


class FlatNet(nn.Module):
    """A model that takes each tensor of the embeddings separately, and returns logits, float32[B, T].

    Args:
        inputs: as :func:`inputs_of` describes them.
    """

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.module = module
        self._inputs = inputs
        self._logits: Callable[[Tensor], Tensor] | None = getattr(module, "logits", None)

    def forward(self, numeric: Tensor, *tensors: Tensor) -> Tensor:
        """Returns logits, float32[B, T], from the tensors that the module's docstring lists."""
        outputs: Tensor = self.module(numeric, embeddings_of(tensors, self._inputs))
        return outputs if self._logits is None else self._logits(outputs)


def inputs_of(embeddings: Embeddings) -> list[InputTensor]:
    """Describes the tensors of some embeddings, in the order of :meth:`~girih.models.embeddings.Embeddings.tensors`."""
    inputs: list[InputTensor] = [
        {"name": f"{kind}.{number}", "features": list(block.features)}
        for kind, blocks in ((POOLED, embeddings.blocks), (FIRST_ORDER, embeddings.first_order))
        for number, block in enumerate(blocks)
    ]
    for name in embeddings.sequences:
        inputs += [{"name": f"{kind}.{name}", "features": [name]} for kind in (VALUES, OFFSETS)]
    return inputs


def embeddings_of(tensors: Sequence[Tensor], inputs: Inputs) -> Embeddings:
    """Reverses :meth:`~girih.models.embeddings.Embeddings.tensors`."""
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


def export_program(module: nn.Module, numeric: Tensor, embeddings: Embeddings) -> ExportedProgram:
    """Returns a model as a ``torch.export.ExportedProgram``, for batches of any size.

    Args:
        module: in evaluation mode. numeric, embeddings: an example batch, packed like later batches.

    Raises:
        Exception: torch cannot follow the model.
    """
    net, tensors = FlatNet(module, inputs_of(embeddings)), embeddings.tensors()
    batch = torch.export.Dim("batch", min=1)
    shapes: list[dict[int, object]] = []
    for described in inputs_of(embeddings):
        kind = described["name"].partition(".")[0]
        sizes = {VALUES: torch.export.Dim(f"ids_of_{len(shapes)}"), OFFSETS: batch + 1}
        shapes.append({0: sizes.get(kind, batch)})
    with torch.no_grad(), quietly():
        try:
            builtins.len = _length
            return torch.export.export(
                net,
                (numeric, *tensors),
                dynamic_shapes={"numeric": {0: batch}, "tensors": tuple(shapes)},
                strict=False,
            )
        finally:
            builtins.len = _LENGTH


def _length(value: Sized) -> int:
    """A ``len`` that torch can trace. Python's ``len`` would make the size a constant, and so fix the batch size."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else _LENGTH(value)


def missing_for_onnx() -> str | None:
    """Returns the missing package for ONNX; None if all are installed."""
    return next((name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None), None)


def write_onnx(program: ExportedProgram, inputs: Inputs, path: Path) -> None:
    """Writes an exported program as ONNX, with named inputs and the output ``logits``.

    Raises:
        Exception: the converter failed.
    """
    names = ["numeric", *(described["name"] for described in inputs)]
    with quietly():
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
def quietly() -> Iterator[None]:
    """Silences the messages of torch about its internals."""
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
