"""Updates of rows of which the host learns a step late whether they were made: their step may be refused, as devices decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from girih.errors import NonFiniteError

Numbers = Sequence[float]
Agree = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Joins what all halves of all R trainers say of a step, on the device; called once.

Takes a 0-d bool, whether these rows refuse it, and float64[S], what else all are to be told. Returns a 0-d bool, whether anything
refuses it, and float64[R, S], what all told.
"""


def _nothing(numbers: Numbers) -> None:
    return None


@dataclass(frozen=True)
class LateUpdate:
    """An update that is launched, and that moves nothing where its step is refused.

    Attributes:
        refused: 0-d bool, on the device: the step is.
        told: float64[K], on the device: what the host is to hear.
        explain: that on the host → why the rows refuse the step; None where they do not.
        count: that on the host → counters after the update, or None where others are to be asked; called once, in the order of steps.
        take_back: what the host is to do once it learns that the step was refused.
        pending: the update's way to other processes; None where whatever is launched later sees it.
    """

    refused: Tensor
    told: Tensor
    explain: Callable[[Numbers], NonFiniteError | None] = _nothing
    count: Callable[[Numbers], Mapping[str, int] | None] = _nothing
    take_back: Callable[[], None] = lambda: None
    pending: Any = None

    def done(self) -> bool:
        """Whether reads see it, or will."""
        return self.pending is None or bool(self.pending.done())

    def wait(self) -> None:
        """Blocks until they do."""
        if self.pending is not None:
            self.pending.wait()


def nonfinite_gradient(feature: str) -> NonFiniteError:
    """The refusal that names a feature."""
    return NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite")
