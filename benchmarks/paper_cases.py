"""One point of a paper's curve, and the values that the paper states for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from paper_graphs import Step


@dataclass(frozen=True)
class Case:
    """A point.

    Attributes:
        figure: its name. setting: the model or the data. arm: the strategy. x: the size.
        change: the assumption that differs from those of the figure; empty if none.
    """

    figure: str
    setting: str
    arm: str
    x: float
    change: str = ""


@dataclass(frozen=True)
class Published:
    """What a paper states for a point.

    Attributes:
        samples_per_s: of all hosts. of_linear: relative to the smallest size. of_base: relative to the figure's base arm.
        shape: words, if there is no number.
    """

    samples_per_s: float | None = None
    of_linear: float | None = None
    of_base: float | None = None
    shape: str = ""


class Figure(Protocol):
    """A figure or a table of a paper.

    Attributes:
        x: the name of the size. is_linear: True if samples/s in proportion to the size are 1.
        passes: where the time of a pass comes from. steps: of each trainer in a run.
    """

    name: str
    x: str
    is_linear: bool
    passes: str
    steps: int

    def cases(self, *, quick: bool = False) -> Iterator[Case]:
        """Its points. The smallest size and the base arm come first."""

    def base(self, case: Case) -> str:
        """The arm that a case is compared with at equal size; empty if there is none."""

    def step(self, case: Case) -> Step:
        """The step to simulate."""

    def published(self, case: Case) -> Published:
        """What the paper states for a point."""
