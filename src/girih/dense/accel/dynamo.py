"""torch's compiler, loaded only where something is compiled.

Optimizers and ``DistributedDataParallel`` import ``torch._dynamo`` to mark what it should leave alone. That takes as
long as all else of torch, and marks mean nothing to a process that compiles nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


def load_late() -> None:
    """Has marks for the compiler do nothing in this process; whatever else is asked of it loads it."""
    if NAME not in sys.modules:
        sys.modules[NAME] = _Unloaded(NAME)


class _Unloaded(ModuleType):
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # as without any setting

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break(*_: object) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # who inspects all modules asks for these
            raise AttributeError(name)
        if sys.modules[NAME] is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)
