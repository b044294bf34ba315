"""A role that does as it is told, for tests of launchers and supervisors."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from girih.cluster.roles import RoleName, title
from girih.comm.registry import Registry
from girih.errors import ConfigError
from girih.telemetry.stats import Stats


@dataclass
class Acting:
    """A role without work.

    Attributes:
        act: what it does: "serve" until it is to end, "refuse" to begin, "vanish" before it listens, be "mute" and
            never say where it does; or listen, and then "raise" an error, "exit" with status 3, or be "deaf" to the end.
        told: the address that it says; "" has it tell about itself instead.
        registry: where it notes under its title that it is there, if anywhere.
    """

    act: str = "serve"
    index: int = 0
    told: str = "there"
    name: str = RoleName.LOADER
    registry: Registry | None = None
    incarnation: int = 0
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """See :class:`girih.comm.service.Service`."""
        if self.act == "refuse":
            raise ConfigError("there is nothing to load")
        if self.act == "vanish":
            os._exit(7)
        if self.act == "mute":
            stop.wait()
            return
        print("what anybody prints")
        if self.registry is not None:
            self.registry.set(title(self.name, self.index), f"life {self.incarnation}")
        variables = ("RANK", "OMP_NUM_THREADS", "GIRIH_TEST_PLACE")
        ready(self.told or " ".join(f"{name}={os.environ.get(name)}" for name in variables))
        if self.act == "raise":
            raise ValueError("a thing went wrong")
        if self.act == "exit":
            print("its last words", file=sys.stderr, flush=True)
            os._exit(3)
        if self.act == "deaf":
            threading.Event().wait()
        stop.wait()
