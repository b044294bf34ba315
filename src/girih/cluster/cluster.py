"""The processes of one run, as a trainer sees them: all trainers, and the other roles."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from girih.cluster.control import LauncherControl, Roles
from girih.cluster.launchers.local import LocalLauncher
from girih.cluster.options import ClusterOptions
from girih.cluster.rendezvous import count_started, one_host, torchrun_store
from girih.cluster.roles import FAIL, LOOPBACK, FailurePolicy, Hosts, HostSpec, RoleName, host_of
from girih.cluster.supervisor import Supervisor, rows_kept_in
from girih.comm.group import TrainerGroup
from girih.comm.registry import Entry, LocalRegistry, Registry, RegistryServer, find, register
from girih.comm.registry.remote import RemoteRegistry
from girih.comm.service import Service, abort_clients
from girih.config.train import MetricsOptions
from girih.errors import GirihError, RoleError, WireError, WireTimeout
from girih.processes.pipe import Pipe
from girih.processes.segments import new_prefix, remove_segments
from girih.telemetry.status_file import StatusTarget

GRACE_S = 1.0
"""Seconds in which a trainer may find a lost process by itself.

After them, girih aborts everything that waits for the process.
"""
LEAVE_S = 10.0


class Cluster:
    """The run's processes, as this trainer sees them, and the means to end them.

    :meth:`join` makes it. For a single trainer, call the constructor. Close it at the end.

    Attributes:
        ranks: the group of all trainers.
        registry: lists the addresses of roles, see :func:`girih.comm.registry.find`.
        secret: the secret of the run. Every connection must prove that it knows the secret.
        segment: prefix of the names of all shared memory of the run.
        incarnation: the number of restarts of this trainer.
        options: the options of the run's processes.
    """

    def __init__(self, *, hosts: Hosts | None = None) -> None:
        self._hosts = hosts or {}
        self.ranks = TrainerGroup()
        self.registry: Registry = LocalRegistry()
        self.secret = secrets.token_hex(16).encode()
        self.segment = new_prefix()
        self._bind, self._encrypt = LOOPBACK, False
        self._roles: Roles | None = None
        self._supervisor: Supervisor | None = None
        self._server: RegistryServer | None = None
        self._first, self._under_torchrun = True, False
        self._run: Path | None = None
        self._place = StatusTarget()
        self.incarnation = self._max_restarts = 0
        self._error: Exception | None = None
        self._closed = threading.Event()
        self.options = ClusterOptions()

    @classmethod
    def join(cls, trainers: int = 1, *, options: ClusterOptions | None = None) -> Cluster:
        """Returns the cluster of a trainer that a launcher or ``torchrun`` started, or of a single trainer.

        Args:
            trainers: the strategy's number of trainers; 1 accepts any number that was started.

        Raises:
            ConfigError: another number was started.
        """
        cluster = cls()
        pipe = Pipe.inherited()
        size = count_started(trainers, has_launcher=pipe is not None)
        cluster.options = options = options or ClusterOptions()
        cluster._bind, cluster._max_restarts = options.bind, options.max_restarts
        cluster._encrypt = options.encrypt
        if size is not None and pipe is not None:
            cluster._join_launcher(pipe, int(os.environ["RANK"]), size)
        elif size is not None and size > 1:
            cluster._join_torchrun(int(os.environ["RANK"]), size)
        return cluster

    def host(self, name: str, index: int) -> str:
        """Returns the host address at which a process listens."""
        return host_of(self._hosts, name, index).host if self._hosts else self._bind

    def address(self, name: str, index: int) -> str:
        """Returns the address at which a process listens for other hosts; see :func:`girih.comm.service.listen`."""
        return f"{'tls' if self._encrypt else 'tcp'}://{self.host(name, index)}:*"

    def prepare(self, counts: Mapping[str, int], *, again: bool = False) -> None:
        """Starts processes that will get roles from :meth:`start`.

        ``again`` means that these roles have been ended before.
        """
        if counts and self._first:
            self._starter().prepare(counts, again=again)

    def start(
        self, name: str, roles: Callable[[], Sequence[Service]], failure_policy: FailurePolicy = FAIL
    ) -> tuple[str, ...]:
        """Makes rank 0 or its launcher start roles. Returns their addresses, on all ranks.

        Args:
            failure_policy: what happens to the run if one of these processes is killed.

        Raises:
            RoleError: a process could not begin.
        """
        addresses = None
        if self._first:
            starter = self._starter()  # started before roles are made, because they may need the registry
            addresses = starter.start(name, [pickle.dumps(role) for role in roles()], failure_policy)
        return tuple(self.ranks.broadcast(addresses))

    @property
    def restarts(self) -> Mapping[str, int]:
        """Number of restarts of killed processes, by role. Ranks except 0 have none."""
        return dict(self._roles.restarts) if self._roles is not None and self._first else {}

    @property
    def rows_stayed(self) -> bool:
        """True if trainers restarted and found rows in other processes that are newer than the last checkpoint."""
        return self.incarnation > 0 and self.registry.check([rows_kept_in(self.incarnation)])

    def addresses(self, name: str, count: int) -> tuple[str, ...]:
        """Returns the current addresses of the first ``count`` processes of a role."""
        entries = [find(self.registry, name, index) for index in range(count)]
        return tuple("" if entry is None else entry.address for entry in entries)

    @property
    def may_grow(self) -> bool:
        """True if the run may start more processes than it began with. False if each process has a fixed host."""
        return not self._hosts

    @property
    def has_launcher(self) -> bool:
        """True if a launcher supervises the run, so that all trainers can restart."""
        return isinstance(self._roles, LauncherControl)

    def scale(self, stage: str, counts: Mapping[str, int], overrides: Sequence[str]) -> None:
        """Reports new numbers of processes to the launcher, if there is one.

        Only rank 0 does this; see :class:`LauncherControl`.
        """
        if isinstance(self._roles, LauncherControl):
            self._roles.scale(stage, counts, overrides)

    def end(self, name: str) -> None:
        """Ends all processes of a role. The run continues."""
        if self._roles is not None and self._first:
            self._roles.end(name)

    def remove_memory(self) -> None:
        """Removes shared memory of killed roles, because their successors use the same names."""
        if self._first:
            remove_segments(self.segment)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Runs the body. If another process does not answer, raises an error that names the lost process."""
        try:
            yield
        except (RuntimeError, WireError, WireTimeout) as error:
            if isinstance(error, GirihError) and not isinstance(error, WireError | WireTimeout):
                raise
            failure = self._error
            if failure is None and self._roles is not None and self._first:
                failure = self._roles.failure()
            if failure is not None:
                raise failure from None
            if "gloo" in str(error) or "NCCL" in str(error):
                first_line = str(error).splitlines()[0]
                raise RoleError(f"another trainer is gone, or cannot be reached: {first_line}") from error
            raise

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Runs the body, then ends all processes.

        If the body fails because a process is gone, the error names the process.
        """
        try:
            with self.explaining():
                yield self
            self.close()
        except BaseException:
            self.close(failed=True)
            raise

    @contextmanager
    def handle_stop(self, on_stop: Callable[[], None]) -> Iterator[bool]:
        """Makes a signal to the launcher call ``on_stop`` from another thread, and not end the run at once.

        Yields:
            True if there is a launcher, which handles signals.
        """
        if isinstance(self._roles, LauncherControl):
            with self._roles.handle_stop(on_stop):
                yield True
        else:
            yield False

    def show_in(self, run: Path | None, metrics: MetricsOptions | None = None) -> None:
        """Keeps ``processes.json`` in a run's directory during the run. Roles started later write status files there."""
        self._place = StatusTarget(None if run is None else run.absolute(), metrics or MetricsOptions())
        if self._roles is not None and self._first:
            self._roles.show_in(run)
        self._run = run

    def close(self, *, failed: bool = False) -> None:
        """Ends all started processes. Unless the run failed, all trainers call it together."""
        if self._closed.is_set():
            return
        try:
            if not failed:
                failed = True  # stays true if the barrier fails
                with self.explaining():
                    self.ranks.barrier()
                failed = False
        finally:
            self._closed.set()
            self._end_all(failed=failed)

    def _end_all(self, *, failed: bool) -> None:
        ranks, registry = self.ranks, self.registry
        if self._supervisor is not None:
            self._supervisor.expect_end()
        if not failed and self._under_torchrun:
            left = registry.add("left", 1)
            until = time.monotonic() + LEAVE_S
            while self._server is not None and left < ranks.size and time.monotonic() < until:
                time.sleep(0.01)  # the others are still in the last barrier, and need this registry
                left = registry.add("left", 0)
        ranks.close()
        if self._supervisor is not None:
            self._supervisor.close(patience_s=0.5 if failed else 10.0)
            remove_segments(self.segment)  # of killed processes
        registry.close()
        if self._server is not None:
            self._server.close()

    def _join_launcher(self, pipe: Pipe, rank: int, size: int) -> None:
        self._roles = control = LauncherControl(pipe, self._lose)
        num_threads = control.hello.get("threads") or max(1, torch.get_num_threads() // size)
        torch.set_num_threads(num_threads)
        self._hosts = {title: HostSpec(host=host) for title, host in control.hello.get("hosts", {}).items()}
        self._first, self._bind = rank == 0, control.hello["bind"]
        self.incarnation = int(control.hello["incarnation"])
        with self.explaining():
            self._meet(rank, size, control.hello)

    def _join_torchrun(self, rank: int, size: int) -> None:
        """Joins trainers that torchrun started. Rank 0 serves a registry, and torchrun's store has its address."""
        store, share = torchrun_store(size, self._bind, encrypt=self._encrypt)
        self._first, self._under_torchrun = rank == 0, True
        with share(store, self._hello() if self._first else None) as hello:
            self._meet(rank, size, hello)  # after that, all ranks have read it

    def _meet(self, rank: int, size: int, hello: Mapping[str, str]) -> None:
        """Forms the group of all trainers, through the registry that ``hello`` names."""
        self.secret, self.segment = hello["secret"].encode(), hello["segments"]
        self.registry = RemoteRegistry(hello["registry"], self.secret)
        self._register(rank)
        name = (
            f"trainers.{self.incarnation}" if self.incarnation else "trainers"
        )  # a new name for each incarnation
        host = one_host(self.registry, rank, size, self._bind) if self._encrypt else self._bind
        self.ranks = TrainerGroup(rank, size, self.registry, host=host, name=name)

    def _register(self, rank: int) -> None:
        entry = Entry("", self.incarnation, os.getpid(), socket.gethostname())
        register(self.registry, RoleName.TRAINER, rank, entry)

    def _hello(self) -> dict[str, str]:
        address, secret = self._serve_registry().address, self.secret.decode()
        hello = {"registry": address, "secret": secret, "segments": self.segment, "bind": self._bind}
        return {**hello, "place": self._place.to_text()}

    def _serve_registry(self) -> RegistryServer:
        if self._server is None:
            self._server = RegistryServer(LocalRegistry(), self.secret, self._bind, encrypt=self._encrypt)
            self.registry = RemoteRegistry(self._server.address, self.secret)
        return self._server

    def _starter(self) -> Roles:
        return self._roles or self.supervise(self.ranks.size)

    def supervise(self, num_trainers: int, trainer: Sequence[str] = ()) -> Supervisor:
        """Makes this process trainer 0, which supervises the processes of the run.

        Args:
            trainer: the command of another trainer, if this process starts them.
        """
        launcher = LocalLauncher(self._hosts, trainer=trainer, num_trainers=num_trainers, hello=self._hello())
        registry = self._serve_registry().registry
        supervisor = Supervisor(
            launcher, registry, self._lose, num_trainers=num_trainers, max_restarts=self._max_restarts
        )
        self._roles = self._supervisor = supervisor
        if num_trainers == 1:
            self._register(0)
        supervisor.show_in(self._run)
        return supervisor

    def _lose(self, error: Exception) -> None:
        """Records that a process is gone, and ends everything that waits for it. Called by a thread."""
        self._error = self._error or error
        self.ranks.lost.set()
        if not self._closed.wait(GRACE_S):
            self.ranks.abort()
            abort_clients(self.secret)
            if self.ranks.size == 1:  # it may still wait for the others
                self.registry.close()
