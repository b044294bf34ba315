"""The arithmetic of forward passes, as options and the processor have it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from girih.dense.accel import int8, onednn
from girih.dense.accel.linear import LinearBy


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
