"""``[checkpoint]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass

from girih.config.bounds import Count
from girih.config.options import Options
from girih.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(Options):
    """Options of checkpoints: where to save them, how often, and how many to keep.

    Attributes:
        dir: a directory, or any other fsspec address such as ``s3://bucket/run``, for this run alone; None takes
            ``checkpoints`` in the run directory.
        every_steps: None saves only at the end, on a signal and at the best evaluation.
        keep: how many of the latest stay; the best one, under early stopping, stays besides.
    """

    dir: str | None = None
    every_steps: Count | None = None
    keep: Count = 3

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.dir == "":
            raise ConfigError("checkpoint: dir = '': expected a directory or an fsspec address")

    def _owner(self) -> str:
        return "checkpoint: "
