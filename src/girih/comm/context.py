"""The processes of a run, as one trainer sees them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from girih.comm.group import TrainerGroup
from girih.comm.registry import LocalRegistry, Registry
from girih.comm.rpc import Client, connect
from girih.errors import GirihError


@dataclass(frozen=True)
class RunContext:
    """Who takes part.

    Attributes:
        ranks: this trainer among all.
        addresses: role → where each of its processes listened when it was started.
        secret: what every connection proves to know.
        host: where this trainer listens.
        registry: where roles are found, see :func:`girih.comm.registry.resolve`.
    """

    ranks: TrainerGroup = field(default_factory=TrainerGroup)
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    secret: bytes = b""
    host: str = "127.0.0.1"
    registry: Registry = field(default_factory=LocalRegistry)
    _clients: weakref.WeakSet[Client] = field(default_factory=weakref.WeakSet)

    def connect(self, role: str, index: int) -> Client:
        """A connection to a process of a role, which :meth:`abort` ends."""
        return self.tracked(connect(self.addresses[role][index], secret=self.secret))

    def tracked(self, client: Client) -> Client:
        """A connection that :meth:`abort` ends."""
        self._clients.add(client)
        return client

    def abort(self) -> None:
        """Has collectives and calls in progress raise, because a process of the run is gone. From any thread."""
        self.ranks.abort()
        for client in list(self._clients):
            with contextlib.suppress(GirihError, OSError):
                client.close()
