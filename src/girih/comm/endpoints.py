"""``listen`` and ``connect``: the transport is chosen by the address."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

from girih.comm.rpc.client import Client
from girih.comm.rpc.request import Request
from girih.comm.rpc.server import Server
from girih.comm.rpc.transport import Dialer
from girih.comm.transports.addresses import parse_address
from girih.comm.transports.sockets import SocketDialer, SocketListener
from girih.errors import GirihError

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
