"""``listen`` and ``connect``: the transport is chosen by the address."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

from girih.comm.rpc.channel import Channel
from girih.comm.rpc.client import Client
from girih.comm.rpc.frames import Limits
from girih.comm.rpc.server import Request, Server
from girih.comm.transports.addresses import TCP
from girih.comm.transports.inproc import InprocClient, InprocServer
from girih.comm.transports.shared import SharedClient, SharedServer
from girih.comm.transports.socket_client import SocketClient
from girih.comm.transports.socket_server import SocketServer
from girih.errors import GirihError, WireError
from girih.testing.faults import Faults, FaultyChannel

_SECRETS: weakref.WeakKeyDictionary[Client, bytes] = weakref.WeakKeyDictionary()


def listen(
    handler: Callable[[Request], None],
    *,
    address: str = "tcp://127.0.0.1:*",
    secret: bytes,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    checksums: bool = False,
) -> Server:
    """Answers requests with ``handler`` until the server is closed.

    Args:
        handler: called on the server's thread for each request, once; it must be quick, and may leave the reply to
            another thread. An exception that it raises is the reply.
        address: ``tcp://HOST:PORT`` (``*``: any free port), ``shm://`` for this host, ``inproc://NAME`` for this
            process. Loopback unless another host is named: the secret and all data travel in the clear.
        secret: what clients must know.
        checksums: arrays sent carry a checksum; headers always do.

    Raises:
        WireError: the address cannot be listened at.
    """
    channel: SocketServer | InprocServer
    if address.startswith("tcp://"):
        channel = SocketServer(TCP(address), limits)
    elif address == "shm://":
        channel = SharedServer(limits)
    elif address.startswith("inproc://"):
        channel = InprocServer(address)
    else:
        raise _unknown(address)
    return Server(channel, channel.address, handler, secret=secret, limits=limits, checksums=checksums)


def connect(
    address: str,
    *,
    secret: bytes,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    timeout_s: float = 10.0,
    retries: int = 3,
    checksums: bool = False,
    faults: Faults | None = None,
) -> Client:
    """Connects to a server; returns at once, whether it is there or not.

    A request without a sign of the server for ``timeout_s`` is sent again, up to ``retries`` times; then its reply
    raises ``WireTimeout``. A server that still works at it says so when asked again, and the tries begin anew.

    Args:
        address: ``Server.address``.
        secret: the server's.
        checksums: arrays sent carry a checksum; headers always do.
        faults: what goes wrong on purpose, in both directions.

    Raises:
        WireError: the address cannot be connected to.
        StorageFullError: there is no shared memory for ``shm://``.
    """
    channel: Channel
    if address.startswith("tcp://"):
        channel = SocketClient(TCP(address), limits)
    elif address.startswith("shm://"):
        channel = SharedClient(address, limits)
    elif address.startswith("inproc://"):
        channel = InprocClient(address)
    else:
        raise _unknown(address)
    if faults is not None:
        channel = FaultyChannel(channel, faults)
    client = Client(
        channel,
        address,
        secret=secret,
        limits=limits,
        timeout_s=timeout_s,
        retries=retries,
        checksums=checksums,
    )
    _SECRETS[client] = secret
    return client


def abort_clients(secret: bytes) -> None:
    """Closes the clients of this process that know a secret, the run's: calls in progress raise ``WireError``."""
    for client, known in list(_SECRETS.items()):
        if known == secret:
            with contextlib.suppress(GirihError, OSError):
                client.close()


def _unknown(address: str) -> WireError:
    return WireError(f"address {address!r}; expected tcp://HOST:PORT, shm:// or inproc://NAME")
