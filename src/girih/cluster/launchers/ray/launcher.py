"""Starts processes on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from girih.cluster.launchers.launcher import Launch, Resources
from girih.cluster.launchers.ray.agent import Agent, Order
from girih.cluster.launchers.ray.process import WAITING, RayProcess
from girih.cluster.options import RoleResources
from girih.cluster.roles import RoleName, title
from girih.errors import ConfigError, RoleError
from girih.processes.segments import new_prefix_of_nodes

PLACED_S = 60.0
Place = tuple[RoleName, int]
"""Role and index."""


class RayPlacement:
    """The place of each process of a run, for as long as it lasts: one that comes back does so on its node.

    Args:
        counts: role → processes.
        resources: role → those of each process.
        placed_s: the cluster has so long to make room.

    Raises:
        ConfigError: the cluster does not have them.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        resources: Mapping[RoleName, RoleResources],
        *,
        placed_s: float = PLACED_S,
    ) -> None:
        self._places: list[Place] = [
            (RoleName(name), index) for name, count in counts.items() for index in range(count)
        ]
        bundles = [resources[name].bundle() for name, _ in self._places]
        self._group = placement_group(bundles, strategy="PACK")
        try:
            found = self._group.wait(placed_s)
        except RayError:
            found = False
        if not found:
            remove_placement_group(self._group)
            raise ConfigError(_too_little(bundles, placed_s))
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        self.hosts: dict[Place, str] = {
            place: addresses[nodes[number]] for number, place in enumerate(self._places)
        }

    def of(self, name: RoleName, index: int) -> PlacementGroupSchedulingStrategy:
        """The strategy that places an actor with its process."""
        return PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._places.index((name, index))
        )

    def is_there(self) -> bool:
        """Whether Ray still has the group: an actor whose group is gone waits for ever (ray#57726)."""
        return bool(placement_group_table(self._group)["state"] in ("CREATED", "RESCHEDULING"))

    def close(self) -> None:
        """Gives all back; what still runs there ends."""
        remove_placement_group(self._group)


def _too_little(bundles: Sequence[Mapping[str, float]], placed_s: float) -> str:
    wanted: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    free: Mapping[str, Any] = ray.available_resources()  # type: ignore[no-untyped-call]
    asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    there = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in wanted)
    return (
        f"the cluster has no room for the run's {len(bundles)} processes within {placed_s:.0f} s: asked {asked}; free {there}."
        " Ask for fewer processes, or for less by [cluster] resources"
    )


def _nodes() -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


NAMESPACE = "girih"
DIALED_S = 5.0
WRITERS = (RoleName.TRAINER, RoleName.EMBEDDING_SERVER)
"""Roles that write into the run directory, or into checkpoints."""


