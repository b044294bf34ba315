"""Tensors as arrays of a frame: any shape, any dtype that a layer gives, and None where there is no tensor.

The first array says what the others are: int64[n, 2 + dims], of each tensor the number of its dtype, its number of dims,
and its shape; the others are flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.errors import WireError
from girih.kernels.buffers import Take

Arrays = list[NDArray[Any]]

MOST_DIMS = 8
_NONE = -1
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_CARRIERS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # which numpy, or a frame, does not know


def pack(tensors: Sequence[Tensor | None], take: Take) -> Arrays:
    """Copies tensors into arrays that may be sent.

    Args:
        take: gives the arrays to fill, as those of a connection that are sent without another copy.

    Raises:
        WireError: a tensor of another dtype, or of more than 8 dims.
    """
    described = np.zeros((len(tensors), 2 + MOST_DIMS), np.int64)
    arrays: Arrays = [described]
    for row, tensor in zip(described, tensors, strict=True):
        if tensor is None:
            row[0] = _NONE
            continue
        if tensor.dtype not in _DTYPES or tensor.dim() > MOST_DIMS:
            raise WireError(
                f"a tensor {tensor.dtype}{list(tensor.shape)} goes to no other process; expected at most {MOST_DIMS} dims of"
                f" {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
            )
        row[0], row[1] = _DTYPES.index(tensor.dtype), tensor.dim()
        row[2 : 2 + tensor.dim()] = tensor.shape
        arrays.append(_filled(tensor.detach(), take))
    return arrays


def unpack(arrays: Sequence[NDArray[Any]]) -> list[Tensor | None]:
    """The inverse of :func:`pack`: tensors over the memory of the arrays, which nobody else writes to."""
    described, *rest = arrays
    flat = iter(rest)
    found: list[Tensor | None] = []
    for number, dims, *shape in described.tolist():
        if number == _NONE:
            found.append(None)
            continue
        dtype = _DTYPES[number]
        tensor = torch.from_numpy(_writable(next(flat)))
        found.append((tensor.view(dtype) if dtype in _CARRIERS else tensor).view(shape[:dims]))
    return found


def num_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes of packed tensors."""
    return sum(array.nbytes for array in arrays)


def _filled(tensor: Tensor, take: Take) -> NDArray[Any]:
    carried = tensor.view(_CARRIERS.get(tensor.dtype, tensor.dtype))
    array = take(str(carried.dtype).removeprefix("torch."), carried.numel())
    torch.from_numpy(array).view(carried.shape).copy_(carried)
    return array


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as an array that may be written, as torch wants it: what comes over a wire is this process's alone."""
    return np.asarray(_Writable(array)) if not array.flags.writeable else array


class _Writable:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
