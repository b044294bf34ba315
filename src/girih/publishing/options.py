"""``[publish]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from girih.config.bounds import Count, Positive
from girih.config.options import Options
from girih.errors import ConfigError

EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions(Options):
    """Options of a log that servers follow: where it lies, how often a segment is written, how long segments stay.

    Attributes:
        to: a directory, or any other fsspec address such as ``s3://bucket/ads``.
        every_s: seconds of training between two segments; 0.5 where neither this nor ``every_steps`` is given.
        every_steps: steps between two segments, in place of ``every_s``.
        snapshot_every: segments between two snapshots of all rows, from which new followers begin.
        keep: how many of these snapshots stay, with all segments behind the oldest of them.
        on_error: whether training goes on where nothing can be written, and tries again, or stops.
    """

    to: str
    every_s: Positive | None = None
    every_steps: Count | None = None
    snapshot_every: Count = 100
    keep: Count = 2
    on_error: Literal["go_on", "stop"] = "go_on"

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.to:
            raise ConfigError("publish: to = '': expected a directory or an fsspec address")
        if self.every_s is not None and self.every_steps is not None:
            raise ConfigError(
                f"publish: every_s = {self.every_s:g} and every_steps = {self.every_steps}: expected one of them"
            )

    @property
    def seconds(self) -> float | None:
        """Seconds of training between two segments; None where they are counted in steps."""
        return (self.every_s or EVERY_S) if self.every_steps is None else None

    def _owner(self) -> str:
        return "publish: "
