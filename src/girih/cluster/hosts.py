"""Hosts of a run's processes: this host unless a launcher says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostSpec:
    """The host of one process.

    Attributes:
        command: what goes before its command, as ``("ip", "netns", "exec", "left")``.
        host: where it listens, and where others reach it.
        environment: variables of its own, as ``GLOO_SOCKET_IFNAME``.
    """

    command: tuple[str, ...] = ()
    host: str = LOOPBACK
    environment: Mapping[str, str] = field(default_factory=dict)


Hosts = Mapping[str, HostSpec]
"""Title of a process, as ``trainer 0``, or name of a role, as ``embedding-server`` → its host_spec."""


def host_of(hosts: Hosts, name: str, index: int) -> HostSpec:
    """The host_spec of one process."""
    return hosts.get(f"{name} {index}") or hosts.get(name) or HostSpec()
