"""Checks of single values, with the messages of :func:`girih.config.sections.build`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from girih.config.bounds import Bounds, Fraction, Positive
from girih.config.sections import Redirecting, build, hint_for, hints_of
from girih.errors import ConfigError


def integer(name: str, value: object, low: int = 1, high: float = math.inf, *, or_none: bool = False) -> None:
    """Refuses anything but integers from ``low`` to ``high``, both included."""
    if not (or_none and value is None):
        build(Annotated[int, Bounds(low, high)], value, name)


def positive(name: str, value: object) -> None:
    """Refuses anything but None and numbers above 0."""
    build(Positive | None, value, name)


def fraction(name: str, value: object) -> None:
    """Refuses anything but numbers in [0, 1)."""
    build(Fraction, value, name)


def text(name: str, value: object) -> None:
    """Refuses anything but strings."""
    build(str, value, name)


def flag(name: str, value: object) -> None:
    """Refuses anything but booleans."""
    build(bool, value, name)


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses anything but some words."""
    build(Literal[choices], value, name)


class Options(Redirecting):
    """Base of frozen dataclasses, with :func:`~girih.config.sections.build` for each field, from TOML or from Python.

    Raises:
        ConfigError: a value that its annotation does not accept; names the option, the value and what is expected. Also an
            option that the class does not have, and one without its name.
    """

    __slots__ = ()

    def __new__(cls, *given: object, **options: object) -> Self:
        """Refuses what ``__init__`` does not take, before Python does in its own words."""
        signature = _signature(cls)  # type: ignore[arg-type]
        try:
            signature.bind_partial(None, *given, **options)
        except TypeError:
            _refuse_unknown(cls, given, options, list(signature.parameters)[1:])
        if options:  # none are given where a copy is made
            _refuse_missing(cls, options, signature)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, hint in _hints(cls).items():
            built = build(hint, getattr(self, name), f"{self._owner()}{name}")
            object.__setattr__(self, name, built)

    def _owner(self) -> str:
        """The beginning of options' names in errors, as in ``table 'user': dim``."""
        return ""


def _refuse_unknown(
    cls: type, positional: tuple[object, ...], options: Mapping[str, object], known: list[str]
) -> None:
    for option in options:
        if option not in known:
            raise ConfigError(f"{cls.__name__}: unknown option {option!r}{hint_for(cls, option, known)}")
    if positional:
        value = repr(positional[0]) if isinstance(positional[0], str | int | float) else "..."
        mend = f"write {cls.__name__}({known[0]}={value})" if known else "it has none"
        raise ConfigError(f"{cls.__name__}({value}): options have names here; {mend}")


def _refuse_missing(cls: type, options: Mapping[str, object], signature: inspect.Signature) -> None:
    for name, parameter in list(signature.parameters.items())[1:]:
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and name not in options:
            raise ConfigError(
                f"{cls.__name__}: option {name!r} is missing; write {cls.__name__}({name}=..., ...)"
            )


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls.__init__)  # type: ignore[misc]


@functools.cache
def _hints(cls: type) -> dict[str, object]:
    hints = hints_of(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}
