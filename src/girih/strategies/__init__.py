"""The strategies, with one module each. ``plan`` makes a plan from facts; ``build`` makes the session from the plan.

Each subclass of :class:`~girih.strategies.strategy.StrategyOptions` in this folder that has a name is available by that name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Union

from girih import config
from girih.config.user_code import load_object
from girih.errors import ConfigError
from girih.strategies.strategy import Capabilities, Strategy, StrategyOptions

__all__ = ["BY_NAME", "Capabilities", "Strategy", "create"]


def _pages() -> Iterator[type[StrategyOptions]]:
    for page in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{page.name}")
        for value in vars(module).values():
            is_ours = isinstance(value, type) and issubclass(value, StrategyOptions)
            if is_ours and value.name and value.__module__ == module.__name__:
                yield value


BY_NAME: dict[str, type[StrategyOptions]] = {kind.name: kind for kind in _pages()}

_HINTS: dict[str, str] = {}
"""Option → the strategies that have it, for errors of other strategies."""
for _name, _kind in BY_NAME.items():
    for _option in config.sections.fields_of(_kind):
        _HINTS[_option] = f"{_HINTS.get(_option, 'strategies with it:')} {_name}"
_HINTS["tau"] = f"τ is the option 'staleness'; {_HINTS['staleness']}"
_HINTS["trainers"] += "; hierarchical: set groups, trainers_per_group and servers_per_group"
StrategyOptions.misplaced_options = _HINTS


def create(options: object, where: str, directory: Path | None = None) -> Strategy:
    """Makes the strategy that ``[strategy]`` describes: one of girih's, or your own by ``file.py:Class``.

    Args:
        directory: the base of relative paths.

    Raises:
        ConfigError: an unknown name or option, or a class that cannot be loaded or is not a strategy.
    """
    options = {"name": options} if isinstance(options, str) else options
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} = {options!r}: expected a table of options")
    name = options.get("name", "local")
    if isinstance(name, str) and ":" in name:
        expected = "a subclass of girih.strategies.Strategy, with name, plan and build"
        kind: type[Strategy] = load_object(
            name,
            f"{where}.name",
            directory,
            accepts=lambda value: isinstance(value, type) and issubclass(value, Strategy),
            expected=expected,
        )
        missing = sorted(kind.__abstractmethods__) + ([] if kind.name else ["name"])
        if missing:
            raise ConfigError(f"{where}.name = {name!r}: {kind.__name__} has no {' and no '.join(missing)}")
        own_options = {key: value for key, value in options.items() if key != "name"}
        return kind(**config.check_call(kind, own_options, where, skip=0))
    built: Strategy = config.build(Union[tuple(BY_NAME.values())], {"name": name, **options}, where)  # noqa: UP007
    return built
