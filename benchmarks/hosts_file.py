"""Hosts of a file, in the format of ``girih simulate --hosts``: their number, their speed, and the roles that they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import network

from girih.cluster.roles import HostSpec
from girih.errors import ConfigError
from girih.planner.simulator import hosts as simulated
from girih.planner.simulator.hosts import HostGroup
from girih.planner.steps.graph import TRAINER

EVERY_ROLE = simulated.ROLES


Kinds = Sequence[HostGroup]
"""Hosts that are alike, kind by kind. ``cores`` may be a fraction: a quota of the time of one. ``memory_gb`` bounds no process here."""


def load(file: Path) -> tuple[HostGroup, ...]:
    """The hosts of a file.

    Raises:
        ConfigError: a key or a role that does not exist, a missing key, or no host for a trainer.
    """
    kinds = tuple(replace(kind, roles=kind.roles or EVERY_ROLE) for kind in simulated.Hosts.read(file).hosts)
    if not num_hosts(kinds, TRAINER):
        raise ConfigError(f"{file}: no host has the role trainer")
    return kinds


def shaped(kind: HostGroup) -> network.Host:
    """A host as ``network`` makes it."""
    return network.Host(f"{1e6 * kind.gbit:.0f}kbit", kind.delay_ms, kind.cores)


def num_hosts(kinds: Kinds, role: str) -> int:
    """Number of hosts with a role."""
    return sum(kind.count for kind in kinds if role in kind.roles)


def for_trainers(kinds: Kinds, trainers: int) -> tuple[HostGroup, ...]:
    """The same hosts in another number: so many have trainers, and the others are as many for each of them as before."""
    share = trainers / num_hosts(kinds, TRAINER)
    return tuple(replace(kind, count=max(1, round(kind.count * share))) for kind in kinds)


def at_cores(kinds: Kinds, cores: float) -> tuple[HostGroup, ...]:
    """The same hosts at another speed: the first kind has so many cores, and all else is slower or faster by the same factor."""
    factor = cores / kinds[0].cores
    return tuple(
        replace(
            kind,
            cores=round(kind.cores * factor, 6),
            gbit=kind.gbit * factor,
            delay_ms=kind.delay_ms / factor,
        )
        for kind in kinds
    )


def named(kinds: Kinds) -> dict[str, HostGroup]:
    """Name of each host → its kind."""
    return {
        f"h{number}": kind for number, kind in enumerate(kind for kind in kinds for _ in range(kind.count))
    }


def placed(kinds: Kinds, counts: Mapping[str, int]) -> dict[str, str]:
    """Title of each process → name of its host. Processes of a role take the hosts with that role in turn.

    Args:
        counts: role → processes.
    """
    names = named(kinds)
    found = {}
    for role, count in counts.items():
        hosts = [name for name, kind in names.items() if role in kind.roles]
        if count and not hosts:
            raise ValueError(f"no host has the role {role}")
        found |= {f"{role} {index}": hosts[index % len(hosts)] for index in range(count)}
    return found


def specs(hosts: network.Hosts, places: Mapping[str, str]) -> dict[str, HostSpec]:
    """Title of each process → its place, on hosts that exist."""
    return {title: hosts.places[name] for title, name in places.items()}


def as_rows(kinds: Kinds) -> list[dict[str, Any]]:
    """For results: the hosts as plain values."""
    return [asdict(kind) | {"roles": list(kind.roles)} for kind in kinds]