class RayCluster:
    """The connection of a launcher to a cluster; to be closed.

    Args:
        address: "auto" for the cluster of this node, or ``HOST:PORT`` of its head.

    Attributes:
        host: this node, as others reach it.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, address: str = "auto") -> None:
        if "://" in address:
            raise ConfigError(
                f"cluster {address!r}: expected auto, or HOST:PORT of the head; start girih on a node of the cluster, or as a"
                " Ray job (ray job submit -- girih train …)"
            )
        _dial(address)
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": environment} if environment else None,
            )
        except (ConnectionError, RayError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cluster {address!r}: {str(error).strip().splitlines()[0]}; start one by ray start --head, or name the HOST:PORT of"
                " its head"
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                signal.signal(number, handler)
        self.host = own_address()

    def close(self) -> None:
        """Leaves the cluster, which ends what was started there."""
        ray.shutdown()


class RayLauncher:
    """Starts processes in a placement group; see :class:`girih.cluster.launchers.launcher.Launcher`.

    Actors are named ``RUN/ROLE-INDEX.INCARNATION`` in the namespace ``girih``. Ray does not restart them: whoever watches
    the processes does, in the same place, with the next incarnation, as on one host.

    Args:
        counts: role → processes.
        resources: role → what each of its processes may use.
        trainer, again: the words of ``girih`` that make a trainer, and one that comes back.
        hello: see :class:`girih.cluster.launchers.local.LocalLauncher`; ``bind``, ``hosts`` and ``threads`` are added.
        seen: a file that processes that write must see, as they write beside it.
        writers: how many do: trainer 0, or all trainers and embedding servers where None.
        placed_s: see :class:`~girih.cluster.launchers.ray.launcher.RayPlacement`.

    Raises:
        ConfigError: the cluster does not have what is asked for.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        resources: Mapping[RoleName, RoleResources],
        *,
        trainer: Sequence[str] = (),
        again: Sequence[str] = (),
        hello: Mapping[str, object],
        seen: str = "",
        writers: int | None = None,
        environment: Mapping[str, str] | None = None,
        placed_s: float = PLACED_S,
    ) -> None:
        self._placement = RayPlacement(counts, resources, placed_s=placed_s)
        self._resources, self._trainer, self._again = resources, trainer, again
        self._num_trainers = counts.get(RoleName.TRAINER, 1)
        hosts = {title(*place): host for place, host in self._placement.hosts.items()}
        self._hello = {**hello, "hosts": hosts}
        self._seen, self._writers, self._environment = seen, writers, environment or {}
        self._run = secrets.token_hex(4)
        self._actor: Any = ray.remote(concurrency_groups={WAITING: 1})(Agent)  # type: ignore[call-overload]

    @property
    def hosts(self) -> set[str]:
        """The addresses of the nodes that the run is on."""
        return set(self._placement.hosts.values())

    def start(self, name: RoleName, index: int, incarnation: int, resources: Resources) -> RayProcess:
        """Starts a process on the node of its bundle.

        Raises:
            RoleError: the placement group is gone.
        """
        if not self._placement.is_there():
            raise RoleError(
                f"{title(name, index)} cannot be started: its placement group is gone from the cluster"
            )
        host, own = self._placement.hosts[name, index], self._resources[name]
        is_trainer = name == RoleName.TRAINER
        writes = name in WRITERS if self._writers is None else is_trainer and index < self._writers
        threads = max(1, int(own.cpus)) if is_trainer else resources.threads
        order = Order(
            name=name,
            index=index,
            incarnation=incarnation,
            threads=threads,
            folder=str(Path.cwd()),
            launched_from=own_address(),
            seen=self._seen if writes else "",
            trainer=self._again if incarnation else self._trainer,
            num_trainers=self._num_trainers,
            hello={**self._hello, "bind": host, "threads": threads},
            environment=self._environment,
        )
        actor = self._actor.options(
            name=f"{self._run}/{name}-{index}.{incarnation}",
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=self._placement.of(name, index),
            **own.of_actor(),
        ).remote(order, host)
        return RayProcess(name, index, incarnation, actor, host)

    def again_with(self, words: Sequence[str]) -> None:
        """See :class:`girih.cluster.launchers.launcher.Launcher`."""
        self._again = [*self._again, *words]

    def close(self) -> None:
        """Gives back the resources of the run; to be called when its processes are gone."""
        with contextlib.suppress(RayError):
            self._placement.close()


def own_address() -> str:
    """This node, as other nodes reach it."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _dial(address: str) -> None:
    """Ray tries for minutes to reach what is not there.

    Raises:
        ConfigError: nobody listens.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), DIALED_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cluster {address!r} cannot be reached: {error}; expected auto, or HOST:PORT of the head, as ray start --head"
            " prints it"
        ) from error


class Nodes:
    """See :class:`girih.cluster.launchers.launcher.Machines`.

    Raises:
        ConfigError: there is no cluster, or it has not what the run asks for.
    """

    def __init__(self, spec: Launch) -> None:
        self._spec = spec
        self._resources = spec.options.resources_of(spec.counts, on_gpus=spec.on_gpus)
        self._cluster = RayCluster(spec.options.address)
        self._launcher: RayLauncher | None = None
        self.bind, self.segments = self._cluster.host, new_prefix_of_nodes()
        self._seen = spec.run.absolute().parent / f".girih-{secrets.token_hex(8)}"

    def launcher(self, hello: Mapping[str, object]) -> RayLauncher:
        """See :class:`girih.cluster.launchers.launcher.Machines`."""
        self._seen.parent.mkdir(parents=True, exist_ok=True)
        self._seen.touch()
        self._launcher = launcher = RayLauncher(
            self._spec.counts,
            self._resources,
            trainer=self._spec.command,
            again=self._spec.again,
            hello=hello,
            seen=str(self._seen),
            writers=1 if self._spec.checkpoints_elsewhere else None,
            environment=self._spec.environment,
        )
        if self._spec.one_host and len(launcher.hosts) > 1:
            raise ConfigError(
                f"{self._spec.one_host} is for processes of one host, and Ray placed the run on {len(launcher.hosts)}; use"
                " --set strategy.transport=tcp"
            )
        return launcher

    def close(self) -> None:
        """See :class:`girih.cluster.launchers.launcher.Machines`."""
        if self._launcher is not None:
            self._launcher.close()
        self._cluster.close()
        with suppress(OSError):
            self._seen.unlink()
