"""Frozen options that say in their annotations what they accept, and refuse anything else as they are made."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from girih.config.sections import build, hints_of


class Options:
    """Base of frozen dataclasses, with :func:`~girih.config.sections.build` for each field, from TOML or from Python.

    Raises:
        ConfigError: a value that its annotation does not accept; names the option, the value and what is expected.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        cls: type[Any] = type(self)
        for name, hint in _hints(cls).items():  # type: ignore[arg-type]
            built = build(hint, getattr(self, name), f"{self._owner()}{name}")
            object.__setattr__(self, name, built)

    def _owner(self) -> str:
        """The beginning of options' names in errors, as in ``table 'user': dim``."""
        return ""


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = hints_of(cls)  # type: ignore[arg-type]
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
