"""Compiles the training steps of a model with torch, without changes to the model.

Shapes: B examples.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from girih.errors import ConfigError
from girih.models.embeddings import Embeddings
from girih.telemetry.stats import COMPILE, Spans

BACKEND: str | Callable[..., Any] = "inductor"
"""The backend of ``torch.compile``. Tests use a backend that compiles quickly."""
FEWEST = 2
"""The smallest batch that is compiled. torch would trace sizes 0 and 1 separately."""


class CompiledModel(nn.Module):
    """A model that is traced and compiled in its first training step.

    Batches of all sizes share the compiled code. With ``replays``, batches as large as the first one have separate
    graphs that the device replays (CUDA graphs). Models that read whole sequences have no such graphs, because their
    number of ids varies.

    Args:
        replays: True if the device can replay graphs, as CUDA can.
    """

    __call__: Callable[..., Any]

    def __init__(self, module: nn.Module, *, replays: bool = False) -> None:
        super().__init__()
        self.module = module
        self._of_any_size = torch.compile(_calling(module), backend=BACKEND)
        self._of_first_size: Callable[..., Any] | None = None
        if replays:
            self._of_first_size = torch.compile(
                _calling(module), backend=BACKEND, mode="reduce-overhead", dynamic=False
            )
        self._first_size: int | None = None
        self._replayed = False

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> object:
        """Returns the outputs of the model.

        Raises:
            ConfigError: torch cannot compile the model.
        """
        size = len(numeric)
        self._replayed = False
        if size < FEWEST:
            return self.module(numeric, embeddings)
        with self._explained():
            if self._of_first_size is not None and not embeddings.sequences:
                self._first_size = self._first_size or size
                self._replayed = size == self._first_size
            if self._replayed and self._of_first_size is not None:
                return self._replay(self._of_first_size, numeric, embeddings)
            for tensor in (numeric, *embeddings.tensors()):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return self._of_any_size(numeric, embeddings)

    @contextmanager
    def phase(self, name: str, spans: Spans) -> Iterator[None]:
        """Times a part of a training step. Compilation counts as a separate phase.

        Raises:
            ConfigError: torch cannot compile the model.
        """
        start, before = time.perf_counter(), _compile_seconds()
        try:
            with self._explained():
                yield
        finally:
            took, compiling = time.perf_counter() - start, _compile_seconds() - before
            if compiling:
                spans.add(COMPILE, compiling, start)
            spans.add(name, took - compiling, start + compiling)

    def kept(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of the last batch, in memory that the next batch does not overwrite."""
        if not self._replayed:
            return list(gradients)
        return [None if gradient is None else gradient.clone() for gradient in gradients]

    def _replay(self, replayed: Callable[..., object], numeric: Tensor, embeddings: Embeddings) -> object:
        for tensor in embeddings.tensors():
            if tensor.requires_grad:  # the sparse half reads this gradient while the next batch is computed
                tensor.register_hook(torch.clone)  # type: ignore[no-untyped-call]
        if numeric.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return replayed(numeric, embeddings)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = " ".join([f"{type(cause).__name__}:", *str(cause).strip().splitlines()[:1]])
            raise ConfigError(
                f"train: compile = true: torch cannot compile {type(self.module).__name__}: {reason}; set train.compile = false"
            ) from error


def require_compiler(device: torch.device) -> None:
    """Raises an error if torch finds no C++ compiler to compile for a CPU.

    Raises:
        ConfigError: there is no C++ compiler.
    """
    names = (os.environ.get("CXX"), "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise ConfigError(
            "train: compile = true: on a CPU torch compiles C++, but finds neither g++ nor the compiler that CXX names;"
            " install one, or set train.compile = false"
        )


def _calling(module: nn.Module) -> Callable[..., object]:
    # A lambda hides the compiled function, which as an attribute would list all parameters of the module again.
    return lambda numeric, embeddings: module(numeric, embeddings)


def _compile_seconds() -> float:
    """Returns the seconds that this process has spent compiling so far, as torch counts them."""
    seconds: float = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
    return seconds
