"""Both ends of a transport under test: a server whose handler keeps count, and a client."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from numpy.typing import NDArray

from girih.comm import service
from girih.comm.rpc import Client, Request, Server
from girih.comm.rpc.transport import Dialer
from girih.comm.service import dialer
from support import faults
from support.faults import Faults

SECRET = b"of this run"
ECHO, FAIL, SLOW, COUNT, TWICE, CLOSE = range(6)
DTYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]


class Handler:
    """Answers by kind; counts how often each first field was asked."""

    def __init__(self) -> None:
        self.ran: dict[int, int] = {}
        self.clients: set[int] = set()
        self.held: queue.Queue[Request] = queue.Queue()

    def __call__(self, request: Request) -> None:
        kind, fields, arrays = request.frame.kind, request.frame.fields, request.frame.arrays
        self.clients.add(request.client)
        if fields:
            self.ran[fields[0]] = self.ran.get(fields[0], 0) + 1
        if kind == ECHO:
            request.reply(fields, arrays)
        elif kind == FAIL:
            raise ValueError(f"no such row {fields[0]}")
        elif kind == SLOW:
            self.held.put(request)
        elif kind == COUNT:
            request.reply((fields[0], self.ran[fields[0]]))
        elif kind == TWICE:
            request.reply(fields)
            request.reply(fields)


def same(got: Sequence[NDArray[Any]], want: Sequence[NDArray[Any]]) -> None:
    """Whether arrays are equal in every bit."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Waits for it."""
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "too late"
        time.sleep(0.005)


def break_connection(client: Client) -> None:
    """Breaks the connection that a client has."""
    connection: Any = client._session.connection
    stream = getattr(connection, "stream", connection)
    if hasattr(stream, "socket"):
        stream.socket.shutdown(socket.SHUT_RDWR)
    else:
        stream.end()


class TransportEnds:
    """The address and functions that a transport's tests need.

    Attributes:
        address: to listen at, with any name or port.
        dialer: what connects to an address.
        listen, connect: of the transport.
    """

    address: str
    dialer: Callable[[str], Dialer] = staticmethod(dialer)
    listen: Callable[..., Server] = staticmethod(service.listen)
    connect: Callable[..., Client] = staticmethod(service.connect)

    @pytest.fixture
    def handler(self) -> Handler:
        return Handler()

    @pytest.fixture
    def server(self, handler: Handler) -> Iterator[Server]:
        before = set(threading.enumerate())
        with self.listen(handler, address=self.address, secret=SECRET) as server:
            yield server
        assert [t.name for t in set(threading.enumerate()) - before if t.name.startswith("girih ")] == []

    @pytest.fixture
    def client(self, server: Server) -> Iterator[Client]:
        with self.connect(server.address, secret=SECRET) as client:
            yield client

    def faulty(self, address: str, these: Faults) -> Client:
        return faults.connect(address, secret=SECRET, faults=these, dialer=self.dialer)
