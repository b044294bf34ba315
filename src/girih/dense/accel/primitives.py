"""oneDNN's caches of primitives, told to keep few.

Each shape that oneDNN multiplies, float32 or bfloat16, is a primitive of its own: compiled code and its descriptions, about
half a MiB. oneDNN keeps 1,024 of them and PyTorch, in each thread, another 1,024. A history's layers have a new
shape each step, whose primitives never serve again but stay between the tensors on the heap, and hold it apart.
"""

from __future__ import annotations

import os

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The variables that oneDNN and PyTorch read at the first product."""
FEW = 32
"""More than the distinct shapes of a step: those of a DLRM of nine layers are 24, in bfloat16 27. At 64 the heap grows twice as far."""


def keep_few() -> None:
    """Sets how many primitives the caches keep, each unless the environment says it; later than a first product it changes nothing."""
    for name in CAPACITIES:
        os.environ.setdefault(name, str(FEW))
