"""The side of a registry that other processes ask."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from girih.comm.registry.entries import LocalRegistry
from girih.comm.registry.frames import MOST_BYTES, MOST_STRANGER_BYTES, PROOF_S, prove, receive, send
from girih.errors import WireError, WireTimeout

_MOST_STRANGERS: Final = 64


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
                    send(connection, self._answer(receive(connection, MOST_BYTES)))
            finally:
                self._connections.discard(connection)

    def _knows_secret(self, connection: socket.socket) -> bool:
        connection.settimeout(self._proof_s)
        until = time.monotonic() + self._proof_s
        challenge = secrets.token_hex(32)
        send(connection, {"challenge": challenge})
        told = receive(connection, MOST_STRANGER_BYTES, until)
        if not hmac.compare_digest(
            told["proof"], prove(self._secret, "client", challenge, told["challenge"])
        ):
            return False
        send(connection, {"proof": prove(self._secret, "server", told["challenge"], challenge)})
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
