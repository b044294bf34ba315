"""Options of the machines: ``[cluster]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from girih.config.options import Options
from girih.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(Options):
    """Options of processes: where they run and listen.

    Attributes:
        launcher: "local" starts them on this host.
        bind: the address of this host at which processes listen; with trainers on several hosts each needs its own,
            as ``bind = "${HOST_IP}"``.
        encrypt: whether TLS goes over all connections that are not within one host's memory; see ``docs/security.md``.
    """

    launcher: Literal["local"] = "local"
    bind: str = "127.0.0.1"
    encrypt: bool = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.bind or self.bind in ("*", "0.0.0.0", "::"):
            raise ConfigError(f"bind = {self.bind!r}: expected one address of this host, as 127.0.0.1")
