"""Local processes: started, watched, ended. None outlives the one that started it, however that ends."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from girih.cluster.hosts import Hosts, host_of
from girih.cluster.roles import Role
from girih.errors import ConfigError, RoleError, named

START_S = 120.0
END_S = 10.0
LAST_LINES = 12
STOPPED = 130  # the status of a trainer that a signal ended in good order


@dataclass
class Child:
    """One process that was started."""

    name: str
    index: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    address: str = ""
    told: str | None = None
    ending: bool = False

    @property
    def title(self) -> str:
        """As ``embedding-server 1``."""
        return f"{self.name} {self.index}"

    def why(self) -> str:
        """What it said last."""
        if self.told is not None:
            return self.told
        try:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
        except ValueError:  # closed meanwhile
            return ""
        return "\n".join(lines[-LAST_LINES:])


class Supervisor:
    """Starts processes, and tells when one of them fails.

    Args:
        failed: called once, by a thread, with the error to raise; all others are ended by then.
        hosts: where each is to run.
    """

    def __init__(self, failed: Callable[[Exception], None], hosts: Hosts | None = None) -> None:
        self._failed = failed
        self._places = hosts or {}
        self._children: list[Child] = []
        self._prepared: dict[tuple[str, int], Child] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def children(self) -> tuple[Child, ...]:
        """All that were started."""
        return tuple(self._children)

    def prepare(self, counts: Mapping[str, int]) -> None:
        """Starts processes for roles that :meth:`start` will name: they load what they need meanwhile."""
        for name, count in counts.items():
            for index in range(count):
                self._prepared[name, index] = self._begin(name, index)

    def start(self, roles: Sequence[Role]) -> list[str]:
        """Starts roles side by side; returns where they listen.

        Raises:
            RoleError: one could not begin.
        """
        started = []
        for role in roles:
            child = self._prepared.pop((role.name, role.index), None) or self._begin(role.name, role.index)
            content = pickle.dumps(role)
            pipe = child.process.stdin
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.write(len(content).to_bytes(8, "little") + content)
                    pipe.flush()
            started.append(child)
        until = time.monotonic() + START_S
        for child in started:
            listening = threading.Thread(target=self._listen, args=(child,), name="girih-role", daemon=True)
            listening.start()
            while not child.address and listening.is_alive() and time.monotonic() < until:
                listening.join(0.005)
            if not child.address:
                child.process.kill()
                child.process.wait()
                listening.join(1.0)
                why = child.why()
                raise named(why) or RoleError(f"{child.title} could not begin: {why}")
        return [child.address for child in started]

    def start_trainer(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts another trainer: the same command with a rank of its own."""
        self._spawn("trainer", index, command, {**os.environ, **environment}, stdout=subprocess.DEVNULL)

    def end(self, name: str) -> None:
        """Ends all roles of one kind, which the run goes on without."""
        self._end([child for child in self._children if child.name == name], END_S)

    def close(self, *, patience_s: float = END_S) -> None:
        """Ends all: they are told by the end of their input, then killed."""
        self._closing.set()
        self._end(list(self._children), patience_s)

    def _end(self, children: Sequence[Child], patience_s: float) -> None:
        for child in children:
            child.ending = True
            if child.process.stdin is not None:
                with contextlib.suppress(OSError):
                    child.process.stdin.close()
        until = time.monotonic() + patience_s
        for child in children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()
            child.errors.close()
            self._children.remove(child)

    def wait_for_trainers(self, patience_s: float = END_S) -> None:
        """Returns when the other trainers have ended by themselves, or after a while."""
        until = time.monotonic() + patience_s
        for child in self._children:
            if child.name == "trainer":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, until - time.monotonic()))

    def has_failed(self) -> bool:
        """Whether a process ended that should not have, told of or not."""
        return any(c.process.poll() not in (None, 0, STOPPED) and not c.ending for c in self.children)

    def expect_end(self) -> None:
        """From here on, processes that end are no failure."""
        self._closing.set()

    def _begin(self, name: str, index: int) -> Child:
        """A process that waits for its role."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(variable, None)  # a role is no trainer
        command = [sys.executable, "-m", "girih.cluster.child", name]
        return self._spawn(name, index, command, environment, stdout=subprocess.PIPE)

    def _spawn(
        self, name: str, index: int, command: Sequence[str], environment: dict[str, str], *, stdout: int
    ) -> Child:
        host_spec = host_of(self._places, name, index)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the child)
        process = subprocess.Popen(
            [*host_spec.command, *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=errors,
            env={**environment, **host_spec.environment},
            start_new_session=True,  # the terminal's signals are for the one that started it
        )
        child = Child(name, index, process, errors)
        self._children.append(child)
        threading.Thread(target=self._watch, args=(child,), name="girih-watch", daemon=True).start()
        return child

    def _listen(self, child: Child) -> None:
        """Hears what a role tells until it ends."""
        if child.process.stdout is None:
            return
        with contextlib.suppress(ValueError):  # closed
            for line in child.process.stdout:
                told: dict[str, Any] = json.loads(line)
                child.told = told.get("error", child.told)
                child.address = told.get("address", child.address)

    def _watch(self, child: Child) -> None:
        status = child.process.wait()
        if (status in (0, STOPPED) and child.name == "trainer") or child.ending or self._closing.is_set():
            return
        time.sleep(0.2)  # its last words may be on their way
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        if status >= 0:  # it may have ended because another was killed
            killed = [c for c in self.children if (c.process.poll() or 0) < 0 and not c.ending]
            child, status = (killed[0], killed[0].process.returncode) if killed else (child, status)
        why = child.why()
        for other in self.children:
            if other is not child:
                other.process.kill()
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        error: Exception = named(why) or RoleError(f"{child.title} {ended}" + (f": {why}" if why else ""))
        if status == 2 and why.startswith("girih: "):  # the user's mistake, as this process would tell it
            error = ConfigError(why.splitlines()[-1].removeprefix("girih: "))
        self._failed(error)
