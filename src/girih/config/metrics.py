"""Options of what a run shows of itself while it runs: ``[metrics]`` of a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from girih.config.bounds import Bounds
from girih.config.options import Options
from girih.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions(Options):
    """Options of metrics for Prometheus, which each process of a run serves at a port of its own.

    Attributes:
        port: each process takes the first free port from this one on, or any with 0; None serves none.
        bind: the address of this host at which they are served. Whoever reaches it reads them: nothing is asked of callers.
        targets: directory in which each process says in a file where it serves, for Prometheus's ``file_sd_configs``; None
            takes ``targets`` in the run directory.
    """

    port: Annotated[int, Bounds(0, 65_535)] | None = None
    bind: str = "127.0.0.1"
    targets: str | None = None

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if not self.bind or self.bind in ("*", "0.0.0.0", "::"):
            raise ConfigError(
                f"metrics: bind = {self.bind!r}: expected one address of this host, as 127.0.0.1"
            )
        if self.targets == "":
            raise ConfigError("metrics: targets = '': expected a directory")

    def below(self, directory: Path) -> MetricsOptions:
        """The options with paths that hold from anywhere; relative ones start at ``directory``."""
        return self if self.targets is None else replace(self, targets=str(directory / self.targets))

    def _owner(self) -> str:
        return "metrics: "
