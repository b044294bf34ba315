"""Numbers as text for people; a dash for anything that is not a finite number."""

from __future__ import annotations

import math
from typing import TypeGuard

DASH = "–"
_STEPS = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_BINARY_STEPS = ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def fraction(value: object, digits: int = 5) -> str:
    """For example 0.98412; from a million on 3.5e36."""
    if is_number(value) and abs(value) >= 1e6:
        return f"{value:.1e}".replace("e+", "e").replace("e0", "e")
    return f"{value:.{digits}f}" if is_number(value) else DASH


def count(value: object) -> str:
    """For example 5,382."""
    return f"{value:,.0f}" if is_number(value) else DASH


def short(value: object) -> str:
    """Below 10,000 like :func:`count`; else three digits and k, M, G or T: 53.8 k."""
    if not is_number(value):
        return DASH
    return _scaled(value, _STEPS) if abs(value) >= 1e4 else f"{value:,.0f}"


def size(value: object) -> str:
    """Bytes: 1.21 GiB."""
    if not is_number(value):
        return DASH
    return _scaled(value, _BINARY_STEPS) if abs(value) >= 1024 else f"{value:,.0f} B"


def percent(value: object) -> str:
    """A share from 0 to 1: 97.3 %."""
    return f"{100 * value:.1f} %" if is_number(value) else DASH


def duration(seconds: object) -> str:
    """4.2 s, 3 min 05 s, 2 h 10 min."""
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
            if abs(scaled) >= 999.5 and position:  # 999.9 k would read as 1e+03 k
                return f"{value / steps[position - 1][0]:.2f}{steps[position - 1][1]}"
            digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2
            return f"{scaled:.{digits}f}{suffix}"
    return f"{value:,.0f}"
