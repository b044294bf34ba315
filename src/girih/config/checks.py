"""Checks of single values, with the messages of :func:`girih.config.sections.build`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from girih.config.bounds import Bounds, Fraction, Positive
from girih.config.sections import build


def integer(name: str, value: Any, low: int = 1, high: float = math.inf, *, or_none: bool = False) -> None:
    """Refuses anything but integers from ``low`` to ``high``, both included."""
    if not (or_none and value is None):
        build(Annotated[int, Bounds(low, high)], value, name)


def positive(name: str, value: Any) -> None:
    """Refuses anything but None and numbers above 0."""
    build(Positive | None, value, name)


def fraction(name: str, value: Any) -> None:
    """Refuses anything but numbers in [0, 1)."""
    build(Fraction, value, name)


def text(name: str, value: Any) -> None:
    """Refuses anything but strings."""
    build(str, value, name)


def flag(name: str, value: Any) -> None:
    """Refuses anything but booleans."""
    build(bool, value, name)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses anything but some words."""
    build(Literal[choices], value, name)
