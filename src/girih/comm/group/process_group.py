"""Process groups of ``torch.distributed`` that need no default group, and that can be aborted.

gloo has no abort, so a blocked call blocks until its timeout. But gloo fails immediately when a connection ends. So
abort shuts down this process's connections of the group. It finds them by port: the local or the remote port is the
port at which the group's device listens.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from girih.comm.registry import WAIT_S, Registry

PATIENCE = datetime.timedelta(minutes=30)
"""The longest time that a trainer waits for other trainers. They may be evaluating or saving."""


class AbortableGroup:
    """A process group of gloo for tensors on CPUs and, if available, of NCCL for tensors on GPUs.

    Args:
        store: the store through which the ranks find each other. No other group may have used it.
        host: the host at which gloo listens. With None, gloo chooses the host (``GLOO_SOCKET_IFNAME``, or the address
            of the host name).

    Attributes:
        process_group: the group for collectives and ``DistributedDataParallel``.
    """

    def __init__(self, store: Store, rank: int, size: int, *, host: str | None, name: str) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        before = set(_listening())
        if host is None:
            device = ProcessGroupGloo.create_default_device()
        else:
            device = ProcessGroupGloo.create_device(hostname=host)
        own_ports = [port for port in _listening() if port not in before]
        options._devices = [device]
        options._timeout = PATIENCE
        self._store = store  # NCCL asks it later, and torch does not keep a store that is written in Python
        self.process_group: Any = ProcessGroup(store, rank, size)
        gloo = ProcessGroupGloo(store, rank, size, options)
        self._register("cpu", ProcessGroup.BackendType.GLOO, gloo)
        self.process_group._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._nccl: Any = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = PATIENCE
            self._nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
            self._register("cuda", ProcessGroup.BackendType.NCCL, self._nccl)
        self.process_group._set_group_name(name)  # type: ignore[arg-type]
        store.set(f"ports/{rank}", " ".join(f"{here}:{port}" for here, port in own_ports))
        others = [store.get(f"ports/{other}").decode().split() for other in range(size) if other != rank]
        self._own_ports = set(own_ports)
        parts = (word.rpartition(":") for words in others for word in words)
        self._theirs = {(host, int(port)) for host, _, port in parts}

    def _register(self, device: str, kind: object, backend: object) -> None:
        self.process_group._register_backend(torch.device(device), kind, backend)

    def abort(self) -> None:
        """Makes collectives in progress raise, in this process and in connected processes. Callable from any thread."""
        if self._nccl is not None:
            self._nccl.abort()
        for connection in _sockets():
            with contextlib.suppress(OSError):
                here, there = connection.getsockname()[:2], connection.getpeername()[:2]
                if here in self._own_ports or there in self._theirs:
                    connection.shutdown(socket.SHUT_RDWR)


def _listening() -> list[tuple[str, int]]:
    """Returns the hosts and ports at which this process listens."""
    return [
        connection.getsockname()[:2]
        for connection in _sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ]


def _sockets() -> Iterator[socket.socket]:
    """Yields copies of all TCP sockets of this process. Each copy is closed after use."""
    for descriptor in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                yield copy


class RegistryStore(Store):
    """A store for torch: the keys with a prefix in a registry. Values are bytes, stored as text by code point."""

    def __init__(self, registry: Registry, prefix: str) -> None:
        super().__init__()
        self._registry, self._prefix = registry, prefix

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._registry.set(self._key(key), text)

    def get(self, key: str) -> bytes:
        """Waits until a key exists, and returns its value."""
        self.wait([key])
        return (self._registry.get(self._key(key)) or "").encode("latin-1")

    def add(self, key: str, value: int) -> int:
        """Adds to the number of a key, and returns the sum."""
        return self._registry.add(self._key(key), value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Sets a key if it has the expected value. Returns the key's value after the call."""
        old, new = (v if isinstance(v, str) else bytes(v).decode("latin-1") for v in (expected, desired))
        return self._registry.compare_set(self._key(key), old, new).encode("latin-1")

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits until all keys exist."""
        timeout_s = WAIT_S if timeout is None else timeout.total_seconds()
        self._registry.wait([self._key(key) for key in keys], timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist."""
        return self._registry.check([self._key(key) for key in keys])

    def deleteKey(self, key: str) -> bool:
        """Removes a key. ``torch`` needs a method of this name, and derives further methods from this class."""
        return self._registry.delete(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"
