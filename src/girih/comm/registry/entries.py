"""The registry of this process, how other processes reach it, and the form in which it keeps roles."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from girih.comm.transports.addresses import TCP, parse_address
from girih.comm.transports.tls import check_installed
from girih.errors import WireError, WireTimeout

WAIT_S: Final = 1800.0
"""A key is waited for so long unless told otherwise."""
MOST_KEYS: Final = 100_000
MOST_KEY_CHARACTERS: Final = 1024
MOST_CHARACTERS: Final = 64 << 20
"""A registry keeps no more, in all keys and values together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One process of a role, as the registry knows it.

    Attributes:
        address: where it listens; "" where it does not.
        incarnation: how often that role and index has been restarted; 0 for its first process.
    """

    address: str
    incarnation: int = 0
    pid: int = 0
    host: str = ""


class Registry(Protocol):
    """Interface of registries, in this process or in another. Callable from any thread."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""

    def get(self, key: str) -> str | None:
        """The value of a key; None where there is none."""

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """Returns once all keys are there.

        Raises:
            WireTimeout: one is still missing.
        """

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which starts at 0; returns the sum."""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a key that has the expected value ("": or none); returns the value that it has then."""

    def delete(self, key: str) -> bool:
        """Removes a key; whether it was there."""

    def close(self) -> None:
        """Gives back what it holds."""


class LocalRegistry:
    """A registry in this process; :class:`RegistryServer` offers it to others."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._num_characters = 0
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: str) -> None:
        """See :class:`Registry`."""
        with self._changed:
            self._store_entry(key, value)

    def get(self, key: str) -> str | None:
        """See :class:`Registry`."""
        with self._changed:
            return self._values.get(key)

    def wait(
        self,
        keys: Sequence[str],
        timeout_s: float = WAIT_S,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """See :class:`Registry`.

        Args:
            is_given_up: asked whenever anything changes, and after :meth:`wake`.

        Raises:
            WireError: it is given up, or the registry is closed.
        """
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._closed or is_given_up() or self.check(keys), timeout_s
            )
            if self._closed or is_given_up():
                raise WireError("the registry is closed" if self._closed else "who waits is gone")
            if not there:
                missing = [key for key in keys if key not in self._values]
                raise WireTimeout(f"{', '.join(missing)}: not in the registry after {timeout_s:.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`Registry`."""
        with self._changed:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """See :class:`Registry`."""
        with self._changed:
            total = int(self._values.get(key, "0")) + amount
            if type(total) is not int:
                raise WireError(f"{amount!r:.100} is added to {key!r:.100}; expected an integer")
            self._store_entry(key, str(total))
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See :class:`Registry`."""
        with self._changed:
            current = self._values.get(key)
            if current is None and expected:
                return expected
            if current in (None, expected):
                self._store_entry(key, desired)
                current = desired
            return current or ""

    def delete(self, key: str) -> bool:
        """See :class:`Registry`."""
        with self._changed:
            value = self._values.pop(key, None)
            if value is not None:
                self._num_characters -= len(key) + len(value)
            return value is not None

    def wake(self) -> None:
        """Has whoever waits ask whether that is given up."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits gets ``WireError``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _store_entry(self, key: str, value: str) -> None:
        """Sets a key within the bounds of what is kept; ``self._changed`` is held.

        Raises:
            WireError: no text, or too much of it; nothing was set.
        """
        if not isinstance(key, str) or not isinstance(value, str):
            raise WireError(f"{key!r:.100} = {value!r:.100}; expected texts")
        old = self._values.get(key)
        more = len(value) - len(old) if old is not None else len(key) + len(value)
        if len(key) > MOST_KEY_CHARACTERS:
            raise WireError(f"a key of {len(key)} characters; expected at most {MOST_KEY_CHARACTERS}")
        if (old is None and len(self._values) >= MOST_KEYS) or self._num_characters + more > MOST_CHARACTERS:
            raise WireError(
                f"{key:.100}: the registry is full; it keeps {MOST_KEYS} keys and {MOST_CHARACTERS} characters"
            )
        self._values[key] = value
        self._num_characters += more
        self._changed.notify_all()


def key_of(role: str, index: int) -> str:
    """The key under which a process of a role is found."""
    return f"role/{role}/{index}"


def register(registry: Registry, role: str, index: int, entry: Entry) -> None:
    """Says where a process listens, and which life of it this is."""
    registry.set(key_of(role, index), json.dumps(asdict(entry)))


def find(registry: Registry, role: str, index: int) -> Entry | None:
    """The entry of a process, with the address at which it listens now; None where there is none."""
    text = registry.get(key_of(role, index))
    return None if text is None else Entry(**json.loads(text))


def resolver(registry: Registry, role: str, index: int) -> Callable[[], str]:
    """For ``girih.comm.service.connect(..., resolve=)``: where a process listens now.

    The function raises ``LookupError`` while it is not known.
    """

    def address() -> str:
        entry = find(registry, role, index)
        if entry is None:
            raise LookupError(f"{role} {index} is not in the registry")
        return entry.address

    return address


class RegistryServer:
    """Offers a registry to the processes of the run until it is closed.

    It listens at once, and loads what answers, numpy with it, in a thread: a launcher starts processes meanwhile.

    Args:
        bind: the host it listens at.
        encrypt: whether TLS goes over its connections.

    Attributes:
        address: ``tcp://HOST:PORT``, or ``tls://HOST:PORT``, for :class:`girih.comm.registry.remote.RemoteRegistry`.
    """

    def __init__(
        self, registry: LocalRegistry, secret: bytes, bind: str = "127.0.0.1", *, encrypt: bool = False
    ) -> None:
        self.registry = registry
        if encrypt:
            check_installed()
        try:
            listener, self.address = TCP(bind, 0, encrypt).listen()
        except WireError as error:
            raise WireError(f"{error}; set cluster.bind to an address of this host") from error
        self._end = listener.close
        self._opening = threading.Thread(target=self._open, args=(secret, listener), daemon=True)
        self._opening.start()

    def close(self) -> None:
        """Ends all connections; whoever waits gets ``WireError``."""
        self.registry.close()
        self._opening.join()
        self._end()

    def _open(self, secret: bytes, listener: socket.socket) -> None:
        from girih.comm.registry.remote import serve
        from girih.comm.transports.sockets import SocketListener

        endpoint = parse_address(self.address)
        self._server = serve(self.registry, secret, SocketListener(endpoint, listener, self.address))
        self._end = self._server.close
