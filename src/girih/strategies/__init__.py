"""Strategies, a page each: facts in, a plan out; from the plan, a trainer's halves, schedule and feed.

Every class with a name, ``plan`` and ``build`` in a module of this folder is a strategy by that name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from girih import config
from girih.config.user_code import load_object
from girih.errors import ConfigError, nearest
from girih.strategies.strategy import Strategy, measures_of, one_host, outlives_trainers, roles_of, runs_alone

__all__ = [
    "BY_NAME",
    "Strategy",
    "create",
    "measures_of",
    "one_host",
    "outlives_trainers",
    "roles_of",
    "runs_alone",
]


def _is_strategy(value: object) -> bool:
    return isinstance(value, type) and all(hasattr(value, member) for member in ("name", "plan", "build"))


def _pages() -> Iterator[type[Strategy]]:
    for page in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{page.name}")
        for value in vars(module).values():
            if _is_strategy(value) and value.__module__ == module.__name__:
                yield value


BY_NAME: dict[str, type[Strategy]] = {kind.name: kind for kind in _pages()}


def create(options: Any, where: str, directory: Path | None = None) -> Strategy:
    """The strategy that ``[strategy]`` describes: one of girih's, or the user's own by ``file.py:Class``.

    Args:
        directory: where a relative path starts.

    Raises:
        ConfigError: an unknown name or option, or a class that cannot be loaded.
    """
    options = {"name": options} if isinstance(options, str) else options
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} = {options!r}: expected a table of options")
    name = options.get("name", "local")
    if isinstance(name, str) and ":" in name:
        expected = "a class with name, trainers, plan and build"
        kind = load_object(name, f"{where}.name", directory, accepts=_is_strategy, expected=expected)
        rest = {key: value for key, value in options.items() if key != "name"}
        own = kind(**config.check_call(kind, rest, where, skip=0))
        if not isinstance(own, Strategy):
            raise ConfigError(f"{where}: {name} has no trainers; expected {expected}")
        return own
    if name not in BY_NAME:
        raise ConfigError(f"{where}: unknown name {name!r}{nearest(str(name), BY_NAME)}")
    built: Strategy = config.build(BY_NAME[name], options, where)
    return built
