"""The processes of one run: the trainers among themselves, and the roles that rank 0 has started."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from girih.cluster.hosts import Hosts, host_of
from girih.cluster.launchers.local import Supervisor
from girih.cluster.roles import Role
from girih.comm.context import RunContext
from girih.comm.group import TrainerGroup
from girih.errors import ConfigError, GirihError, RoleError, WireError, WireTimeout
from girih.runs.files import write_whole
from girih.store import remove_segments

MEETING = "girih/{}"
_MEETINGS = itertools.count()  # of this process's trainers: the same on all ranks of a script
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 2.0
AGAIN_S = 8.0
SOON_S = 0.2
KNOWN_S = 1.5
TOLD_S = 30.0
MOST_TIMES = 4


class Cluster:
    """This trainer's context, and what it takes to end it.

    Made by :meth:`join` or :meth:`found`; to be closed.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        supervisor: Supervisor | None = None,
        failure: _Failure | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._supervisor, self._failure, self._places = supervisor, failure, hosts or {}
        if failure is not None:
            ranks.lost = failure.known_of
        secret = ranks.broadcast(secrets.token_hex(16)) if ranks.size > 1 else secrets.token_hex(16)
        self.context = RunContext(ranks=ranks, secret=secret.encode(), host=self.host("trainer", ranks.rank))
        self.segment = f"girih-{secrets.token_hex(4)}"
        """Begins the names of the shared memory of all that rank 0 has started."""
        self._file: Path | None = None

    @property
    def ranks(self) -> TrainerGroup:
        """This trainer among all."""
        return self.context.ranks

    @property
    def secret(self) -> bytes:
        """Proves that a peer belongs to the run."""
        return self.context.secret

    @classmethod
    def join(cls, trainers: int) -> Cluster:
        """The context of a process that ``torchrun``, or another trainer, has started; or of one alone.

        Args:
            trainers: how many there are, by the strategy; 1 takes as many as were started.

        Raises:
            ConfigError: another number was started.
        """
        if not all(name in os.environ for name in RENDEZVOUS):
            if trainers > 1:
                raise ConfigError(
                    f"strategy: trainers = {trainers}: this is one process; start the script by"
                    f" torchrun --nproc-per-node={trainers}, or use girih train"
                )
            return cls(TrainerGroup())
        size = int(os.environ["WORLD_SIZE"])
        if trainers not in (1, size):
            raise ConfigError(
                f"strategy: trainers = {trainers}, but {size} were started; leave it out, or make them agree"
            )
        rank = int(os.environ["RANK"])
        store: Store | None = None
        if size > 1:
            met, _, _ = next(rendezvous("env://"))
            store = PrefixStore(
                f"girih/{next(_MEETINGS)}", met
            )  # what an earlier trainer of a script left is not for us
        ranks = TrainerGroup(rank, size, store)
        return cls(ranks)

    @classmethod
    def found(
        cls,
        trainers: int,
        command: Sequence[str],
        *,
        hosts: Hosts | None = None,
    ) -> Cluster:
        """Starts all trainers but this one, which becomes rank 0.

        Args:
            command: arguments of ``girih`` that make one of them.
            hosts: where all processes of the run live; this one must be in that of trainer 0 already.
        """
        supervisor, failure = _supervised(hosts)
        host = host_of(hosts or {}, "trainer", 0).host
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        threads = max(1, torch.get_num_threads() // trainers)
        torch.set_num_threads(threads)
        for rank in range(1, trainers):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(trainers),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(store.port),
                "OMP_NUM_THREADS": str(threads),
                STARTED_BY_GIRIH: "1",
            }
            supervisor.start_trainer(rank, [sys.executable, "-m", "girih", *command], environment)
        try:
            met = PrefixStore(MEETING.format(0), store)  # the others' first
            return cls(TrainerGroup(0, trainers, met), supervisor, failure, hosts)
        except BaseException:
            supervisor.close(patience_s=0.0)
            failure.close()
            raise

    def host(self, name: str, index: int) -> str:
        """Where a process listens."""
        return host_of(self._places, name, index).host

    def prepare(self, counts: Mapping[str, int]) -> None:
        """Has rank 0 start processes that :meth:`start` will give roles."""
        if counts and self.context.ranks.first:
            self._supervise().prepare(counts)

    def start(self, name: str, roles: Callable[[], Sequence[Role]]) -> tuple[str, ...]:
        """Has rank 0 start roles; returns where they listen, on all ranks.

        Raises:
            RoleError: one could not begin.
        """
        ranks = self.context.ranks
        found = self._supervise().start(roles()) if ranks.first else None
        addresses: tuple[str, ...] = tuple(ranks.broadcast(found))
        self.context = replace(self.context, addresses={**self.context.addresses, name: addresses})
        self._write_processes()
        return addresses

    def end(self, name: str) -> None:
        """Ends roles of one kind; the run goes on."""
        if self._supervisor is not None:
            self._supervisor.end(name)
            self._write_processes()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Says which process is gone, where all that is known is that one does not answer."""
        try:
            yield
        except (RuntimeError, WireError, WireTimeout) as error:
            if isinstance(error, GirihError) and not isinstance(error, WireError | WireTimeout):
                raise
            found = self._found_out()
            if found is not None:
                raise found from None
            if "gloo" in str(error) or "NCCL" in str(error):
                first_line = str(error).splitlines()[0]
                raise RoleError(f"another trainer is gone, or cannot be reached: {first_line}") from error
            raise

    def _found_out(self) -> Exception | None:
        """Which process failed, if one did: a machine may be too busy to tell at once."""
        if self._failure is None or self._supervisor is None:
            return None
        found = self._failure.known(KNOWN_S)
        return self._failure.known(TOLD_S) if found is None and self._supervisor.has_failed() else found

    def show_in(self, run: Path | None) -> None:
        """Keeps ``processes.json`` in a run's directory while it runs."""
        self._file = None if run is None else run / "processes.json"
        self._write_processes()

    def close(self, *, failed: bool = False) -> None:
        """Ends what was started; in good order, all trainers come here together."""
        try:
            if not failed:
                failed = True  # unless all come
                with self.explaining():
                    self.context.ranks.barrier()
                failed = False
        finally:
            if self._failure is not None:
                self._failure.close()  # what it would raise from here on would leave something behind
            self._end_all(failed=failed)

    def _end_all(self, *, failed: bool) -> None:
        if self._supervisor is not None:
            self._supervisor.expect_end()
        self.context.ranks.close()
        if self._supervisor is not None:
            if not failed:
                self._supervisor.wait_for_trainers()
            self._supervisor.close(patience_s=0.5 if failed else 10.0)
            remove_segments(self.segment)  # of those that were killed
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _supervise(self) -> Supervisor:
        if self._supervisor is None:
            self._supervisor, self._failure = _supervised(self._places)
            self.context.ranks.lost = self._failure.known_of
        return self._supervisor

    def _write_processes(self) -> None:
        if self._file is None or self._supervisor is None:
            return
        own = {"role": "trainer", "index": 0, "pid": os.getpid(), "endpoint": ""}
        others = [
            {"role": c.name, "index": c.index, "pid": c.process.pid, "endpoint": c.address}
            for c in self._supervisor.children
        ]
        host = socket.gethostname()
        processes: list[dict[str, Any]] = [{**process, "host": host} for process in (own, *others)]
        write_whole(self._file, json.dumps(processes, indent=1) + "\n")


