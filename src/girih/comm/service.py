"""Connections between the processes of a run, and the base class of all services that answer requests."""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

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

T = TypeVar("T")
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
        handler: called once for each request, on the server's thread. It must be quick. Another thread may send the
            reply. If the handler raises an exception, the exception is the reply.
        address: ``tcp://HOST:PORT``, ``tls://HOST:PORT``, or ``shm://`` for this host. The port ``*`` is any free port.
            The default is loopback. Data are encrypted only with ``tls``. The secret is never sent.
        secret: the secret that clients must know.
        incarnation: the number of restarts of this process's role and index. It is sent to clients.
        gone: called on the server's thread with the number of a client that left or is forgotten. It must be quick.
        patience_s: a client is forgotten after this time without a connection. The default is two minutes.

    Raises:
        WireError: the server cannot listen at the address.
    """
    endpoint = parse_address(address)
    listener = SocketListener(endpoint, *endpoint.listen())
    return Server(listener, handler, secret=secret, incarnation=incarnation, gone=gone, patience_s=patience_s)


def connect(
    address: str, *, secret: bytes, timeout_s: float = 40.0, resolve: Callable[[], str] | None = None
) -> Client:
    """Connects to a server. Returns immediately, even if the server does not listen yet.

    After a broken connection, the client reconnects and the session continues, so that each call is executed once. If
    the server's process ended, open calls fail with ``Lost``, and later calls go to the next incarnation.

    Args:
        address: ``Server.address``.
        secret: the server's secret.
        timeout_s: a call that waits for a connection for this time fails with ``WireTimeout``. With a connection, a
            call may take any time.
        resolve: returns the server's address before each reconnection, because a restarted server listens at another
            address. It raises LookupError while the address is unknown. Without this function, calls fail immediately
            if no server listens at the address any more.

    Raises:
        WireError: no connection to the address is possible.
    """
    client = Client(dialer, address, secret=secret, timeout_s=timeout_s, resolve=resolve)
    _SECRETS[client] = secret
    return client


def abort_clients(secret: bytes) -> None:
    """Closes the clients of this process that use the run's secret. Their calls in progress raise ``WireError``."""
    for client, known in list(_SECRETS.items()):
        if known == secret:
            with contextlib.suppress(GirihError, OSError):
                client.close()


def dialer(address: str) -> Dialer:
    """Returns the dialer that connects to an address.

    Raises:
        WireError: the address is invalid.
    """
    return SocketDialer(parse_address(address))


