"""Checks of single values, with the messages of :func:`girih.config.sections.build`."""

from __future__ import annotations

from typing import Any, Literal

from girih.config.bounds import Count, Fraction, Positive
from girih.config.sections import build


def integer(name: str, value: Any, *, or_none: bool = False) -> None:
    """Refuses anything but integers of at least 1."""
    build(Count | None if or_none else Count, value, name)


def positive(name: str, value: Any) -> None:
    """Refuses anything but None and numbers above 0."""
    build(Positive | None, value, name)


def fraction(name: str, value: Any) -> None:
    """Refuses anything but numbers in [0, 1)."""
    build(Fraction, value, name)


def flag(name: str, value: Any) -> None:
    """Refuses anything but booleans."""
    build(bool, value, name)


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses anything but some words."""
    build(Literal[choices], value, name)
