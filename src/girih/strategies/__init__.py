"""Strategies, a page each: facts in, a plan out; from the plan, a trainer's halves, schedule and feed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from girih import config
from girih.config.user_code import load_class
from girih.errors import ConfigError, nearest
from girih.strategies.asynchronous import Asynchronous
from girih.strategies.hybrid import Hybrid
from girih.strategies.local import Local
from girih.strategies.strategy import Strategy, measures_of, roles_of, runs_alone
from girih.strategies.substitution import Substitution
from girih.strategies.synchronous import Synchronous

BY_NAME: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Asynchronous, Hybrid, Local, Substitution, Synchronous)
}

__all__ = [
    "BY_NAME",
    "Asynchronous",
    "Hybrid",
    "Local",
    "Strategy",
    "Substitution",
    "Synchronous",
    "create",
    "measures_of",
    "roles_of",
    "runs_alone",
]


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
    name = options.get("name", Local.name)
    if isinstance(name, str) and ":" in name:
        kind = load_class(
            name, where, directory, accepts=_is_strategy, expected="a class with plan and build"
        )
        rest = {key: value for key, value in options.items() if key != "name"}
        own: Strategy = kind(**config.check_call(kind, rest, where, skip=0))
        return own
    if name not in BY_NAME:
        raise ConfigError(f"{where}: unknown name {name!r}{nearest(str(name), BY_NAME)}")
    built: Strategy = config.build(BY_NAME[name], options, where)
    return built


def _is_strategy(value: object) -> bool:
    return isinstance(value, type) and all(hasattr(value, member) for member in ("name", "plan", "build"))
