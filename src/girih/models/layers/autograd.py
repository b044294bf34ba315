"""The context that torch passes to the static methods of an ``autograd.Function``, with the parts that girih uses."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Context(Protocol):
    """See ``torch.autograd.function.FunctionCtx``. Functions that keep more declare it in a subclass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
