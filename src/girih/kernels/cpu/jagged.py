"""Bags between offsets.

Shapes: R bags of a column, M values in all of them.
"""

from __future__ import annotations

from typing import Any

from girih.kernels.cpu.jit import njit


@njit
def copy_tails(values: Any, offsets: Any, short_offsets: Any, out: Any) -> None:
    """Copies the last values of each bag, as many as ``short_offsets`` leaves room for: T[M], int64[R+1] twice."""
    for row in range(len(offsets) - 1):
        begin = short_offsets[row]
        size = short_offsets[row + 1] - begin
        source = offsets[row + 1] - size
        for i in range(size):
            out[begin + i] = values[source + i]
