"""A model whose training steps torch compiles, put on it from outside.

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
"""The compiler of what was traced; tests take one that is quick to compile."""
FEWEST = 2
"""Examples of a batch that is compiled: torch would trace sizes of 0 and 1 each for themselves."""


class CompiledModel(nn.Module):
    """A model that is traced in its first training step, and computed from then on by what was made of it.

    Batches of all sizes share what was made. Where ``replays``, those as large as the first one share graphs of their
    own that the device replays (CUDA graphs), unless the model reads whole sequences, whose ids are never as many.

    Args:
        replays: whether the device can, as CUDA can.
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
            ConfigError: torch cannot compile it.
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
        """Times a part of a training step; what torch compiles meanwhile is a phase of its own.

        Raises:
            ConfigError: torch cannot compile it.
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
        """Gradients of the last batch, in memory that the next one does not write to."""
        if not self._replayed:
            return list(gradients)
        return [None if gradient is None else gradient.clone() for gradient in gradients]

    def _replay(self, replayed: Callable[..., object], numeric: Tensor, embeddings: Embeddings) -> object:
        for tensor in embeddings.tensors():
            if tensor.requires_grad:  # others read its gradient while the next batch is computed
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
    """Refuses to compile for CPUs where torch would find no compiler for the C++ that it writes.

    Raises:
        ConfigError: there is none.
    """
    names = (os.environ.get("CXX"), "clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise ConfigError(
            "train: compile = true: on a CPU torch compiles C++, and finds neither g++ nor what the environment's CXX names;"
            " install one, or set train.compile = false"
        )


def _calling(module: nn.Module) -> Callable[..., object]:
    # not the module itself: as an attribute, what torch made of it would have all parameters once more
    return lambda numeric, embeddings: module(numeric, embeddings)


def _compile_seconds() -> float:
    """Seconds that this process has spent compiling so far, by torch's own count."""
    seconds: float = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
    return seconds
