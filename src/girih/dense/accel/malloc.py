"""The C library's allocator, told that a step will soon want again what it just gave back."""

from __future__ import annotations

import ctypes
import functools

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT_BYTES = 1 << 30
LARGEST_KEPT_BYTES = 1 << 25  # glibc takes no more


@functools.cache
def keep_freed_memory() -> None:
    """From now on up to 1 GiB that this process frees stays with it, tensors up to 32 MiB among it.

    Otherwise every step's activations are fresh pages, which the kernel has to find and to clear: thousands of
    page faults a step. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
