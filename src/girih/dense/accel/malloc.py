"""The C library's allocator, told that a step will soon want again what it just gave back."""

from __future__ import annotations

import ctypes
import functools

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
KEPT_BYTES = 1 << 30


@functools.cache
def keep_freed_memory() -> None:
    """From now on up to 1 GiB that this process frees stays with it, large tensors among it.

    Otherwise every step's activations are fresh pages, which the kernel has to find and to clear: thousands of
    page faults per step. No tensor gets a mapping of its own, since that is given back whenever it is freed, and
    the size from which on tensors get one cannot be set above 32 MiB. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_MMAP_MAX, 0)
