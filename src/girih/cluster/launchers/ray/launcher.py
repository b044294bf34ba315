"""Starts processes on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util import get_node_ip_address, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from girih.cluster.launchers.launcher import Handle, HelloOf, Launch, Launcher
from girih.cluster.launchers.ray.agent import ASKED_S, Agent, Order
from girih.cluster.options import RoleResources
from girih.cluster.roles import RoleName, title
from girih.errors import ConfigError, RoleError
from girih.processes.segments import new_prefix_of_nodes

ANSWER_S = 60.0
"""The time to wait for an actor's answer. If its node is gone, Ray may never report that (ray#20092, ray#57726)."""
WAITING = "waiting"
"""The concurrency group of an actor's calls that wait for events. All other calls run one after another, in order."""
LOST = -9
"""The status of a process whose actor is gone. The process ends with its actor."""


class RayPipe:
    """The launcher's end of a process's pipe, through its actor; see :class:`girih.processes.pipe.Pipe`."""

    def __init__(self, actor: Any) -> None:
        self.messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.calling = threading.Lock()  # the actor takes calls in the order in which they are made
        self._actor, self._sent = actor, 0

    def send(self, message: dict[str, object]) -> None:
        """Sends a message. Does nothing if nobody reads any more."""
        with self.calling, suppress(RayError):
            self._sent += 1
            self._actor.send.remote(self._sent, message)

    def receive(self) -> dict[str, Any]:
        """Returns the next message.

        Raises:
            EOFError: the process is gone.
        """
        message = self.messages.get()
        if message is None:
            self.messages.put(None)  # for later callers
            raise EOFError("the other side is gone")
        return message

    def close(self) -> None:
        """No-op: nothing is held."""


class RayProcess(Handle):
    """A process with its actor.

    Ray is asked only for events of the process: one call waits at a time, and returns at each event.
    """

    def __init__(self, name: RoleName, index: int, incarnation: int, actor: Any, node: str) -> None:
        super().__init__(name, index, incarnation, host=node)
        self.pipe: RayPipe = RayPipe(actor)
        self._actor = actor
        self._where = actor.where.remote()
        self._waiting = actor.events.options(concurrency_group=WAITING)
        self._status: int | None = None
        self._ended = threading.Event()
        self._listening.start()

    def status(self) -> int | None:
        """See :class:`Handle`."""
        return self._status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """See :class:`Handle`."""
        self._ended.wait(timeout_s)
        return self._status

    def last_words(self) -> str:
        """See :class:`Handle`."""
        return self._words

    def end(self) -> None:
        """See :class:`Handle`."""
        if self.name != RoleName.TRAINER:
            with self.pipe.calling, suppress(RayError):
                self._actor.end.remote()

    def kill(self) -> None:
        """See :class:`Handle`."""
        with self.pipe.calling, suppress(RayError):
            self._actor.kill.remote()

    def close(self) -> None:
        """See :class:`Handle`."""
        self._listening.join()

    def _listen(self) -> None:
        """Receives events of the process until the process or its actor ends."""
        try:
            self.pid, self.host = ray.get(self._where, timeout=ANSWER_S)
            first = 0
            while self._status is None:
                with self.pipe.calling:
                    pending = self._waiting.remote(first)
                events = ray.get(pending, timeout=ASKED_S + ANSWER_S)
                first += len(events)
                for event in events:
                    self._handle_event(event)
        except (RayError, GetTimeoutError, ValueError) as error:
            self._words = f"Ray lost the process: {str(error).strip().splitlines()[0]}"
            self._status = LOST
        with suppress(RayError):
            ray.kill(self._actor)  # the next incarnation of the process needs its place
        self._ended.set()
        self._address_known.set()
        self.pipe.messages.put(None)

    def _handle_event(self, event: Any) -> None:
        if "address" in event:
            self._take_address(event["address"], event["found"])
        elif "message" in event:
            self.pipe.messages.put(event["message"])
        elif "printed" in event:
            stream = sys.stdout if event["to"] == 1 else sys.stderr
            stream.buffer.write(event["printed"])
            stream.flush()
        else:
            self._words, self._status = event["words"], event["status"]


PLACED_S = 60.0


def _too_little(bundles: Sequence[Mapping[str, float]], placed_s: float) -> str:
    wanted = Counter[str]()
    for bundle in bundles:
        wanted.update(bundle)
    free: Mapping[str, Any] = ray.available_resources()  # type: ignore[no-untyped-call]
    asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    there = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in wanted)
    return (
        f"the cluster has no room for the run's {len(bundles)} processes within {placed_s:.0f} s: asked {asked}; free {there}."
        " Ask for fewer processes, or lower [cluster] resources"
    )


def _nodes() -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


NAMESPACE = "girih"
DIALED_S = 5.0
WRITERS = (RoleName.TRAINER, RoleName.EMBEDDING_SERVER)
"""Roles that write into the run directory, or into checkpoints."""


def join_cluster(address: str = "auto") -> str:
    """Connects this process to a cluster, until ``ray.shutdown()``. Returns this node's address for other nodes.

    Args:
        address: "auto" for the cluster of this node, or ``HOST:PORT`` of its head.

    Raises:
        ConfigError: there is no cluster.
    """
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
        for number, handler in handlers.items():  # Ray replaces the handler of SIGTERM
            signal.signal(number, handler)
    return own_address()


