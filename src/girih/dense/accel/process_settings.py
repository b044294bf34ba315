"""Settings of a process that trains: the C allocator, idle OpenMP threads, oneDNN's caches, torch's compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from girih.schema import Schema

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


SPINS = "GOMP_SPINCOUNT"
FEW_SPINS = 20_000
"""About 0.2 ms: longer than what lies between two of a network's layers, shorter than a look-up."""


def set_omp_spin() -> None:
    """Sets how long idle threads spin, unless the environment says it or PyTorch, which reads it, is there already."""
    if "torch" not in sys.modules and SPINS not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ[SPINS] = str(FEW_SPINS)


def spins() -> str:
    """The setting of spins in this process's environment, in words."""
    if SPINS in os.environ:
        return f"{SPINS}={os.environ[SPINS]}"
    policy = os.environ.get("OMP_WAIT_POLICY")
    return f"OMP_WAIT_POLICY={policy}" if policy else "as OpenMP has them: import girih before torch"


CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "32"}
"""Read by oneDNN and by PyTorch at the first product: a step of a DLRM of nine layers fits, which at 32 makes 18 of oneDNN's anew."""


def limit_primitive_caches(schema: Schema) -> None:
    """Sets how many primitives the caches keep where features are histories, each unless the environment says it.

    Of other features the shapes of all steps are the same. After a first product this changes nothing.
    """
    # importing girih imports this module, and files of the working directory must not hide what the schema imports
    from girih.schema import Sequence

    if Sequence in map(type, schema.features):
        os.environ.update({**CAPACITIES, **os.environ})


NAME = "torch._dynamo"
Decorated = TypeVar("Decorated", bound=Callable[..., object])


def defer_dynamo() -> None:
    """Defers the import of ``torch._dynamo``: its marks do nothing in this process until something else of it is used."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _Unloaded(NAME)


class _Unloaded(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # as without any setting

    @staticmethod
    def disable(function: Decorated, *_: object, **__: object) -> Decorated:
        return function

    @staticmethod
    def graph_break(*_: object) -> None:
        return

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # who inspects all modules asks for these
            raise AttributeError(name)
        if sys.modules[NAME] is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)
