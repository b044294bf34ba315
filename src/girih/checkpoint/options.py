"""``[checkpoint]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass

from girih.config import checks
from girih.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Options of checkpoints: where to save them, how often, and how many to keep.

    Attributes:
        dir: a directory, or any other fsspec address such as ``s3://bucket/run``, for this run alone; None takes
            ``checkpoints`` in the run directory.
        every_steps: None saves only at the end, on a signal and at the best evaluation.
        keep: how many of the latest stay; the best one, under early stopping, stays besides.
    """

    dir: str | None = None
    every_steps: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.dir is not None and (not isinstance(self.dir, str) or not self.dir):
            raise ConfigError(f"checkpoint: dir = {self.dir!r}: expected a directory or an fsspec address")
        checks.integer("checkpoint: every_steps", self.every_steps, or_none=True)
        checks.integer("checkpoint: keep", self.keep)
