"""The arithmetic of forward passes, as options and the processor have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from girih.dense.accel import int8, onednn

Linear = Callable[..., Tensor]
"""``torch.nn.functional.linear`` by other means: [..., I], [O, I] and [O] or None to [..., O]."""


class LinearBy(TorchFunctionMode):
    """While entered, ``torch.nn.functional.linear`` is computed by a function.

    A mode reaches every model as it is: its modules, their types and state dicts stay what they were, and
    nothing changes for other threads or outside of the ``with``.
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
    """While entered, this thread's forward passes compute in bfloat16, with 8-bit layers, or by the faster float32 ones.

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
