"""The service of a role: its requests are done one after the other, in one thread."""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc import Frame, Reply
from girih.comm.rpc.client import Client
from girih.comm.rpc.server import Request, Server
from girih.comm.rpc.transport import Dialer
from girih.comm.transports.addresses import parse_address
from girih.comm.transports.sockets import SocketDialer, SocketListener
from girih.errors import GirihError, Lost, RemoteError, named
from girih.telemetry.stats import Stats

_SECRETS: weakref.WeakKeyDictionary[Client, bytes] = weakref.WeakKeyDictionary()


def listen(
    handler: Callable[[Request], None],
    *,
    address: str = "tcp://127.0.0.1:*",
    secret: bytes,
    incarnation: int = 0,
    gone: Callable[[int], None] | None = None,
    patience_s: float | None = None,
) -> Server:
    """Answers requests with ``handler`` until the server is closed.

    Args:
        handler: called on the server's thread for each request, once; it must be quick, and may leave the reply to
            another thread. An exception that it raises is the reply.
        address: ``tcp://HOST:PORT`` (``*``: any free port), ``tls://HOST:PORT``, or ``shm://`` for this host. Loopback unless
            another host is named. Data travel in the clear but with ``tls``; the secret does not travel.
        secret: what clients must know.
        incarnation: how often this process's role and index has been restarted; clients are told.
        gone: called on the server's thread with the number of a client that left or is forgotten. Be quick.
        patience_s: a client without a connection for so long is forgotten; by default two minutes.

    Raises:
        WireError: the address cannot be listened at.
    """
    endpoint = parse_address(address)
    listener = SocketListener(endpoint, *endpoint.listen())
    return Server(listener, handler, secret=secret, incarnation=incarnation, gone=gone, patience_s=patience_s)


def connect(
    address: str, *, secret: bytes, timeout_s: float = 40.0, resolve: Callable[[], str] | None = None
) -> Client:
    """Connects to a server; returns at once, whether it is there or not.

    A connection that breaks is made again, and the session goes on: each call happens once. Calls that the server's
    process took along when it ended fail with ``Lost``; later ones go to its next life.

    Args:
        address: ``Server.address``.
        secret: the server's.
        timeout_s: a call that finds no connection for so long fails with ``WireTimeout``. While there is one, a call
            takes as long as it takes.
        resolve: asked for the address before each attempt to connect again, as a restarted server listens elsewhere;
            LookupError: not known yet. Without it, calls fail at once when nobody listens any more.

    Raises:
        WireError: the address cannot be connected to.
    """
    client = Client(dialer, address, secret=secret, timeout_s=timeout_s, resolve=resolve)
    _SECRETS[client] = secret
    return client


def abort_clients(secret: bytes) -> None:
    """Closes the clients of this process that know a secret, the run's: calls in progress raise ``WireError``."""
    for client, known in list(_SECRETS.items()):
        if known == secret:
            with contextlib.suppress(GirihError, OSError):
                client.close()


def dialer(address: str) -> Dialer:
    """The dialer that connects to an address.

    Raises:
        WireError: it is none.
    """
    return SocketDialer(parse_address(address))


class Address(Protocol):
    """Interface of a role to its service: where it listens, the secret that callers prove to know, and how often the role was restarted: see :func:`listen`."""

    address: str
    secret: bytes
    incarnation: int


class Service:
    """Answers requests; an exception is the answer too.

    Args:
        stats: of this process; they have how long requests took, how many wait, and how long the thread worked.
    """

    def __init__(self, verbs: Mapping[object, Callable[[Request], None]], stats: Stats) -> None:
        self._verbs = verbs
        self._timers = timers(verbs, stats)
        self._pool = ThreadPoolExecutor(1, "girih-serve")
        self._num_asked, self._asking = 0, threading.Lock()
        self._num_done = 0  # by the one thread
        self._watch, self._busy = stats.watch, stats.busy

    def serve(self, at: Address, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Answers until ``stop`` is set; says where it listens by ``ready``."""
        self._watch(self._live)
        with (
            self._pool,
            listen(
                self.handle,
                address=at.address,
                secret=at.secret,
                incarnation=at.incarnation,
                gone=self.forget,
            ) as server,
        ):
            ready(server.address)
            stop.wait()

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        request.answered = self._timers.get(request.frame.kind)
        self.later(request, lambda: self._verbs[request.frame.kind](request))

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back. Called by the server's thread: be quick."""

    def later(self, request: Request, work: Callable[[], None]) -> None:
        """Does work for a request after all that waits."""
        self._submit(partial(attempt, request, work))

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does work that nobody waits for after all that waits; whoever asks for what it failed to do is told."""
        self._submit(work)

    def _submit(self, work: Callable[[], None]) -> None:
        with self._asking:
            self._num_asked += 1
        self._pool.submit(self._run_work, work)

    def _run_work(self, work: Callable[[], None]) -> None:
        try:
            with self._busy.working():
                work()
        finally:
            self._num_done += 1

    def _live(self) -> dict[str, Any]:
        return {"queues": {"requests": max(0, self._num_asked - self._num_done)}}


def timers(verbs: Iterable[object], stats: Stats) -> dict[int, Callable[[float], None]]:
    """Counts the seconds of requests: a function for each verb."""
    named = {verb: verb.name.lower() for verb in verbs if isinstance(verb, IntEnum)}
    return {int(verb): partial(stats.requests.add, name) for verb, name in named.items()}


def attempt(request: Request, work: Callable[[], None]) -> None:
    """Does work for a request; answers it by what goes wrong."""
    try:
        work()
    except Exception as error:
        request.fail(error)


def as_text(value: object) -> NDArray[np.uint8]:
    """JSON as an array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_text(array: NDArray[Any]) -> Any:
    """The inverse of :func:`as_text`."""
    return json.loads(array.tobytes())


def as_integer(number: float) -> int:
    """The bits of a float64."""
    return int(np.float64(number).view(np.int64))


def as_float(bits: int) -> float:
    """The inverse of :func:`as_integer`."""
    return float(np.int64(bits).view(np.float64))


def answer(reply: Reply) -> Frame:
    """Waits for an answer; raises what the other process raised."""
    try:
        return reply.wait()
    except RemoteError as error:
        raise named(str(error)) or error from None


def answers(
    clients: Iterable[Client],
    kind: int,
    fields: Sequence[int] = (),
    arrays: Sequence[NDArray[Any]] = (),
    *,
    again: bool = False,
) -> list[Frame]:
    """Asks all of them the same, side by side; waits for their answers, and raises the first error once all are here.

    Args:
        again: asks one again that was restarted before it answered, for what may be done twice.
    """
    asked = [(client, client.call(kind, fields, arrays)) for client in clients]
    found: list[Frame] = []
    errors: list[Exception] = []
    for client, first in asked:
        try:
            reply = first
            while again and isinstance(reply.exception(), Lost):
                reply = client.call(kind, fields, arrays)
            found.append(answer(reply))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory as an array that may be written, as torch wants it.

    What comes over a wire is read-only, and is this process's alone.
    """
    return np.asarray(_Writable(array)) if not array.flags.writeable else array


class _Writable:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array  # keeps the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
