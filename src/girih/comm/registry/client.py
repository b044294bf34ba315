"""A registry in another process."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from girih.comm.registry.entries import WAIT_S
from girih.comm.registry.frames import MOST_BYTES, MOST_STRANGER_BYTES, PROOF_S, prove, receive, send
from girih.errors import WireError, WireTimeout

_ONE_WAIT_S: Final = 10.0  # the server looks that often whether a client that waits is there still


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
            send(connection, {"do": verb, "with": arguments})
            told = receive(connection, MOST_BYTES)
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
            theirs = receive(connection, MOST_STRANGER_BYTES)["challenge"]
            own = secrets.token_hex(32)
            send(connection, {"challenge": own, "proof": prove(self._secret, "client", theirs, own)})
            told = receive(connection, MOST_STRANGER_BYTES)
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