@dataclass(kw_only=True)
class Service:
    """A server of a run: its settings, and its answers to requests.

    It is pickled and sent to its process through a private pipe. A request for a verb calls the method ``on_<verb>``.
    If the method raises an exception, the exception is the answer. One thread handles the requests, one after the
    other, unless a subclass has more threads.

    A service that can restart may have an attribute ``recovery_note``, a line about the state of its data at the start.

    Attributes:
        name: its role, if it is a separate process. verbs: its kinds of requests.
        index: its index in the role.
        address: its endpoint. secret: the secret that callers must know. patience_s: see :func:`listen`.
        incarnation: the number of restarts of this role and index, set in its process.
        stats: the statistics of its process, with the time of requests, the queue length, and the busy time of threads.
        num_threads: the number of threads that handle requests.
        share: the share of each thread, see :meth:`girih.telemetry.busy.Busy.working`.
    """

    name: ClassVar[str]
    verbs: ClassVar[type[IntEnum]]
    index: int
    address: str
    secret: bytes
    incarnation: int = 0
    patience_s: float | None = None
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)
    num_threads: int = field(default=1, init=False)
    share: float = field(default=1.0, init=False)

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set. Calls ``ready`` once with its address."""
        with ExitStack() as closing:
            ready(self.listen(closing))
            stop.wait()

    def listen(self, closing: ExitStack) -> str:
        """Opens the service, and answers requests until ``closing`` is closed. Returns the service's address."""
        self.open(closing)
        server = listen(
            self.handle,
            address=self.address,
            secret=self.secret,
            incarnation=self.incarnation,
            gone=self.forget,
            patience_s=self.patience_s,
        )
        return closing.enter_context(server).address

    def open(self, closing: ExitStack) -> None:
        """Creates the resources for requests. Subclasses extend it. ``closing`` releases them in reverse order."""
        methods = ((verb, getattr(self, f"on_{verb.name.lower()}", None)) for verb in self.verbs)
        self._methods = {int(verb): method for verb, method in methods if method is not None}
        self._pool = closing.enter_context(ThreadPoolExecutor(self.num_threads, "girih-serve"))
        self._num_waiting, self._counting = 0, threading.Lock()
        self.stats.gauges["incarnation"] = self.incarnation
        self.stats.watch(lambda: {"queues": {"requests": self._num_waiting}})

    def handle(self, request: Request) -> None:
        """Accepts a request."""
        self.answer(request, partial(self._methods[request.frame.kind], request))

    def answer(self, request: Request, work: Callable[[], None]) -> None:
        """Runs the work of a request, and measures the time until the answer."""
        name = self.verbs(request.frame.kind).name.lower()
        request.answered = partial(self.stats.requests.add, name)
        self.later(request, work)

    def forget(self, client: int) -> None:
        """Drops the state of a client that left for good. It must be quick, because the server's thread calls it."""

    def later(self, request: Request, work: Callable[[], None]) -> None:
        """Puts work for a request at the end of the queue."""
        self.afterwards(partial(attempt, request, work))

    def afterwards(self, work: Callable[[], None]) -> None:
        """Puts work without a caller at the end of the queue. The work must report its failures to later callers."""
        self._count_waiting(1)
        self._pool.submit(self._run_work, work)

    def _run_work(self, work: Callable[[], None]) -> None:
        try:
            with self.stats.busy.working(self.share):
                work()
        finally:
            self._count_waiting(-1)

    def _count_waiting(self, change: int) -> None:
        with self._counting:
            self._num_waiting += change

    def on_stats(self, request: Request) -> None:
        """Answers with the statistics of the process."""
        request.reply((), (as_text(self.snapshot(spans=bool(request.frame.fields[0]))),))

    def snapshot(self, *, spans: bool) -> object:
        """Returns the statistics of the process as plain values."""
        return self.stats.snapshot(spans=spans)


class Meeting(Generic[T]):
    """Collects one message from each member, until all members have sent a message.

    Attributes:
        waiting: the messages by member. absent: the members whose messages are not needed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.waiting: dict[int, T] = {}
        self.absent: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """True if no member is missing."""
        return len(self.waiting.keys() | self.absent) == self._size

    def end(self) -> list[T]:
        """Returns the messages, in the order of members, and begins the next meeting."""
        messages = [self.waiting[member] for member in sorted(self.waiting)]
        self.waiting = {}
        return messages


def attempt(request: Request, work: Callable[[], None]) -> None:
    """Runs work for a request. If the work raises an error, the error is the answer."""
    try:
        work()
    except Exception as error:
        request.fail(error)


def as_text(value: object) -> NDArray[np.uint8]:
    """Returns a value as JSON in an array."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def from_text(array: NDArray[Any]) -> Any:
    """Reverses :func:`as_text`."""
    return json.loads(array.tobytes())


def as_integer(number: float) -> int:
    """Returns the bits of a float64."""
    return int(np.float64(number).view(np.int64))


def as_float(bits: int) -> float:
    """Reverses :func:`as_integer`."""
    return float(np.int64(bits).view(np.float64))


def answer(reply: Reply) -> Frame:
    """Waits for an answer. Raises the error of the other process."""
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
    """Sends the same call to all clients together, and waits for all answers. Then raises the first error.

    Args:
        again: repeats a call to a process that restarted before it answered. Only for calls that may run twice.
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
    """Returns a writable array for torch: a view of the same memory, or a copy if the memory cannot be written.

    Received arrays are read-only, but no other process uses their memory.
    """
    array = array.view()
    try:
        array.flags.writeable = True
    except ValueError:  # the message is a bytes object
        return np.array(array)
    return array
