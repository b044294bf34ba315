"""Chooses the arithmetic of forward passes from the options and the processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from girih.dense.accel import int8, onednn

Linear = Callable[..., Tensor]
"""A replacement of ``torch.nn.functional.linear``, from [..., I], [O, I], and [O] or None, to [..., O]."""


class LinearBy(TorchFunctionMode):
    """A torch mode in which a given function replaces ``torch.nn.functional.linear``.

    A mode works with every model without changes: modules, types and state dicts stay the same. It has no effect on
    other threads, and on code outside of the ``with`` block.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return (self._linear if func is F.linear and not types else func)(*args, **(kwargs or {}))


def arithmetic(device: torch.device, *, precision: str, forward: str) -> AbstractContextManager[object]:
    """Returns a context in which this thread's forward passes use bfloat16, 8-bit layers, or faster float32 layers.

    Args:
        precision, forward: see :class:`girih.dense.half.DenseSpec`.
    """
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    if forward == "int8":
        return LinearBy(int8.linear)
    if device.type == "cpu" and onednn.pays():
        return LinearBy(onednn.linear)
    return nullcontext()
