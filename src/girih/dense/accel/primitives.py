"""oneDNN's caches of primitives, told to keep few.

Each shape that oneDNN multiplies, float32 or bfloat16, is a primitive of its own: compiled code and its descriptions, about
half a MiB. oneDNN keeps 1,024 of them and PyTorch, in each thread, another 1,024. A history's layers have a new
shape each step, whose primitives never serve again but stay between the tensors on the heap, and hold it apart.
"""

from __future__ import annotations

import os

from girih.schema import Schema, Sequence

CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "32"}
"""Read by oneDNN and by PyTorch at the first product: a step of a DLRM of nine layers fits, which at 32 makes 18 of oneDNN's anew."""


def keep_few(schema: Schema) -> None:
    """Sets how many primitives the caches keep where features are histories, each unless the environment says it.

    Of other features the shapes of all steps are the same. After a first product this changes nothing.
    """
    if not any(isinstance(feature, Sequence) for feature in schema.features):
        return
    for name, capacity in CAPACITIES.items():
        os.environ.setdefault(name, capacity)
