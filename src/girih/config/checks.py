"""Checks of options; each kind of value has one message.

Every function raises :class:`~girih.errors.ConfigError` with the option's name, the value received and the one
expected. Names may carry an owner, as in ``table 'users': dim``.
"""

from __future__ import annotations

import math
from typing import Any

from girih.errors import ConfigError

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def integer(name: str, value: Any, low: int = 1, high: int | None = None, *, or_none: bool = False) -> None:
    """Refuses anything but integers from ``low`` to ``high``; None stands for no upper bound."""
    if or_none and value is None:
        return
    if not _is_a(int, value) or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {_shown(high)}"
        raise ConfigError(f"{name} = {value!r}: expected an integer {bounds}")


def number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Refuses anything but finite numbers of at least ``low`` (above it, if open), below ``high``."""
    if not _is_a((int, float), value):
        raise ConfigError(f"{name} = {value!r}: expected a number")
    if not math.isfinite(value) or value < low or value >= high or (open_low and value <= low):
        bounds = f" {'>' if open_low else '≥'} {low:g}" if low > -math.inf else ""
        bounds += f" and < {high:g}" if high < math.inf else ""
        raise ConfigError(f"{name} = {value!r}: expected a finite number{bounds}")


def positive(name: str, value: Any) -> None:
    """Refuses anything but None and numbers above 0."""
    if value is not None and not (_is_a((int, float), value) and value > 0):
        raise ConfigError(f"{name} = {value!r}: expected a number above 0")


def fraction(name: str, value: Any) -> None:
    """Refuses anything but numbers in [0, 1)."""
    if not _is_a((int, float), value) or not 0 <= value < 1:
        raise ConfigError(f"{name} = {value!r}: expected a number of at least 0, below 1")


def flag(name: str, value: Any) -> None:
    """Refuses anything but booleans."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}: expected true or false")


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses anything but some words."""
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def _is_a(kind: type | tuple[type, ...], value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _shown(bound: int) -> str:
    """Large powers of two, and what is one below them, as powers: 2⁶³ - 1."""
    for power, suffix in ((bound, ""), (bound + 1, " - 1")):
        if power >= 1 << 32 and power & (power - 1) == 0:
            return "2" + str(power.bit_length() - 1).translate(_SUPERSCRIPTS) + suffix
    return str(bound)
