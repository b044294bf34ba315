"""The processes of a run, as one trainer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from girih.comm.group import TrainerGroup


@dataclass(frozen=True)
class RunContext:
    """Who takes part.

    Attributes:
        ranks: this trainer among all.
        addresses: role → where each of its processes listens.
        secret: what every connection presents.
        host: where this trainer listens.
    """

    ranks: TrainerGroup = field(default_factory=TrainerGroup)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    secret: bytes = b""
    host: str = "127.0.0.1"
