"""The registry of a run: one small key-value service that says where roles listen and carries the run's notes.

It holds text. ``role/<role>/<index>`` maps to where that process listens and which life of it this is; trainers find
each other through it (:mod:`girih.comm.group`) and leave notes about stops and saves in it.

On the wire: frames of JSON, each behind its length. The server begins with a challenge; whoever cannot prove that it
knows the run's secret within :data:`PROOF_S` is dropped before anything else it says is read. The secret itself is
never sent, and the server proves that it knows it, too.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from girih.errors import WireError, WireTimeout

PROOF_S: Final = 5.0
"""How long a stranger may take to prove that it knows the secret."""
WAIT_S: Final = 1800.0
"""How long a key is waited for unless told otherwise."""
_MOST_STRANGERS: Final = 64
_MOST_STRANGER_BYTES: Final = 1 << 10
_MOST_BYTES: Final = 1 << 28
_ONE_WAIT_S: Final = 10.0  # the server looks that often whether a client that waits is there still
_LENGTH: Final = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Entry:
    """One process of a role, as the registry knows it.

    Attributes:
        address: where it listens; "" where it does not.
        incarnation: the how-manieth life of that role and index, from 0.
    """

    address: str
    incarnation: int = 0
    pid: int = 0
    host: str = ""


class Registry(Protocol):
    """What a registry can do, in this process or in another. Callable from any thread."""

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        ...

    def get(self, key: str) -> str | None:
        """The value of a key; None where there is none."""
        ...

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """Returns once all keys are there.

        Raises:
            WireTimeout: one is still missing.
        """
        ...

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which starts at 0; returns the sum."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets a key that has the expected value ("": or none); returns the value that it has then."""
        ...

    def delete(self, key: str) -> bool:
        """Removes a key; whether it was there."""
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


