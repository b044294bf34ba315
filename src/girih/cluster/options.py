"""Options of the machines: ``[cluster]`` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Literal

from girih.cluster.roles import RoleName
from girih.config.bounds import Bounds, NonNegative
from girih.config.options import Options
from girih.errors import ConfigError, nearest

NumProcesses = Annotated[int, Bounds(1, 1024)]


class RoleResources(Options):
    """Resources of each process of a role on a cluster.

    Attributes:
        cpus: number of cores. A trainer computes with this number of threads, and at least one.
        gpus: number of GPUs.
        memory: bytes; 0 requests no particular amount.
    """

    cpus: NonNegative = 1.0
    gpus: NonNegative = 0.0
    memory: Annotated[int, Bounds(0)] = 0

    def bundle(self) -> dict[str, float]:
        """Returns the resources by Ray's names, for a bundle of a placement group."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory)}
        return {name: amount for name, amount in named.items() if amount} or {"CPU": 0.001}

    def of_actor(self) -> dict[str, float]:
        """Returns the resources as options of an actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus} | (
            {"memory": self.memory} if self.memory else {}
        )


class ClusterOptions(Options):
    """Options of processes: their launcher, their hosts and their addresses.

    Attributes:
        launcher: "local" starts them on this host, "ray" on the nodes of a cluster.
        address: the cluster: "auto" for this node's cluster, or ``HOST:PORT`` of its head.
        resources: role → resources of each of its processes on a cluster; by default a core, and a GPU for a trainer
            that computes on GPUs.
        autoscale: role → smallest and largest number of its processes. The number follows their load during a run.
        autoscale_every_s: seconds of observation before a change, and of waiting after it.
        autoscale_beyond_cores: true adds processes even if the host has no free core for them.
        max_restarts: how often each killed process of a run may restart; 0: the first death ends the run.
        bind: the address of this host at which processes listen. With trainers on several hosts, each host needs its
            own, for example ``bind = "${HOST_IP}"``.
        encrypt: true uses TLS for all connections that leave a host's memory; see ``docs/security.md``.
    """

    launcher: Literal["local", "ray"] = "local"
    address: str = "auto"
    resources: Mapping[RoleName, RoleResources] = field(default_factory=dict)
    autoscale: Mapping[RoleName, tuple[NumProcesses, NumProcesses]] = field(default_factory=dict)
    autoscale_every_s: Annotated[float, Bounds(1, 86_400)] = 60.0
    autoscale_beyond_cores: bool = False
    max_restarts: Annotated[int, Bounds(0, 1_000_000)] = 3
    bind: str = "127.0.0.1"
    encrypt: bool = False

    def _check(self) -> None:
        if not self.bind or self.bind in ("*", "0.0.0.0", "::"):
            raise ConfigError(f"bind = {self.bind!r}: expected one address of this host, as 127.0.0.1")
        for name, (fewest, most) in self.autoscale.items():
            if name not in list(RoleName):
                raise ConfigError(f"autoscale: unknown role {name!r}{nearest(name, map(str, RoleName))}")
            if fewest > most:
                told = f"autoscale: {name} = {[fewest, most]}: expected the fewest and then the most processes, as [1, 4]"
                raise ConfigError(told)

    def resources_of(self, counts: Mapping[str, int], *, on_gpus: bool) -> Mapping[RoleName, RoleResources]:
        """Returns the resources of a process of each role.

        Args:
            counts: role → processes.
            on_gpus: trainers compute on GPUs.

        Raises:
            ConfigError: resources are given for a role that the run does not have.
        """
        for name in self.resources:
            if name not in counts:
                raise ConfigError(f"resources: this run has no {name}; expected one of {', '.join(counts)}")
        trainer = RoleResources(gpus=1.0 if on_gpus else 0.0)
        names = [RoleName(name) for name in counts]
        default = {name: trainer if name == RoleName.TRAINER else RoleResources() for name in names}
        return {**default, **self.resources}
