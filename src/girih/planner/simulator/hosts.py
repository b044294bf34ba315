"""The hosts of a simulated run: their cores, memory and links, and the processes that they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from girih import config
from girih.config.bounds import Bounds, Count, NonNegative, Positive
from girih.errors import ConfigError
from girih.planner.calibration import Calibration
from girih.planner.steps.graph import (
    DENSE_SERVER,
    GROUP_SERVER,
    LOADER,
    PARAMETER_SERVER,
    SERVER,
    TRAINER,
    WORKER,
)

ROLES = (TRAINER, WORKER, SERVER, LOADER, GROUP_SERVER, DENSE_SERVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """A number of equal hosts: one ``[[hosts]]`` of a file.

    Attributes:
        count: number of hosts.
        cores: cores of each. They are as fast as the cores of the calibrated machine.
        memory_gb: memory of each, in 10⁹ bytes.
        gbit: Gbit/s of its link in each direction. Messages within a host do not use the link.
        delay_ms: milliseconds of a message between hosts, beyond the calibrated latency.
        roles: roles that run here; empty means all.
        device: name of a GPU that trainers compute on, see :mod:`girih.planner.simulator.terms`; empty means none.
        burst_kb: kilobytes that a link sends at once after it was idle, as a token bucket does.
        link_per_process: True if each process has a link of its own, as in network namespaces. Then all messages use
            links, and processes share only the cores.
    """

    count: Count
    cores: Positive
    memory_gb: Positive
    gbit: Positive
    delay_ms: NonNegative = 0.0
    roles: tuple[str, ...] = ()
    device: str = ""
    burst_kb: Annotated[float, Bounds(0)] = 0.0
    link_per_process: bool = False

    def __post_init__(self) -> None:
        for role in self.roles:
            if role not in ROLES:
                raise ConfigError(f"roles: {role!r}: expected some of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a run, as in a file with ``[[hosts]]``."""

    hosts: tuple[HostGroup, ...]

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ConfigError("hosts is empty; expected at least one [[hosts]]")

    @property
    def cores(self) -> float:
        """Cores of all hosts."""
        return sum(each.count * each.cores for each in self.hosts)

    @classmethod
    def read(cls, path: Path) -> Hosts:
        """Reads hosts from a TOML file.

        Raises:
            MissingFileError: the file does not exist.
            ConfigError: the file is not TOML, or has an unknown key, or a value is missing or out of its bounds.
        """
        hosts: Hosts = config.build(cls, config.read_toml(path), str(path))
        return hosts

    @classmethod
    def like(cls, calibration: Calibration) -> Hosts:
        """Returns the machines of a calibration. Each process has a link with the rate of the calibrated links.

        See :meth:`Calibration.over` and :meth:`Calibration.spread`.
        """
        fastest = max(link.bytes_per_s for link in calibration.links.values())
        group = HostGroup(
            count=calibration.machines,
            cores=calibration.cores / calibration.machines,
            memory_gb=1e6,
            gbit=8e-9 * fastest,
            link_per_process=True,
        )
        return cls((group,))

    def place(
        self, counts: Mapping[str, int], numbers: Sequence[int]
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """Deals the processes of each role in turn to the hosts that may run it.

        Args:
            counts: role → number of processes. numbers: number of hosts of each group.

        Returns:
            (role, index) → the number of the group, and of the host in it.

        Raises:
            ConfigError: no host runs a role.
        """
        places: dict[tuple[str, int], tuple[int, int]] = {}
        turns: dict[tuple[int, ...], int] = {}
        for role, count in counts.items():
            if role == PARAMETER_SERVER:
                places[role, 0] = places[TRAINER, 0]
                continue
            groups = tuple(
                number for number, each in enumerate(self.hosts) if not each.roles or role in each.roles
            )
            if not groups:
                listed = sorted({name for each in self.hosts for name in each.roles})
                raise ConfigError(
                    f"hosts: no host runs {role!r}: roles list {', '.join(listed)}; add {role!r} to one"
                )
            slots = [(group, host) for group in groups for host in range(numbers[group])]
            for index in range(count):
                places[role, index] = slots[turns.get(groups, 0) % len(slots)]
                turns[groups] = turns.get(groups, 0) + 1
        return places
