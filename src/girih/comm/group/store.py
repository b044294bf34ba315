"""The registry as the store at which ``torch.distributed`` process groups meet.

It replaces ``TCPStore``, which listens on all interfaces and asks nobody who they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from girih.comm.registry import WAIT_S, Registry


class RegistryStore(Store):
    """Keys of one prefix in a registry; values are bytes, kept as text of the same code points."""

    def __init__(self, registry: Registry, prefix: str) -> None:
        super().__init__()
        self._registry, self._prefix = registry, prefix

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a key."""
        text = value if isinstance(value, str) else bytes(value).decode("latin-1")
        self._registry.set(self._key(key), text)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        return (self._registry.get(self._key(key)) or "").encode("latin-1")

    def add(self, key: str, value: int) -> int:
        """Adds to a number."""
        return self._registry.add(self._key(key), value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Sets a key that has the expected value."""
        old, new = (v if isinstance(v, str) else bytes(v).decode("latin-1") for v in (expected, desired))
        return self._registry.compare_set(self._key(key), old, new).encode("latin-1")

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Returns once all keys are there."""
        timeout_s = WAIT_S if timeout is None else timeout.total_seconds()
        self._registry.wait([self._key(key) for key in keys], timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._registry.check([self._key(key) for key in keys])

    def deleteKey(self, key: str) -> bool:
        """Removes a key. By this name ``torch`` finds it; what it does not find here it does by the others."""
        return self._registry.delete(self._key(key))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"
