"""Formats numbers as text for people. Anything except a finite number becomes a dash."""

from __future__ import annotations

import math
from typing import TypeGuard

DASH = "–"
_STEPS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_BINARY_STEPS = ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"))


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a finite number. A bool is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fraction(value: object, digits: int = 5) -> str:
    """Formats a fraction, for example 0.98412. From a million on, 3.5e36."""
    if is_number(value) and abs(value) >= 1e6:
        return f"{value:.1e}".replace("e+", "e").replace("e0", "e")
    return f"{value:.{digits}f}" if is_number(value) else DASH


def count(value: object) -> str:
    """Formats a count, for example 5,382."""
    return f"{value:,.0f}" if is_number(value) else DASH


def short(value: object) -> str:
    """The same as :func:`count` below 10,000. Above, three digits and k, M, G or T: 53.8 k."""
    if not is_number(value):
        return DASH
    return _scaled(value, _STEPS) if abs(value) >= 1e4 else f"{value:,.0f}"


def size(value: object) -> str:
    """Formats bytes: 1.21 GiB."""
    if not is_number(value):
        return DASH
    return _scaled(value, _BINARY_STEPS) if abs(value) >= 1024 else f"{value:,.0f} B"


def percent(value: object) -> str:
    """Formats a share from 0 to 1: 97.3 %."""
    return f"{100 * value:.1f} %" if is_number(value) else DASH


def duration(seconds: object) -> str:
    """Formats seconds: 4.2 s, 3 min 05 s, 2 h 10 min."""
    if not is_number(seconds) or seconds < 0:
        return DASH
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {left:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for position, (step, suffix) in enumerate(steps):
        scaled = value / step
        if abs(scaled) >= 1:
            if abs(scaled) >= 999.5 and position:  # 999.9 k would become 1e+03 k
                return f"{value / steps[position - 1][0]:.2f}{steps[position - 1][1]}"
            digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{digits}f}{suffix}"
    return f"{value:,.0f}"
