"""oneDNN's caches of primitives, told to keep few.

Each shape that oneDNN multiplies, float32 or bfloat16, is a primitive of its own: compiled code and its descriptions, about
half a MiB. oneDNN keeps 1,024 of them and PyTorch, in each thread, another 1,024. A history's layers have a new
shape each step, whose primitives never serve again but stay between the tensors on the heap, and hold it apart.
"""

from __future__ import annotations

import os

CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "32"}
"""What oneDNN and PyTorch read at the first product: a step of a DLRM of nine layers fits, which at 32 makes 18 of oneDNN's anew."""


def keep_few() -> None:
    """Sets how many primitives the caches keep, each unless the environment says it; later than a first product it changes nothing."""
    for name, capacity in CAPACITIES.items():
        os.environ.setdefault(name, capacity)