STARTED_BY_GIRIH = "GIRIH_STARTED"


def end_with_parent() -> None:
    """In a trainer that another one has started: ends this process once that one is gone."""

    def watch() -> None:
        while os.read(0, 1 << 12):
            pass
        time.sleep(GRACE_S + 10.0)
        os._exit(1)

    threading.Thread(target=watch, name="girih-parent", daemon=True).start()


class _Failure:
    """Raises in the main thread what another thread has found."""

    def __init__(self) -> None:
        self.known_of = threading.Event()
        """Set once there is something to raise."""
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._swallowed = threading.Event()
        self._main = threading.main_thread().ident
        self._previous: Any = None
        self._previous_hook = sys.unraisablehook
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR1, self._raise)
            sys.unraisablehook = self._hear_of

    def known(self, patience_s: float) -> Exception | None:
        """What was told, now or soon."""
        self.known_of.wait(patience_s)
        return self._error

    def tell(self, error: Exception) -> None:
        self._error = error
        self.known_of.set()
        self._ended.wait(GRACE_S)  # it may find out by itself what went wrong, and then says it better
        for _ in range(MOST_TIMES):
            if self._ended.is_set() or self._previous is None or self._main is None:
                return
            self._swallowed.clear()
            signal.pthread_kill(self._main, signal.SIGUSR1)
            if self._swallowed.wait(AGAIN_S):
                self._ended.wait(SOON_S)  # until it is freed

    def close(self) -> None:
        self._ended.set()
        self._swallowed.set()
        if self._previous is not None:
            signal.signal(signal.SIGUSR1, self._previous)
            sys.unraisablehook = self._previous_hook
            self._previous = None

    def _raise(self, number: int, frame: object) -> None:
        if self._error is not None and not self._ended.is_set():
            raise self._error

    def _hear_of(self, lost: Any) -> None:
        """What is raised while memory is freed gets lost: that is no news, and it is raised again."""
        if lost.exc_value is not None and lost.exc_value is self._error:
            self._swallowed.set()
        else:
            self._previous_hook(lost)


def _supervised(hosts: Hosts | None) -> tuple[Supervisor, _Failure]:
    failure = _Failure()
    return Supervisor(failure.tell, hosts), failure
