"""``[checkpoint]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass

from girih.config import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """How often to save and how many to keep.

    Attributes:
        every_steps: None saves only at the end, on a signal and at the best evaluation.
        keep: how many of the latest stay; the best one, under early stopping, stays besides.
    """

    every_steps: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        checks.integer("checkpoint: every_steps", self.every_steps, or_none=True)
        checks.integer("checkpoint: keep", self.keep)
