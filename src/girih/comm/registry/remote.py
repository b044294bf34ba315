"""A registry in another process, and clients of the processes that it lists. Calls have arguments as JSON in UTF-8."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from girih.comm.registry import LocalRegistry, Registry, RegistryValue, Wait, resolver
from girih.comm.rpc import Client, Request, Server
from girih.comm.service import as_text, attempt, connect, dialer, from_text
from girih.comm.transports.sockets import SocketListener
from girih.errors import WireError

PATIENCE_S: Final = 10.0
"""The time after which a call to an unreachable registry fails."""
MOST_WAITS: Final = 256


def serve(registry: LocalRegistry, secret: bytes, listener: SocketListener) -> Server:
    """Answers :class:`RemoteRegistry` until the server is closed."""
    work = _RegistryWork(registry)
    return Server(listener, work.on_request, secret=secret, incarnation=0, gone=work.forget)


class _RegistryWork:
    """Answers the requests of clients of a registry.

    The server's thread answers most requests. A client may also wait for keys. Then the thread that sets the last key
    answers, or the thread that ends the wait.
    """

    def __init__(self, registry: LocalRegistry) -> None:
        self._registry = registry
        self._waits: defaultdict[int, list[Wait]] = defaultdict(list)  # by client

    def on_request(self, request: Request) -> None:
        """Answers a request."""
        verb, *arguments = from_text(request.frame.arrays[0])
        if verb == "wait":
            self._wait(request, *arguments)
        else:
            _reply(request, self._registry.ask(verb, *arguments))

    def _wait(self, request: Request, keys: Sequence[str]) -> None:
        waits = [wait for wait in self._waits[request.client] if not wait.there.done()]
        if len(waits) == MOST_WAITS:
            raise WireError(f"one process has more than {MOST_WAITS} waits at the same time")
        wait = self._registry.begin_wait(keys)
        self._waits[request.client] = [*waits, wait]
        wait.there.add_done_callback(lambda there: attempt(request, lambda: _reply(request, there.result())))

    def forget(self, client: int) -> None:
        """Ends the waits of a client that left. Otherwise they would last for ever."""
        self._registry.end_waits(self._waits.pop(client, ()))


def _reply(request: Request, answer: object) -> None:
    request.reply((), (as_text(answer),))


class RemoteRegistry(Registry):
    """A registry in another process. This object can be pickled and sent to other processes of the run.

    Methods raise ``WireError`` if the registry is gone or does not know the secret.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self.address, self._secret = address, secret
        # Not made by ``connect``: a run that fails aborts the clients of ``connect``, but still needs the registry.
        self._client = Client(dialer, address, secret=secret, timeout_s=PATIENCE_S, resolve=None)

    def __reduce__(self) -> tuple[type[RemoteRegistry], tuple[str, bytes]]:
        return RemoteRegistry, (self.address, self._secret)

    def ask(self, verb: str, *arguments: object) -> RegistryValue:
        """See :class:`Registry`."""
        return self._call((verb, *arguments), None)

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        self._call(("wait", list(keys)), timeout_s)

    def close(self) -> None:
        """See :class:`Registry`."""
        self._client.close()

    def _call(self, asked: Sequence[object], timeout_s: float | None) -> RegistryValue:
        try:
            reply = self._client.call(0, (), (as_text(asked),))
            error = reply.exception(timeout_s)
        except WireError as closed:
            error = closed
        if error is not None:
            raise WireError(f"the registry cannot be reached, or failed: {error}") from None
        answer: RegistryValue = from_text(reply.result().arrays[0])
        return answer


CONNECTED_S = 40.0
RETURN_S = 1800.0
"""The longest time that a restarted process may take to recover its data."""


def calls_of(clients: Iterable[Client]) -> dict[str, int]:
    """Returns a process's reconnections and lost calls, for :meth:`girih.telemetry.stats.Stats.watch`."""
    clients = tuple(clients)
    return {
        "retries": sum(client.num_reconnects for client in clients),
        "lost_calls": sum(client.num_lost for client in clients),
    }


def connect_all(
    role: str,
    addresses: Sequence[str],
    *,
    secret: bytes,
    registry: Registry | None = None,
    timeout_s: float = CONNECTED_S,
    first: int = 0,
) -> list[Client]:
    """Returns a client for each process of a role.

    Args:
        addresses: the current addresses of the processes, by index, from ``first`` on.
        registry: gives the new address after a broken connection. Without a registry, a process that restarted at
            another address is not found.
        timeout_s: a call that waits for a connection for this time fails.
    """
    return [
        connect(
            address,
            secret=secret,
            timeout_s=timeout_s,
            resolve=None if registry is None else resolver(registry, role, index),
        )
        for index, address in enumerate(addresses, first)
    ]