class RayLauncher(Launcher):
    """Starts processes in a placement group.

    Actors are named ``RUN/ROLE-INDEX.INCARNATION`` in the namespace ``girih``. Ray does not restart them. The
    supervisor does, in the same place, with the next incarnation, as on one host.

    Args:
        counts: role → processes.
        resources: role → resources of each of its processes.
        trainer, again: the words of ``girih`` for a trainer, and for a restarted trainer.
        hello: see :class:`girih.cluster.launchers.local.LocalLauncher`; ``bind``, ``hosts`` and ``threads`` are added.
        seen: a file that must exist for the processes that write, because they write next to it.
        writers: number of trainers that write; None means all trainers and embedding servers.
        placed_s: the seconds in which the cluster must provide the resources. A restarted process keeps its node
            while the node lives.

    Raises:
        ConfigError: the cluster lacks the resources.
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
        self._places = [(RoleName(name), index) for name, count in counts.items() for index in range(count)]
        bundles = [resources[name].bundle() for name, _ in self._places]
        self._group = placement_group(bundles, strategy="PACK")
        if not self._is_placed(placed_s):
            remove_placement_group(self._group)
            raise ConfigError(_too_little(bundles, placed_s))
        super().__init__(trainer=trainer, again=again)
        self._resources = resources
        self._num_trainers = counts.get(RoleName.TRAINER, 1)
        self._hello = hello
        self._seen, self._writers, self._environment = seen, writers, environment or {}
        self._run = secrets.token_hex(4)
        self._actor: Any = ray.remote(concurrency_groups={WAITING: 1})(Agent)  # type: ignore[call-overload]

    @property
    def hosts(self) -> dict[tuple[RoleName, int], str]:
        """Role and index of each process → the address of its node. Ray moves processes of a lost node to other nodes."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return {place: addresses[nodes[number]] for number, place in enumerate(self._places)}

    def _is_placed(self, within_s: float) -> bool:
        """Returns whether all processes have a node, after waiting for it."""
        try:
            return bool(self._group.wait(within_s))
        except RayError:
            return False

    def has_place(self) -> bool:
        """Returns whether Ray still has the placement group. Without the group, an actor waits for ever (ray#57726)."""
        return bool(placement_group_table(self._group)["state"] in ("CREATED", "RESCHEDULING"))

    def start(self, name: RoleName, index: int, incarnation: int, threads: int | None) -> RayProcess:
        """Starts a process on the node of its bundle.

        Raises:
            RoleError: the placement group is gone, or no node has room for its processes.
        """
        if not self.has_place():
            raise RoleError(
                f"{title(name, index)} cannot be started: its placement group is gone from the cluster"
            )
        if not self._is_placed(PLACED_S):
            raise RoleError(
                f"{title(name, index)} cannot be started: a node of the run is gone, and no other had room within {PLACED_S:.0f} s"
            )
        hosts, own = self.hosts, self._resources[name]
        host = hosts[name, index]
        is_trainer = name == RoleName.TRAINER
        writes = name in WRITERS if self._writers is None else is_trainer and index < self._writers
        threads = max(1, int(own.cpus)) if is_trainer else threads
        order = Order(
            name=name,
            index=index,
            incarnation=incarnation,
            threads=threads,
            folder=str(Path.cwd()),
            launched_from=own_address(),
            seen=self._seen if writes else "",
            trainer=self.command_of(incarnation),
            num_trainers=self._num_trainers,
            hello={
                **self._hello,
                "hosts": {title(*place): address for place, address in hosts.items()},
                "bind": host,
                "threads": threads,
            },
            environment=self._environment,
        )
        actor = self._actor.options(
            name=f"{self._run}/{name}-{index}.{incarnation}",
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._places.index((name, index))
            ),
            **own.of_actor(),
        ).remote(order, host)
        return RayProcess(name, index, incarnation, actor, host)

    def close(self) -> None:
        """Releases the resources of the run. Call it when its processes are gone."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


def own_address() -> str:
    """Returns this node's address for other nodes."""
    address: str = get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _dial(address: str) -> None:
    """Checks that a head listens, because Ray itself would try for minutes.

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


def on_nodes(spec: Launch, closing: ExitStack, hello_of: HelloOf) -> RayLauncher:
    """Returns the launcher of a run on the nodes of a cluster, until ``closing`` is closed.

    Raises:
        ConfigError: there is no cluster, or it lacks the resources.
    """
    resources = spec.options.resources_of(spec.counts, on_gpus=spec.on_gpus)
    host = join_cluster(spec.options.address)
    closing.callback(ray.shutdown)
    seen = spec.run.absolute().parent / f".girih-{secrets.token_hex(8)}"
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.touch()

    @closing.callback
    def forget() -> None:
        with suppress(OSError):
            seen.unlink()

    launcher = RayLauncher(
        spec.counts,
        resources,
        trainer=spec.command,
        again=spec.again,
        hello=hello_of(host, new_prefix_of_nodes()),
        seen=str(seen),
        writers=1 if spec.checkpoints_elsewhere else None,
        environment=spec.environment,
    )
    closing.callback(launcher.close)
    num_hosts = len(set(launcher.hosts.values()))
    if spec.one_host and num_hosts > 1:
        raise ConfigError(
            f"{spec.one_host} is for processes of one host, and Ray placed the run on {num_hosts}; use"
            " --set strategy.transport=tcp"
        )
    return launcher
