"""The interface of codecs of activations and of their gradients (HT §4.2).

A message is one array. How many bytes it becomes follows from its shape alone, so that a cost model knows it before
anything runs, and whoever receives it what to expect.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import WireError

Shape = tuple[int, ...]
Arrays = tuple[NDArray[Any], ...]


class Codec(Protocol):
    """Packs float32 arrays of any shape, and unpacks them elsewhere.

    A message in which a number is not finite arrives with one that is not, so that the step is refused there too.
    """

    @property
    def name(self) -> str: ...

    def pack(self, values: NDArray[np.float32]) -> Arrays:
        """A message, as arrays that a frame carries; they may be views of ``values``."""
        ...

    def unpack(self, arrays: Arrays, shape: Shape) -> NDArray[np.float32]:
        """The array of a message.

        Raises:
            WireError: the arrays are no message of that shape.
        """
        ...

    def packed_bytes(self, shape: Shape) -> int:
        """Bytes of the arrays of a message."""
        ...


def flat(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """All numbers in C order, float32[n]; a view where that serves."""
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def expect(name: str, arrays: Arrays, *expected: tuple[DTypeLike, Shape]) -> None:
    """Refuses what are not arrays of these dtypes and shapes."""
    found = [(array.dtype, array.shape) for array in arrays]
    if found != [(np.dtype(dtype), shape) for dtype, shape in expected]:
        came, wanted = (
            [f"{np.dtype(dtype)}{list(shape)}" for dtype, shape in each] for each in (found, expected)
        )
        raise WireError(f"a message by {name}: {', '.join(came) or 'nothing'}; expected {', '.join(wanted)}")


def rows_of(shape: Shape) -> Shape:
    """R and D: rows of the last dimension, and their numbers; (0, 0) where there are none."""
    num_values, dim = math.prod(shape), shape[-1] if shape else 1
    return (num_values // dim, dim) if num_values else (0, 0)
