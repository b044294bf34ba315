"""The registry of a run: a small key-value service with the addresses of roles and the run's notes.

Keys and values are text. ``role/<role>/<index>`` maps to the process's address and incarnation. Through the registry,
trainers find each other (:mod:`girih.comm.group`) and leave notes about stops and saves.

:class:`LocalRegistry` stores the keys. :class:`RegistryServer` makes it available to other processes. They use a
:class:`girih.comm.registry.remote.RemoteRegistry`, which calls the server through :mod:`girih.comm.rpc`.
"""

from __future__ import annotations

import json
import socket
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Final

from girih.comm.transports.addresses import TCP, parse_address
from girih.comm.transports.tls import check_installed
from girih.errors import WireError, WireTimeout

WAIT_S: Final = 1800.0
"""The default time to wait for a key."""
MOST_KEYS: Final = 100_000
MOST_KEY_CHARACTERS: Final = 1024
MOST_CHARACTERS: Final = 64 << 20
"""The maximum number of characters of all keys and values together."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The registry's entry of one process of a role.

    Attributes:
        address: the address at which the process listens, or "" if it does not listen.
        incarnation: the number of restarts of this role and index. 0 in the first process.
    """

    address: str
    incarnation: int = 0
    pid: int = 0
    host: str = ""


RegistryValue = str | int | None
"""An answer of a registry."""


class Registry(ABC):
    """A registry in this process or in another process. Callable from any thread."""

    @abstractmethod
    def ask(self, verb: str, *arguments: object) -> RegistryValue:
        """Returns the result of a method of :class:`Entries`."""

    def set(self, key: str, value: str) -> None:
        """See :class:`Entries`."""
        self.ask("set", key, value)

    def get(self, key: str) -> str | None:
        """See :class:`Entries`."""
        value = self.ask("get", key)
        return None if value is None else str(value)

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`Entries`."""
        return bool(self.ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """See :class:`Entries`."""
        return int(self.ask("add", key, amount) or 0)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See :class:`Entries`."""
        return str(self.ask("compare_set", key, expected, desired))

    def delete(self, key: str) -> bool:
        """See :class:`Entries`."""
        return bool(self.ask("delete", key))

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """Waits until all keys exist.

        Raises:
            WireTimeout: a key is still missing after ``timeout_s``.
            WireError: the registry is closed.
        """
        try:
            self._wait(keys, timeout_s)
        except TimeoutError:
            missing = [key for key in keys if not self.check([key])]
            if missing:
                raise WireTimeout(
                    f"{', '.join(missing)}: not in the registry after {timeout_s:.0f} s"
                ) from None

    @abstractmethod
    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        """Works like :meth:`wait`, but raises ``TimeoutError`` if a key is missing."""

    @abstractmethod
    def close(self) -> None:
        """Releases the registry's resources. Waiting callers get ``WireError``."""


@dataclass(frozen=True, eq=False)
class Wait:
    """A wait for some keys.

    Attributes:
        there: a future that is done when all keys exist, and that fails if the registry is closed.
    """

    keys: Sequence[str]
    there: Future[None] = field(default_factory=Future)


