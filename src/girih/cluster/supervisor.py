"""Starts and watches the processes of roles, and reports which process failed."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from girih.cluster.launchers.launcher import Handle, Launcher
from girih.cluster.roles import FAIL, FailurePolicy, RestartPolicy, RestartRules, RoleName
from girih.comm.registry import Entry, Registry, find, key_of, register
from girih.errors import ConfigError, RoleError, named
from girih.files.whole import write_whole
from girih.runs.directory import PROCESSES

START_S = 120.0
END_S = 10.0
POLL_S = 0.05
KNOWN_S = 6.0
REASON_S = 30.0
STOPPED = 130
"""The status of a trainer that ended cleanly after a signal."""


class ProcessesFile:
    """Keeps ``processes.json`` in a run's directory.

    Args:
        registry: lists the processes.
        num_trainers: number of trainers, which the file lists first.
    """

    def __init__(self, registry: Registry, num_trainers: int) -> None:
        self._registry, self._num_trainers = registry, num_trainers
        self._path: Path | None = None

    def show_in(self, run: Path | None) -> None:
        """Sets the run's directory. None removes the file."""
        if self._path is not None and run is None:
            self._path.unlink(missing_ok=True)
        self._path = None if run is None else run / PROCESSES

    def write(self, handles: Sequence[Handle]) -> None:
        """Writes the trainers and the roles that listen."""
        if self._path is None:
            return
        keys = [(RoleName.TRAINER, index) for index in range(self._num_trainers)]
        keys += [h.key for h in list(handles) if h.name != RoleName.TRAINER and h.address]
        processes = []
        for name, index in keys:
            entry = find(self._registry, name, index)
            if entry is not None:
                known = asdict(entry)
                endpoint = known.pop("address")
                processes.append({"role": str(name), "index": index, "endpoint": endpoint, **known})
        write_whole(self._path, json.dumps(processes, indent=1) + "\n")


