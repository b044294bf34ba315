"""Hosts of a file, in the format of ``girih simulate --hosts``: their number, their speed, and the roles that they run.

[[hosts]]
count = 16
cores = 0.1
memory_gb = 1
gbit = 0.1
delay_ms = 1.0                                       # optional: one way, of each packet that the host sends
roles = ["trainer", "embedding-server", "loader"]    # optional: all roles
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import network

from girih.cluster.roles import HostSpec, RoleName

TRAINER = RoleName.TRAINER
EVERY_ROLE = tuple(role.value for role in RoleName)


@dataclass(frozen=True)
class HostKind:
    """Hosts that are alike.

    Attributes:
        count: number of hosts.
        cores: of each host; a fraction of a core is a quota of its time.
        memory_gb: for plans. It bounds no process here.
        gbit: of its link, in each direction.
        delay_ms: of each packet that it sends.
        roles: that run here.
    """

    count: int
    cores: float
    memory_gb: float
    gbit: float
    delay_ms: float = 0.0
    roles: tuple[str, ...] = EVERY_ROLE

    @property
    def speed(self) -> network.Host:
        """The host as ``network`` makes it."""
        return network.Host(f"{1e6 * self.gbit:.0f}kbit", self.delay_ms, self.cores)


Kinds = Sequence[HostKind]


def load(file: Path) -> tuple[HostKind, ...]:
    """The hosts of a file.

    Raises:
        ValueError: a key or a role that does not exist, a missing key, or no host for a trainer.
    """
    known = [field.name for field in fields(HostKind)]
    kinds = []
    for entry in tomllib.loads(file.read_text()).get("hosts", ()):
        if unknown := sorted(set(entry) - set(known)):
            raise ValueError(f"{file}: [[hosts]]: unknown keys {unknown}; expected {known}")
        if unknown := sorted(set(entry.get("roles", ())) - set(EVERY_ROLE)):
            raise ValueError(f"{file}: [[hosts]]: unknown roles {unknown}; expected {list(EVERY_ROLE)}")
        try:
            kinds.append(HostKind(**entry | {"roles": tuple(entry.get("roles", EVERY_ROLE))}))
        except TypeError as error:
            raise ValueError(f"{file}: [[hosts]]: {str(error).partition('()')[2].strip()}") from error
    if not num_hosts(kinds, TRAINER):
        raise ValueError(f"{file}: no host has the role trainer")
    return tuple(kinds)


def num_hosts(kinds: Kinds, role: str) -> int:
    """Number of hosts with a role."""
    return sum(kind.count for kind in kinds if role in kind.roles)


def for_trainers(kinds: Kinds, trainers: int) -> tuple[HostKind, ...]:
    """The same hosts in another number: so many have trainers, and the others are as many for each of them as before."""
    share = trainers / num_hosts(kinds, TRAINER)
    return tuple(replace(kind, count=max(1, round(kind.count * share))) for kind in kinds)


def at_cores(kinds: Kinds, cores: float) -> tuple[HostKind, ...]:
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


def named(kinds: Kinds) -> dict[str, HostKind]:
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
