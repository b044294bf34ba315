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

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h
KEPT_BYTES = 1 << 30


@functools.cache
def keep_freed_memory() -> None:
    """Makes this process keep up to 1 GiB of freed memory, including large tensors.

    Otherwise the activations of every step are in new pages. The kernel must find and clear these pages, with thousands
    of page faults per step. Tensors must not get separate mappings, because free() returns a mapping to the system
    immediately. So mappings are disabled, because their size limit cannot be set above 32 MiB. Does nothing if the C
    library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(M_MMAP_MAX, 0)


SPINS = "GOMP_SPINCOUNT"
FEW_SPINS = 20_000
"""About 0.2 ms. This is longer than the time between two layers of a network, and shorter than a lookup."""


def set_omp_spin() -> None:
    """Sets the time for which idle OpenMP threads spin. Does nothing if the environment already sets this time.

    PyTorch reads the setting, so this function also does nothing if PyTorch is already imported.
    """
    if "torch" not in sys.modules and SPINS not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        os.environ[SPINS] = str(FEW_SPINS)


def spins() -> str:
    """Describes the spin setting in this process's environment."""
    if SPINS in os.environ:
        return f"{SPINS}={os.environ[SPINS]}"
    policy = os.environ.get("OMP_WAIT_POLICY")
    return f"OMP_WAIT_POLICY={policy}" if policy else "as OpenMP has them: import girih before torch"


CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "32"}
"""The cache sizes that oneDNN and PyTorch read at the first matrix product.

A step of a DLRM with nine layers fits. With 32 entries, oneDNN would create 18 primitives again in each step.
"""


def limit_primitive_caches(schema: Schema) -> None:
    """Sets the number of primitives in the caches if some features are histories. The environment takes precedence.

    With other features, all steps have the same shapes. A call after the first product has no effect.
    """
    # Imported in this function, because importing girih imports this module, and files of the working directory must
    # not hide imports of the schema.
    from girih.schema import Sequence

    if Sequence in map(type, schema.features):
        os.environ.update({**CAPACITIES, **os.environ})


NAME = "torch._dynamo"
Decorated = TypeVar("Decorated", bound=Callable[..., object])


def defer_dynamo() -> None:
    """Defers the import of ``torch._dynamo``. Its decorators do nothing until this process uses another part of it."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _Unloaded(NAME)


class _Unloaded(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default

    @staticmethod
    def disable(function: Decorated, *_: object, **__: object) -> Decorated:
        return function

    @staticmethod
    def graph_break(*_: object) -> None:
        return

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__path__":  # tools that inspect all modules ask for these
            raise AttributeError(name)
        if sys.modules[NAME] is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)