class LocalRegistry:
    """A registry in this process; :class:`RegistryServer` offers it to others."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: str) -> None:
        """See :class:`Registry`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        """See :class:`Registry`."""
        with self._changed:
            return self._values.get(key)

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """See :class:`Registry`."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self._has(keys), timeout_s)
            if self._closed:
                raise WireError("the registry is closed")
            if not there:
                missing = [key for key in keys if key not in self._values]
                raise WireTimeout(f"{', '.join(missing)}: not in the registry after {timeout_s:.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`Registry`."""
        with self._changed:
            return self._has(keys)

    def add(self, key: str, amount: int) -> int:
        """See :class:`Registry`."""
        with self._changed:
            total = int(self._values.get(key, "0")) + amount
            self._values[key] = str(total)
            self._changed.notify_all()
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See :class:`Registry`."""
        with self._changed:
            current = self._values.get(key)
            if current is None and expected:
                return expected
            if current in (None, expected):
                self._values[key] = current = desired
                self._changed.notify_all()
            return current or ""

    def delete(self, key: str) -> bool:
        """See :class:`Registry`."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def close(self) -> None:
        """Whoever waits gets ``WireError``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class RegistryServer:
    """Offers a registry to the processes of the run until it is closed.

    Args:
        bind: the host it listens at.
        proof_s: how long a stranger may take to prove that it knows the secret.

    Attributes:
        address: ``HOST:PORT``, for :class:`RemoteRegistry`.
        num_refused: connections that did not prove to know the secret.
    """

    def __init__(
        self, registry: LocalRegistry, secret: bytes, bind: str = "127.0.0.1", *, proof_s: float = PROOF_S
    ) -> None:
        self.registry, self.num_refused = registry, 0
        self._secret, self._proof_s = secret, proof_s
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listener = socket.create_server((bind, 0), family=family, backlog=1024)
        except OSError as error:
            raise WireError(
                f"cannot listen at {bind!r}: {error}; set cluster.bind to an address of this host"
            ) from error
        self.address = f"{bind}:{self._listener.getsockname()[1]}"
        self._connections: set[socket.socket] = set()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="girih-registry", daemon=True).start()

    def close(self) -> None:
        """Ends all connections."""
        self._closing.set()
        self.registry.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._strangers.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._strangers.release()
                if self._closing.wait(0.1):  # out of descriptors: later there may be some
                    return
                continue
            threading.Thread(
                target=self._serve, args=(connection,), name="girih-registry", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                known = self._knows_secret(connection)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                known = False
            finally:
                self._strangers.release()
            if not known:
                self.num_refused += 1
                return
            self._connections.add(connection)
            try:
                while not self._closing.is_set():
                    _send(connection, self._answer(_receive(connection, _MOST_BYTES)))
            finally:
                self._connections.discard(connection)

    def _knows_secret(self, connection: socket.socket) -> bool:
        connection.settimeout(self._proof_s)
        until = time.monotonic() + self._proof_s
        challenge = secrets.token_hex(32)
        _send(connection, {"challenge": challenge})
        told = _receive(connection, _MOST_STRANGER_BYTES, until)
        if not hmac.compare_digest(
            told["proof"], prove(self._secret, "client", challenge, told["challenge"])
        ):
            return False
        _send(connection, {"proof": prove(self._secret, "server", told["challenge"], challenge)})
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def _answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        verbs = {
            "set": self.registry.set, "get": self.registry.get, "wait": self.registry.wait, "add": self.registry.add,
            "check": self.registry.check, "compare_set": self.registry.compare_set, "delete": self.registry.delete,
        }  # fmt: skip
        try:
            return {"is": verbs[asked["do"]](*asked["with"])}  # type: ignore[operator]
        except WireTimeout as error:
            return {"timeout": str(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class RemoteRegistry:
    """A registry in another process. Each thread that asks has a connection of its own meanwhile.

    It travels to other processes of the run by pickle, as what is needed to connect.

    Raises:
        WireError: nobody is there, or does not know the secret.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        self._secret = secret
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._closed = False

    def __reduce__(self) -> tuple[type[RemoteRegistry], tuple[str, bytes]]:
        return RemoteRegistry, (self.address, self._secret)

    def set(self, key: str, value: str) -> None:
        """See :class:`Registry`."""
        self._ask("set", key, value)

    def get(self, key: str) -> str | None:
        """See :class:`Registry`."""
        value: str | None = self._ask("get", key)
        return value

    def wait(self, keys: Sequence[str], timeout_s: float = WAIT_S) -> None:
        """See :class:`Registry`."""
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                self._ask("wait", list(keys), min(left_s, _ONE_WAIT_S))
                return
            except WireTimeout:
                if left_s <= _ONE_WAIT_S:
                    raise

    def check(self, keys: Sequence[str]) -> bool:
        """See :class:`Registry`."""
        return bool(self._ask("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """See :class:`Registry`."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """See :class:`Registry`."""
        return str(self._ask("compare_set", key, expected, desired))

    def delete(self, key: str) -> bool:
        """See :class:`Registry`."""
        return bool(self._ask("delete", key))

    def close(self) -> None:
        """Ends all connections: whoever waits gets ``WireError``."""
        self._closed = True
        for connection in list(self._busy):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._idle.pop().close()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        with self._connection() as connection:
            _send(connection, {"do": verb, "with": arguments})
            told = _receive(connection, _MOST_BYTES)
        if "timeout" in told:
            raise WireTimeout(told["timeout"])
        if "error" in told:
            raise WireError(f"the registry at {self.address}: {told['error']}")
        return told["is"]

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        try:
            connection = self._idle.pop() if self._idle else self._connect()
        except IndexError:  # another thread took the last one
            connection = self._connect()
        self._busy.add(connection)
        try:
            yield connection
        except (OSError, ValueError) as error:
            connection.close()
            raise WireError(f"the registry at {self.address} is gone: {error}") from None
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def _connect(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), PROOF_S)
        except OSError as error:
            raise WireError(f"the registry at {self.address} cannot be reached: {error}") from None
        try:
            theirs = _receive(connection, _MOST_STRANGER_BYTES)["challenge"]
            own = secrets.token_hex(32)
            _send(connection, {"challenge": own, "proof": prove(self._secret, "client", theirs, own)})
            told = _receive(connection, _MOST_STRANGER_BYTES)
            if not hmac.compare_digest(told["proof"], prove(self._secret, "server", own, theirs)):
                raise ValueError("it does not know the secret")
        except (OSError, ValueError, KeyError, TypeError) as error:
            connection.close()
            raise WireError(
                f"the registry at {self.address}: no proof of the run's secret: {error}"
            ) from None
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def prove(secret: bytes, side: str, *challenges: str) -> str:
    """What only somebody who knows the secret can answer to challenges."""
    return hmac.digest(secret, "\0".join((side, *challenges)).encode(), "sha256").hex()


def key_of(role: str, index: int) -> str:
    """The key under which a process of a role is found."""
    return f"role/{role}/{index}"


def register(registry: Registry, role: str, index: int, entry: Entry) -> None:
    """Says where a process listens, and which life of it this is."""
    registry.set(key_of(role, index), json.dumps(asdict(entry)))


def resolve(registry: Registry, role: str, index: int, timeout_s: float = WAIT_S) -> Entry:
    """Where a process listens now; waits until it is there.

    Raises:
        WireTimeout: it did not come.
    """
    key = key_of(role, index)
    registry.wait([key], timeout_s)
    return Entry(**json.loads(registry.get(key) or "{}"))


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket, most_bytes: int, until: float | None = None) -> Any:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until))
    if length > most_bytes:
        raise ValueError(f"a message of {length:,} bytes; at most {most_bytes:,}")
    return json.loads(_read(connection, length, until))


def _read(connection: socket.socket, num_bytes: int, until: float | None) -> bytes:
    """Exactly so many bytes; one that dribbles them does not get more time for it."""
    content = b""
    while len(content) < num_bytes:
        if until is not None:
            connection.settimeout(max(1e-3, until - time.monotonic()))
        part = connection.recv(min(1 << 16, num_bytes - len(content)))
        if not part:
            raise ConnectionError("the other side closed the connection")
        content += part
    return content
