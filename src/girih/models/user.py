"""Models of the user's own, by ``path/to/file.py:Class`` or ``package.module:Class``."""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn

from girih.config import user_code
from girih.schema import Schema


def load_class(name: str, where: str, directory: Path | None = None) -> type[nn.Module]:
    """The model that ``file.py:Class`` or ``package.module:Class`` names; see ``user_code.load_class``."""
    return user_code.load_class(
        name, where, directory, accepts=_is_model, expected="a class derived from torch.nn.Module"
    )


def takes_schema(cls: type[nn.Module]) -> bool:
    """Whether the constructor's first parameter is the schema: called so, or annotated so."""
    try:
        first = next(iter(inspect.signature(cls).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.name == "schema" or first.annotation in (Schema, "Schema", "girih.Schema")


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)
