"""Connections to the processes of a role, which are looked up again when one comes back elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from girih.comm.registry import Registry, resolver
from girih.comm.rpc import Client
from girih.comm.service import connect

CONNECTED_S = 40.0
RETURN_S = 1800.0
"""A process that comes back may take so long to make whole what it goes on with."""


def calls_of(clients: Iterable[Client]) -> dict[str, int]:
    """Counts of a process that calls others, for :meth:`girih.telemetry.stats.Stats.watch`: connections made again, calls lost."""
    clients = tuple(clients)
    return {
        "retries": sum(client.num_reconnects for client in clients),
        "lost_calls": sum(client.num_lost for client in clients),
    }


def connect_all(
    role: str,
    addresses: Sequence[str],
    *,
    secret: bytes,
    registry: Registry | None = None,
    timeout_s: float = CONNECTED_S,
) -> list[Client]:
    """A client for each process of a role.

    Args:
        addresses: where they listen now, by index.
        registry: asked for the address of one whose connection broke; without it a process that is gone stays gone.
        timeout_s: a call that finds no connection for so long fails.
    """
    return [
        connect(
            address,
            secret=secret,
            timeout_s=timeout_s,
            resolve=None if registry is None else resolver(registry, role, index),
        )
        for index, address in enumerate(addresses)
    ]
