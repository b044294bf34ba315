"""Bounds of numbers, as annotations of options: ``lr: Annotated[float, Bounds(0)]``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Accepts finite numbers from ``low`` to ``high``, both included unless open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether a number is finite and within the bounds."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return (isinstance(value, int) or math.isfinite(value)) and above and below

    def text(self, kind: type) -> str:
        """Returns the accepted numbers, for errors: "an integer from 1 to 256", "a finite number ≥ 0 and < 1"."""
        if kind is int:
            return f"an integer {'of at least' if self.high == math.inf else 'from'} {_shown(self.low)}" + (
                "" if self.high == math.inf else f" to {_shown(self.high)}"
            )
        ends = [f"{'>' if self.open_low else '≥'} {self.low:g}"] if self.low > -math.inf else []
        ends += [f"{'<' if self.open_high else '≤'} {self.high:g}"] if self.high < math.inf else []
        return " ".join(["a finite number", " and ".join(ends)]).rstrip()


Count = Annotated[int, Bounds(1)]
Fraction = Annotated[float, Bounds(0, 1, open_high=True)]
NonNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, open_low=True)]
Finite = Annotated[float, Bounds()]


def _shown(bound: float) -> str:
    """Formats large powers of two, and those minus one, as powers: 2⁶³ - 1."""
    for power, suffix in ((int(bound), ""), (int(bound) + 1, " - 1")):
        if power >= 1 << 32 and power & (power - 1) == 0:
            return "2" + str(power.bit_length() - 1).translate(_SUPERSCRIPTS) + suffix
    return str(bound)
