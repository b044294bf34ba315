"""Tensors as arrays of a frame: any shape, any dtype that a layer gives, and None where there is no tensor.

The first array says what the others are: int64[n, 4 + dims], of each tensor the number of its dtype, that of its codec and how
many arrays it has, its number of dims, and its shape; the others are flat, or as their codec has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.messages import writable
from girih.dense.service.wire import CODECS, NUMBERS, Coders, codec_of
from girih.errors import WireError
from girih.kernels.buffers import Take

Arrays = list[NDArray[Any]]

MOST_DIMS = 8
_NONE = -1
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_CODED = (torch.float32, torch.bfloat16)
_CARRIERS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}  # which numpy, or a frame, does not know


def pack(tensors: Sequence[Tensor | None], take: Take, coders: Coders | None = None) -> Arrays:
    """Copies tensors into arrays that may be sent.

    Args:
        take: gives the arrays to fill, as those of a connection that are sent without another copy.
        coders: what writes tensors of float32 and bfloat16 that become smaller by it.

    Raises:
        WireError: a tensor of another dtype, or of more than 8 dims.
    """
    described = np.zeros((len(tensors), 4 + MOST_DIMS), np.int64)
    arrays: Arrays = [described]
    for number, (row, tensor) in enumerate(zip(described, tensors, strict=True)):
        if tensor is None:
            row[0] = _NONE
            continue
        if tensor.dtype not in _DTYPES or tensor.dim() > MOST_DIMS:
            raise WireError(
                f"a tensor {tensor.dtype}{list(tensor.shape)} cannot be sent to another process; expected at most {MOST_DIMS} dims of"
                f" {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
            )
        codec, packed = _coded(number, tensor.detach(), coders)
        packed = packed or (_filled(tensor.detach(), take),)
        row[:4] = _DTYPES.index(tensor.dtype), codec, len(packed), tensor.dim()
        row[4 : 4 + tensor.dim()] = tensor.shape
        arrays += packed
    return arrays


def unpack(arrays: Sequence[NDArray[Any]]) -> list[Tensor | None]:
    """The inverse of :func:`pack`: tensors over the memory of the arrays, which nobody else writes to."""
    described, *rest = arrays
    flat = iter(rest)
    found: list[Tensor | None] = []
    for number, codec, num_arrays, dims, *lengths in described.tolist():
        if number == _NONE:
            found.append(None)
            continue
        dtype, shape = _DTYPES[number], tuple(lengths[:dims])
        packed = tuple(islice(flat, num_arrays))
        if codec:
            found.append(torch.from_numpy(CODECS[codec].unpack(packed, shape)).to(dtype))
            continue
        tensor = torch.from_numpy(writable(packed[0]))
        found.append((tensor.view(dtype) if dtype in _CARRIERS else tensor).view(shape))
    return found


def num_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes of packed tensors."""
    return sum(array.nbytes for array in arrays)


def _coded(number: int, tensor: Tensor, coders: Coders | None) -> tuple[int, tuple[NDArray[Any], ...]]:
    """The number of the codec and its message; 0 and nothing where the tensor goes as it is."""
    if coders is None or tensor.dtype not in _CODED:
        return 0, ()
    coder = coders(number)
    codec = codec_of(coder)
    if codec.packed_bytes(tuple(tensor.shape)) >= tensor.nbytes:
        return 0, ()
    return NUMBERS[codec.name], coder.pack(tensor.float().numpy())


def _filled(tensor: Tensor, take: Take) -> NDArray[Any]:
    carried = tensor.view(_CARRIERS.get(tensor.dtype, tensor.dtype))
    array = take(str(carried.dtype).removeprefix("torch."), carried.numel())
    torch.from_numpy(array).view(carried.shape).copy_(carried)
    return array
