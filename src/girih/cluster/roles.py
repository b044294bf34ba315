"""Roles: what a process of a run can be, which module each one lives in, and what becomes of the run when one dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol


class RoleName(StrEnum):
    """Names of roles, for every process of a run; the dense server of ``asynchronous`` is a thread of trainer 0."""

    LOADER = "loader"
    EMBEDDING_WORKER = "embedding-worker"
    EMBEDDING_SERVER = "embedding-server"
    TRAINER = "trainer"
    GROUP_SERVER = "group-server"
    DENSE_SERVER = "dense-server"


MODULES = {
    RoleName.LOADER: "girih.services.loader",
    RoleName.EMBEDDING_WORKER: "girih.services.embedding_worker",
    RoleName.EMBEDDING_SERVER: "girih.services.embedding_server",
    RoleName.GROUP_SERVER: "girih.services.group_server",
    RoleName.DENSE_SERVER: "girih.services.dense_server",
}
"""Modules that a process of a role imports while it waits to learn what to do; trainers are commands of their own."""


class RestartPolicy(Enum):
    """Policy for a run when a process of a role is killed."""

    END_RUN = "ends the run"
    RESTART = "comes back alone"
    RELOAD_ALL = "has all trainers begin anew"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """The consequence for the run when a process of a role is killed.

    Attributes:
        why: why the run ends, and the option that would change that; "" if there is none.
    """

    policy: RestartPolicy = RestartPolicy.END_RUN
    why: str = ""


FAIL, RESTART, RELOAD_ALL = (
    FailurePolicy(),
    FailurePolicy(RestartPolicy.RESTART),
    FailurePolicy(RestartPolicy.RELOAD_ALL),
)


class Role(Protocol):
    """One process of a run beside the trainers; it reaches its process by pickle, through a private pipe.

    Attributes:
        name: a :class:`RoleName`.
        index: which of its kind.
        incarnation: how often this role and index has been restarted, set in its process; 0 for the first.
        stats: :class:`girih.telemetry.stats.Stats` of its process.

    A restarted role may have an attribute ``recovery_note``, a line on the state in which it found its data.
    """

    name: str
    index: int
    incarnation: int
    stats: Any

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Works until ``stop`` is set; says where it listens by ``ready``, once."""
        ...


def title(name: str, index: int) -> str:
    """As ``embedding-server 1``."""
    return f"{name} {index}"


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
