"""Roles of the processes of a run: their modules, and what happens to the run if a process dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum


class RoleName(StrEnum):
    """Names of the roles of a run's processes.

    The dense server of ``asynchronous`` is a thread of trainer 0 instead.
    """

    LOADER = "loader"
    EMBEDDING_WORKER = "embedding-worker"
    EMBEDDING_SERVER = "embedding-server"
    TRAINER = "trainer"
    GROUP_SERVER = "group-server"
    DENSE_SERVER = "dense-server"


def module_of(name: RoleName) -> str:
    """Returns the module that a process imports while it waits for its role. Trainers are separate commands."""
    return f"girih.services.{name.replace('-', '_')}"


class RestartPolicy(Enum):
    """Says whether a process of a role restarts if it is killed."""

    END_RUN = "ends the run"
    RESTART = "restarts alone"
    RELOAD_ALL = "restarts all trainers"


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """The policy for a killed process of a role: it restarts, or all trainers restart, or the run ends.

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
    """Decides which killed processes restart, and counts their restarts. It does not handle processes or clocks.

    Attributes:
        deaths: role and index → number of times that the process restarted after it was killed.
        policies: by role; a role without a policy ends the run.
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
        """Returns whether a killed process restarts alone."""
        alone = not begun or self.policy_of(name) is RestartPolicy.RESTART
        return alone and self.deaths[name, index] < self.max_restarts

    def why_ending(self, name: str, index: int, *, begun: bool) -> str:
        """Returns why a killed process does not restart, and the option that would change that."""
        policy, deaths = self.policies.get(name, FAIL), self.deaths[name, index]
        if not begun and name != RoleName.TRAINER:
            return f"a process that has not begun is restarted at most cluster.max_restarts = {self.max_restarts} times"
        if policy.policy is RestartPolicy.RESTART:
            if deaths < self.max_restarts:
                return ""
            times = f"{deaths} time" + "s" * (deaths != 1)
            return f"it had restarted {times}, and cluster.max_restarts = {self.max_restarts}"
        if policy.policy is RestartPolicy.RELOAD_ALL:
            return f"for it, all trainers restart at most cluster.max_restarts = {self.max_restarts} times, and only under girih train"
        return policy.why


def title(name: str, index: int) -> str:
    """Returns the title of a process, for example ``embedding-server 1``."""
    return f"{name} {index}"


LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostSpec:
    """The host of one process.

    Attributes:
        command: a prefix of its command, for example ``("ip", "netns", "exec", "left")``.
        host: the address at which the process listens, and at which others reach it.
        environment: additional variables, for example ``GLOO_SOCKET_IFNAME``.
    """

    command: tuple[str, ...] = ()
    host: str = LOOPBACK
    environment: Mapping[str, str] = field(default_factory=dict)


Hosts = Mapping[str, HostSpec]
"""Title of a process, such as ``trainer 0``, or name of a role, such as ``embedding-server`` → its host."""


def host_of(hosts: Hosts, name: str, index: int) -> HostSpec:
    """Returns the host of one process."""
    return hosts.get(f"{name} {index}") or hosts.get(name) or HostSpec()
