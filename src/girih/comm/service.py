"""Connections between the processes of a run, and the base class of all that answer requests."""

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


@dataclass(kw_only=True)
class Service:
    """A server of a run: its settings, which reach its process by pickle, through a private pipe, and its answers to requests.

    A request is done by the method ``on_`` with the name of its verb, and an exception is the answer too. Requests are done one after
    the other, by one thread, unless a subclass has more of them.

    One that restarts may have an attribute ``recovery_note``, a line on the state in which it found its data.

    Attributes:
        name: its role, where it is a process of its own. verbs: what is asked of it.
        index: which of its role.
        address: where to listen. secret: what callers prove to know. patience_s: see :func:`listen`.
        incarnation: how often this role and index has been restarted, set in its process.
        stats: of its process; they have how long requests took, how many wait, and how long threads worked.
        num_threads: threads that do requests. share: see :meth:`girih.telemetry.busy.Busy.working`, of each of them.
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
        """Serves until ``stop`` is set; says where it listens by ``ready``, once."""
        with ExitStack() as closing:
            ready(self.listen(closing))
            stop.wait()

    def listen(self, closing: ExitStack) -> str:
        """Opens the service and answers requests until ``closing`` is closed; returns where it listens."""
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
        """Makes what requests need; subclasses add to it. ``closing`` ends what was made last first."""
        methods = ((verb, getattr(self, f"on_{verb.name.lower()}", None)) for verb in self.verbs)
        self._methods = {int(verb): method for verb, method in methods if method is not None}
        self._pool = closing.enter_context(ThreadPoolExecutor(self.num_threads, "girih-serve"))
        self._num_waiting, self._counting = 0, threading.Lock()
        self.stats.watch(self._live)

    def handle(self, request: Request) -> None:
        """Takes a request in."""
        self.answer(request, partial(self._methods[request.frame.kind], request))

    def answer(self, request: Request, work: Callable[[], None]) -> None:
        """Does the work of a request, and counts how long its answer takes."""
        name = self.verbs(request.frame.kind).name.lower()
        request.answered = partial(self.stats.requests.add, name)
        self.later(request, work)

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back. Called by the server's thread: be quick."""

    def later(self, request: Request, work: Callable[[], None]) -> None:
        """Does work for a request after all that waits."""
        self.afterwards(partial(attempt, request, work))

    def afterwards(self, work: Callable[[], None]) -> None:
        """Does work that nobody waits for after all that waits; whoever asks for what it failed to do is told."""
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

    def _live(self) -> dict[str, Any]:
        return {"queues": {"requests": self._num_waiting}}

    def on_stats(self, request: Request) -> None:
        """Answers with the statistics of the process."""
        request.reply((), (as_text(self.snapshot(spans=bool(request.frame.fields[0]))),))

    def snapshot(self, *, spans: bool) -> object:
        """The statistics of the process as plain values."""
        return self.stats.snapshot(spans=spans)


class Meeting(Generic[T]):
    """Messages of members who wait until all are there.

    Attributes:
        waiting: messages by member. absent: members who are not waited for.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.waiting: dict[int, T] = {}
        self.absent: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether nobody is waited for any more."""
        return len(self.waiting.keys() | self.absent) == self._size

    def end(self) -> list[T]:
        """The messages, in the order of members; the next meeting begins."""
        messages = [self.waiting[member] for member in sorted(self.waiting)]
        self.waiting = {}
        return messages


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
    """The same memory as an array that may be written, as torch wants it; a copy where it may not be.

    What comes over a wire is read-only, and is this process's alone.
    """
    array = array.view()
    try:
        array.flags.writeable = True
    except ValueError:  # of a message that is bytes
        return np.array(array)
    return array