class Entries:
    """The keys and values of a registry, and the waits for keys. It does not depend on clocks and other processes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._num_characters = 0
        self._waits: defaultdict[str, list[Wait]] = defaultdict(list)  # by missing key
        self._closed = False

    def set(self, key: str, value: str) -> None:
        """Sets a key, within the registry's limits.

        Raises:
            WireError: the key or the value is not a text or is too long, or the registry is full. The key is not set.
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
        self._take_up(key)

    def get(self, key: str) -> str | None:
        """Returns the value of a key, or None if the key does not exist."""
        return self._values.get(key)

    def begin_wait(self, keys: Sequence[str]) -> Wait:
        """Begins to wait for keys."""
        if not all(isinstance(key, str) for key in keys):
            raise WireError(f"wait for {keys!r:.100}: expected texts")
        return self._go_on(Wait(keys))

    def end_waits(self, ended: Collection[Wait]) -> None:
        """Ends the waits of a caller that left."""
        for key, waits in list(self._waits.items()):
            waits[:] = [wait for wait in waits if wait not in ended]
            if not waits:
                del self._waits[key]

    def _go_on(self, wait: Wait) -> Wait:
        """Ends a wait if all its keys exist. Otherwise lets it wait for the first missing key."""
        missing = next((key for key in wait.keys if key not in self._values), None)
        if self._closed:
            wait.there.set_exception(WireError("the registry is closed"))
        elif missing is None:
            wait.there.set_result(None)
        else:
            self._waits[missing].append(wait)
        return wait

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Adds to the number of a key, which starts at 0. Returns the sum."""
        total = int(self._values.get(key, "0")) + amount
        if type(total) is not int:
            raise WireError(f"add {amount!r:.100} to {key!r:.100}: expected an integer")
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a key if it has the expected value. If ``expected`` is "", also sets a key that does not exist.

        Returns the key's value after the call.
        """
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current in (None, expected):
            self.set(key, desired)
            current = desired
        return current or ""

    def delete(self, key: str) -> bool:
        """Removes a key. Returns whether it existed."""
        value = self._values.pop(key, None)
        if value is not None:
            self._num_characters -= len(key) + len(value)
        return value is not None

    def close(self) -> None:
        """Closes the registry. Waiting callers get ``WireError``."""
        self._closed = True
        for key in list(self._waits):
            self._take_up(key)

    def _take_up(self, key: str) -> None:
        """Continues the waits for a key that exists now."""
        for wait in self._waits.pop(key, ()):
            self._go_on(wait)


VERBS: Final = ("set", "get", "check", "add", "compare_set", "delete")


class LocalRegistry(Registry):
    """A registry in this process. :class:`RegistryServer` makes it available to other processes."""

    def __init__(self) -> None:
        self.entries = Entries()
        self._lock = threading.RLock()

    def ask(self, verb: str, *arguments: object) -> RegistryValue:
        """See :class:`Registry`."""
        if verb not in VERBS:
            raise ValueError(f"unknown verb {verb!r} of a registry; expected one of {', '.join(VERBS)}")
        with self._lock:
            answer: RegistryValue = getattr(self.entries, verb)(*arguments)
        return answer

    def begin_wait(self, keys: Sequence[str]) -> Wait:
        """See :class:`Entries`."""
        with self._lock:
            return self.entries.begin_wait(keys)

    def end_waits(self, ended: Collection[Wait]) -> None:
        """See :class:`Entries`."""
        with self._lock:
            self.entries.end_waits(ended)

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        wait = self.begin_wait(keys)
        try:
            wait.there.result(timeout_s)
        finally:
            self.end_waits([wait])

    def close(self) -> None:
        """See :class:`Registry`."""
        with self._lock:
            self.entries.close()


def key_of(role: str, index: int) -> str:
    """Returns the key of a process."""
    return f"role/{role}/{index}"


def register(registry: Registry, role: str, index: int, entry: Entry) -> None:
    """Registers the address and incarnation of a process."""
    registry.set(key_of(role, index), json.dumps(asdict(entry)))


def find(registry: Registry, role: str, index: int) -> Entry | None:
    """Returns the entry of a process, with its current address, or None if the process is not registered."""
    text = registry.get(key_of(role, index))
    return None if text is None else Entry(**json.loads(text))


def resolver(registry: Registry, role: str, index: int) -> Callable[[], str]:
    """Returns a function for ``girih.comm.service.connect(..., resolve=)`` that returns a process's current address.

    The returned function raises ``LookupError`` while the address is not known.
    """

    def address() -> str:
        entry = find(registry, role, index)
        if entry is None:
            raise LookupError(f"{role} {index} is not in the registry")
        return entry.address

    return address


class RegistryServer:
    """Makes a registry available to the processes of the run, until it is closed.

    It listens immediately. A thread loads the answering code and numpy, so that a launcher can start processes
    meanwhile.

    Args:
        bind: the host at which it listens.
        encrypt: True to use TLS for its connections.

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
        """Ends all connections. Waiting callers get ``WireError``."""
        self.registry.close()
        self._opening.join()
        self._end()

    def _open(self, secret: bytes, listener: socket.socket) -> None:
        from girih.comm.registry.remote import serve
        from girih.comm.transports.sockets import SocketListener

        endpoint = parse_address(self.address)
        self._server = serve(self.registry, secret, SocketListener(endpoint, listener, self.address))
        self._end = self._server.close
