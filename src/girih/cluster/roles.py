"""Roles: what a process of a run can be, which module each one lives in, and what becomes of the run when one dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum


class RoleName(StrEnum):
    """Names of roles, for every process of a run; the dense server of ``asynchronous`` is a thread of trainer 0."""

    LOADER = "loader"
    EMBEDDING_WORKER = "embedding-worker"
    EMBEDDING_SERVER = "embedding-server"
    TRAINER = "trainer"
    GROUP_SERVER = "group-server"
    DENSE_SERVER = "dense-server"


def module_of(name: RoleName) -> str:
    """The module that a process of a role imports while it waits to learn what to do; trainers are commands of their own."""
    return f"girih.services.{name.replace('-', '_')}"


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


class RestartRules:
    """Decides which killed processes restart, and counts how often they did. It knows no process and no clock.

    Attributes:
        deaths: role and index → how often such a process was killed, and came back.
        policies: by role; a role without one ends the run.
    """

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.deaths: Counter[tuple[str, int]] = Counter()
        self.policies: dict[str, FailurePolicy] = {}

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts by role."""
        counts = Counter[str]()
        for (name, _), times in list(self.deaths.items()):
            counts[name] += times
        return counts

    def policy_of(self, name: str) -> RestartPolicy:
        """Returns the policy for a killed process of a role."""
        return self.policies.get(name, FAIL).policy

    def may_restart(self, name: str, index: int, *, begun: bool) -> bool:
        """Whether a killed process restarts alone."""
        alone = not begun or self.policy_of(name) is RestartPolicy.RESTART
        return alone and self.deaths[name, index] < self.max_restarts

    def why_ending(self, name: str, index: int, *, begun: bool) -> str:
        """Why a killed process does not restart, and which option would change that."""
        policy, deaths = self.policies.get(name, FAIL), self.deaths[name, index]
        if not begun and name != RoleName.TRAINER:
            return f"a process that has not begun is started again at most cluster.max_restarts = {self.max_restarts} times"
        if policy.policy is RestartPolicy.RESTART:
            if deaths < self.max_restarts:
                return ""
            times = f"{deaths} time" + "s" * (deaths != 1)
            return f"it had come back {times}, and cluster.max_restarts = {self.max_restarts}"
        if policy.policy is RestartPolicy.RELOAD_ALL:
            return f"all trainers begin anew at most cluster.max_restarts = {self.max_restarts} times for it, and only under girih train"
        return policy.why


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
