"""The processes of a run, as one trainer sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from girih.ranks import Ranks


@dataclass(frozen=True)
class Company:
    """Who takes part.

    Attributes:
        ranks: this trainer among all.
        addresses: role → where each of its processes listens.
        secret: what every connection presents.
        host: where this trainer listens.
    """

    ranks: Ranks = field(default_factory=Ranks)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    secret: bytes = b""
    host: str = "127.0.0.1"