class Supervisor:
    """The roles of a run, started by one launcher, and the trainers except the first.

    Args:
        registry: receives the addresses of roles. Trainers register themselves.
        failed: called once, by a thread, with the error, after all other roles were ended.
        num_trainers: number of trainers in ``processes.json``.
        max_restarts: how often each process of a role may restart.
        may_restart_all: called by a thread when a process failed. True if all trainers restart, so that the run goes
            on.

    Attributes:
        handles: processes that were started and not ended since.
        deaths: role and index → number of kills after which the process restarted.
    """

    def __init__(
        self,
        launcher: Launcher,
        registry: Registry,
        failed: Callable[[Exception], None],
        *,
        num_trainers: int = 1,
        max_restarts: int = 0,
        may_restart_all: Callable[[], bool] = lambda: False,
    ) -> None:
        self._may_restart_all = may_restart_all
        self._launcher, self._registry, self._failed = launcher, registry, failed
        self._rules = RestartRules(max_restarts)
        self.deaths = self._rules.deaths
        self.handles: list[Handle] = []
        self._prepared: dict[tuple[str, int], Handle] = {}
        self._starting: dict[tuple[str, int], tuple[Handle, bytes]] = {}  # not listening yet
        self._ending: set[Handle] = set()
        self._kept: set[str] = set()
        self._begun: dict[tuple[str, int], bytes] = {}  # the roles of processes that have listened
        self._error: Exception | None = None
        self._closing, self._known = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._file = ProcessesFile(registry, num_trainers)

    @property
    def restarts(self) -> Mapping[str, int]:
        """Restarts of killed processes, by role."""
        return self._rules.restarts

    def prepare(self, counts: Mapping[str, int], *, again: bool = False) -> None:
        """Starts processes for the roles of a later :meth:`start`. Meanwhile they load their modules.

        Args:
            again: True if the roles were ended and will restart, which a launcher does not prepare by itself.
        """
        for name, count in counts.items():
            for index in range(count):
                if (name, index) not in self._prepared:
                    self._prepared[name, index] = self._launch(RoleName(name), index)

    def start(self, name: str, specs: Sequence[bytes], failure_policy: FailurePolicy = FAIL) -> list[str]:
        """Starts all processes of a role at the same time. Returns their addresses.

        Args:
            specs: a pickled :class:`girih.comm.service.Service` for each process.
            failure_policy: the consequence for the run when one of them is killed after it has begun.

        Raises:
            RoleError: a process could not begin.
        """
        self._rules.policies[name] = failure_policy
        if name in self._kept:  # restarted trainers find the processes that outlived them
            self._kept.remove(name)
            kept = sorted((h for h in list(self.handles) if h.name == name), key=lambda handle: handle.index)
            for survivor in kept:  # a survivor may have been killed meanwhile
                survivor.wait_for_address(START_S)
            return [survivor.address for survivor in kept]
        keys = [(name, index) for index in range(len(specs))]
        try:
            for key, spec in zip(keys, specs, strict=True):
                with self._lock:
                    handle = self._prepared.pop(key, None) or self._launch(RoleName(name), key[1])
                    self._starting[key] = handle, spec
                    handle.begin(spec)
            until, started = time.monotonic() + START_S, list[Handle]()
            while not self._have_begun(keys, started):
                started = [self._listening(key, until) for key in keys]
        finally:
            with self._lock:
                for key in keys:
                    self._starting.pop(key, None)
        self._file.write(self.handles)
        return [handle.address for handle in started]

    def start_trainer(self, index: int, incarnation: int = 0) -> Handle:
        """Starts a trainer other than the first, which is not supervised here."""
        return self._launch(RoleName.TRAINER, index, None, incarnation)

    def end(self, name: str) -> None:
        """Ends all processes of one role. The run goes on without them."""
        self._end_processes(self._claim(lambda handle: handle.name == name), END_S)
        self._file.write(self.handles)

    def kill_all_but(self, kept: Collection[str]) -> None:
        """Ends all processes at once, except those of some roles, which :meth:`start` then finds unchanged."""
        self._prepared.clear()
        self._kept = set(kept)
        ended = self._claim(lambda handle: handle.name not in kept)
        for handle in ended:
            handle.kill()
        self._end_processes(ended, END_S)

    def has_all(self, name: str) -> bool:
        """Returns whether a role has processes, and all of them listen and live."""
        matches = [handle for handle in self.handles if handle.name == name]
        return bool(matches) and all(handle.address and handle.status() is None for handle in matches)

    def killed_for_all(self) -> list[Handle]:
        """Returns killed processes that require a restart of all trainers.

        These are trainers other than the first, and processes of roles with the policy ``RELOAD_ALL``.
        """
        return [handle for handle in list(self.handles) if self._is_for_all(handle)]

    def count_before_all_end(self, killed: Handle) -> None:
        """Counts the death that makes all trainers restart, and other new deaths of processes that restart alone."""
        with self._lock:
            for handle in {killed, *self.handles}:
                restarts = self._rules.policy_of(handle.name) is RestartPolicy.RESTART
                is_new = was_killed(handle) and handle not in self._ending
                if handle is killed or (restarts and is_new):
                    self.deaths[handle.key] += 1
                    self._ending.add(handle)

    def _is_for_all(self, handle: Handle) -> bool:
        if not was_killed(handle) or handle in self._ending:
            return False
        reloads_all = self._rules.policy_of(handle.name) is RestartPolicy.RELOAD_ALL
        return handle.name == RoleName.TRAINER or (reloads_all and handle.key in self._begun)

    def close(self, *, patience_s: float = END_S) -> None:
        """Ends all processes: asks them to end (trainers end by themselves), then kills them."""
        self._closing.set()
        self._end_processes(self._claim(lambda _: True), patience_s)
        self.show_in(None)

    def expect_end(self) -> None:
        """Declares that processes that end from here on are no failure."""
        self._closing.set()

    def failure(self) -> Exception | None:
        """Returns the error of the failed process, if any. Waits, because a busy machine may report it late."""
        self._known.wait(KNOWN_S)
        if self._error is None and self._has_failed():
            self._known.wait(REASON_S)
        return self._error

    def show_in(self, run: Path | None) -> None:
        """Keeps ``processes.json`` in a run's directory until :meth:`close`, or until this is called with None."""
        self._file.show_in(run)
        self._file.write(self.handles)

    def _has_failed(self) -> bool:
        return any(self._is_failure(handle, handle.status()) for handle in list(self.handles))

    def _is_failure(self, handle: Handle, status: int | None) -> bool:
        expected = status in (0, STOPPED) and handle.name == RoleName.TRAINER
        return not (status is None or expected or handle in self._ending)

    def _why_not_begun(self, handle: Handle) -> Exception:
        """Returns the error for a process that did not report its address.

        If the run has failed, this is the error of the run, because this process often ended as a consequence.
        """
        if handle not in self._ending and handle.wait(END_S) is None:
            handle.kill()
            handle.wait()
            return RoleError(f"{handle.title} did not begin within {START_S:.0f} s")
        return (None if handle in self._ending else self.failure()) or error_of(handle)

    def _listening(self, key: tuple[str, int], until: float) -> Handle:
        """Returns the process of a role when it listens, or its replacement if it was killed before.

        Raises:
            RoleError: no process listens in time.
        """
        while True:
            handle = self._starting[key][0]
            if handle.wait_for_address(until - time.monotonic()):
                return handle
            while self._starting[key][0] is handle:
                is_over = handle in self._ending or self._closing.is_set()
                if is_over or handle.status() is None or time.monotonic() > until:
                    raise self._why_not_begun(handle)
                time.sleep(POLL_S)  # another thread decides if the process is replaced

    def _have_begun(self, keys: Sequence[tuple[str, int]], started: Sequence[Handle]) -> bool:
        """Registers processes that all listen; False if one of them was replaced meanwhile."""
        with self._lock:
            if [self._starting[key][0] for key in keys] != list(started):
                return False
            for key, handle in zip(keys, started, strict=True):
                register_process(self._registry, handle)
                self._begun[key] = self._starting[key][1]
        return True

    def _launch(self, name: RoleName, index: int, threads: int | None = 1, incarnation: int = 0) -> Handle:
        handle = self._launcher.start(name, index, incarnation, threads)
        self.handles.append(handle)
        threading.Thread(target=self._watch, args=(handle,), name="girih-watch", daemon=True).start()
        return handle

    def _claim(self, wanted: Callable[[Handle], bool]) -> list[Handle]:
        """Marks processes for their end, so that none of them is replaced. Returns them."""
        with self._lock:
            matches = [handle for handle in self.handles if wanted(handle)]
            self._ending.update(matches)
            for handle in matches:
                self._begun.pop(handle.key, None)
        return matches

    def _end_processes(self, handles: Sequence[Handle], patience_s: float) -> None:
        """Asks processes to end, and kills those that do not end in time."""
        for handle in handles:
            handle.end()
        until = time.monotonic() + patience_s
        for handle in handles:
            if handle.wait(max(0.0, until - time.monotonic())) is None:
                handle.kill()
                handle.wait()
            handle.close()
            self.handles.remove(handle)
            self._registry.delete(key_of(*handle.key))

    def _watch(self, handle: Handle) -> None:
        if not self._is_failure(handle, handle.wait()) or self._closing.is_set():
            return
        time.sleep(0.2)  # its last words may be on their way
        with self._lock:
            if self._closing.is_set() or handle in self._ending:
                return
            if self._may_restart_all():
                return
            another = self._replace(handle)
            if another is None:
                self._end_run(handle)
                return
        self._bring_back(another, handle)

    def _replace(self, handle: Handle) -> Handle | None:
        """Replaces a killed process; None if the run ends. A process that had not begun keeps its incarnation."""
        key = handle.key
        starting, spec = self._starting.get(key, (None, None))
        is_unknown = handle in (starting, self._prepared.get(key))
        spec = spec if is_unknown else self._begun.get(key)
        begun = not is_unknown and spec is not None
        if not (was_killed(handle) and (is_unknown or begun) and self._rules.may_restart(*key, begun=begun)):
            return None
        try:
            another = self._launch(*handle.key, incarnation=handle.incarnation + begun)
        except OSError:  # the system cannot start more processes
            return None
        self.deaths[key] += 1
        self.handles.remove(handle)
        if starting is handle and spec is not None:
            self._starting[key] = another, spec
        elif is_unknown:
            self._prepared[key] = another
        if spec is not None:
            another.begin(spec)
        return another

    def _bring_back(self, another: Handle, killed: Handle) -> None:
        """Registers and logs a process that replaces a killed one. Another thread watches for its death."""
        why, event = error_of(killed), "it is restarted"
        killed.close()
        if another.incarnation > killed.incarnation:
            if not another.wait_for_address(None):
                return
            with self._lock:
                if another in self._ending or another not in self.handles or self._closing.is_set():
                    return
                register_process(self._registry, another)
                self._file.write(self.handles)
            event = "it came back" + (f"; {another.recovery_note}" if another.recovery_note else "")
        count = f"restart {self.deaths[killed.key]} of at most {self._rules.max_restarts}"
        print(f"girih: {why}; {event} ({count})", file=sys.stderr, flush=True)

    def _end_run(self, handle: Handle) -> None:
        self._closing.set()
        if not was_killed(handle):  # it may have ended because another process was killed
            killed = [
                other for other in list(self.handles) if was_killed(other) and other not in self._ending
            ]
            handle = killed[0] if killed else handle
        why = (
            self._rules.why_ending(*handle.key, begun=handle.key in self._begun) if was_killed(handle) else ""
        )
        self._error = error_of(handle, why)
        for other in list(self.handles):
            if other is not handle:
                other.kill()
        self._known.set()
        self._failed(self._error)


def was_killed(handle: Handle) -> bool:
    """Returns whether a signal ended a process."""
    return (handle.status() or 0) < 0


def register_process(registry: Registry, handle: Handle) -> None:
    """Registers a process's address."""
    entry = Entry(handle.address, handle.incarnation, handle.pid, handle.host)
    register(registry, *handle.key, entry)


def rows_kept_in(life: int) -> str:
    """Returns the registry's key which says that servers kept their rows for this incarnation of the trainers."""
    return f"rows/{life}"


def error_of(handle: Handle, more: str = "") -> Exception:
    """Returns the error for the end of a process; ``more`` is added if a signal killed it."""
    status, why = handle.status() or 0, handle.last_words()
    if status == 2 and why.startswith("girih: "):  # the user's mistake, in that process's words
        return ConfigError(why.splitlines()[-1].removeprefix("girih: "))
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    reason = (f": {why}" if why else "") + (f"; {more}" if more else "")
    return named(why) or RoleError(f"{handle.title} {ended}{reason}")
