"""Names of shared memory and temporary directories, and the removal of those that killed processes left.

A name begins with the run's name. It identifies the owner, if the system allows: ``girih-PID.START.NAMESPACE-RANDOM``. If all
processes of a run are killed at once, the next run on this host removes the leftovers, from any run directory. A run on
several nodes has no owner that all nodes can see. Instead each process locks a file as long as it lives, and the next
process that starts on the node removes files without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
_NAME = re.compile(r"girih-(\d+)\.(\d+)\.(\d+)-")
_HELD = re.compile(r"(girih-nodes-[0-9a-f]+)\.(.+)\.held")


def new_prefix() -> str:
    """Returns a prefix for names of a run's shared memory, owned by this process. Removes dead owners' leftovers."""
    for name in _names():
        if _is_of_dead_owner(name):
            _remove(name)
    temporary = Path(tempfile.gettempdir())
    for name in os.listdir(temporary):
        if _is_of_dead_owner(name):
            shutil.rmtree(temporary / name, ignore_errors=True)
    return f"{owned_by(os.getpid()) or 'girih-'}{secrets.token_hex(4)}"


def new_prefix_of_nodes() -> str:
    """Returns a prefix for the names of shared memory of a run on several nodes. Its processes :func:`hold` it."""
    return f"girih-nodes-{secrets.token_hex(8)}"


def hold(prefix: str, who: str) -> int | None:
    """Returns a descriptor that holds a run's shared memory on this node for a process; None if that is impossible.

    First it removes the shared memory of any run that no process holds any more.
    """
    matches = [match for name in _names() if (match := _HELD.fullmatch(name))]
    held = {match[1] for match in matches if _is_locked(match[0])}
    for match in matches:
        if match[1] not in held:
            remove_segments(match[1])
    if not (prefix and os.path.isdir(SHARED_MEMORY)):
        return None
    descriptor = os.open(os.path.join(SHARED_MEMORY, f"{prefix}.{who}.held"), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _is_locked(name: str) -> bool:
    try:
        descriptor = os.open(os.path.join(SHARED_MEMORY, name), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def owned_by(pid: int) -> str:
    """Returns the prefix of the names that a process owns; "" if the system does not report its start."""
    return owner_prefix(pid, start_of(pid))


def owner_prefix(pid: int, start: str) -> str:
    """Returns the same prefix for a process that may have ended, from its start; "" if the start is not known."""
    return f"girih-{pid}.{start}.{_namespace()}-" if start else ""


def temporary_directory(purpose: str) -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary directory with its purpose and its owner in its name."""
    return tempfile.TemporaryDirectory(prefix=f"{owned_by(os.getpid()) or 'girih-'}{purpose}-")


def remove_segments(prefix: str) -> None:
    """Removes all shared memory whose names begin with a prefix, if the system can list it."""
    for name in _names() if prefix else ():
        if name.startswith(prefix):
            _remove(name)


def start_of(pid: int | str) -> str:
    """Returns a process's start in ticks since the boot, which identifies a reused pid; "" if it has ended."""
    fields = stat_fields(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def stat_fields(pid: int | str) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the state on; without /proc, empty fields for a live process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return []
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return []
    except OSError:
        pass
    return ["R", *[""] * 20]


def _is_of_dead_owner(name: str) -> bool:
    owner = _NAME.match(name)
    return owner is not None and owner[3] == _namespace() and start_of(owner[1]) != owner[2]


def _names() -> list[str]:
    return os.listdir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else []


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(SHARED_MEMORY, name))


def _namespace() -> str:
    """Returns the pid namespace of this process. Containers may share memory, but not pids."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""
