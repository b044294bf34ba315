"""Addresses of sockets: ``tcp://HOST:PORT``, ``tls://HOST:PORT`` and local names. Also the settings of the sockets."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from girih.errors import WireError

_BACKLOG: Final = 1024
_ALIVE: Final = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a silent host is lost after 40 s


@dataclass(frozen=True, slots=True)
class TCP:
    """A TCP address: a host and a port. For listening, port 0 means any free port.

    Attributes:
        encrypted: True if connections use TLS.
    """

    host: str
    port: int
    encrypted: bool = False

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.encrypted else 'tcp'}://{host}:{self.port}"

    def listen(self) -> tuple[socket.socket, str]:
        """Returns a listening socket, and an address that others can connect to."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise WireError(f"cannot listen at {str(self)!r}: {error}; expected tcp://HOST:PORT") from error
        return listener, str(TCP(self.host, listener.getsockname()[1], self.encrypted))

    def dial(self) -> tuple[socket.socket, tuple[object, ...] | str]:
        """Returns a socket for the address, and the argument of its ``connect``.

        Raises:
            OSError: the host is not known.
        """
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, kind, proto, _, sockaddr = found[0]
        return socket.socket(family, kind, proto), sockaddr

    def prepare(self, connection: socket.socket) -> None:
        """Sets the options of a connection."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def leave(self) -> None:
        """Does nothing, because a TCP address leaves no file."""


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """A socket of this host: the path of a file, or ``@`` and a name without a file (Linux)."""

    name: str
    encrypted: ClassVar[bool] = False

    @classmethod
    def drawn(cls) -> LocalAddress:
        """Returns a new random address."""
        name = f"@girih-{os.urandom(16).hex()}"
        if sys.platform != "linux":
            name = f"{tempfile.mkdtemp(prefix='girih-')}/socket"
        return cls(name)

    def sockaddr(self) -> str:
        """Returns the address in the form of the system."""
        return "\0" + self.name[1:] if self.name.startswith("@") else self.name

    def listen(self) -> tuple[socket.socket, str]:
        """Returns a listening socket, and an address that others can connect to."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.sockaddr())
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise WireError(f"cannot listen at {self.name!r}: {error}") from error
        return listener, f"shm://{self.name}"

    def dial(self) -> tuple[socket.socket, tuple[object, ...] | str]:
        """Returns a socket for the address, and the argument of its ``connect``."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), self.sockaddr()

    def prepare(self, connection: socket.socket) -> None:
        """Does nothing, because local sockets need no options."""

    def leave(self) -> None:
        """Deletes the socket's file, and the folder that was created for it."""
        if not self.name.startswith("@"):
            with suppress(OSError):
                Path(self.name).unlink()
                Path(self.name).parent.rmdir()


def parse_address(address: str) -> TCP | LocalAddress:
    """Returns the endpoint of an address. ``shm://`` creates a new endpoint. Port ``*`` means any free port.

    Raises:
        WireError: the address is invalid.
    """
    kind, _, name = address.partition("://")
    host, _, port = name.rpartition(":")
    port = "0" if port == "*" else port
    if kind in ("tcp", "tls") and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return TCP(host.removeprefix("[").removesuffix("]"), int(port), kind == "tls")
    if kind == "shm":
        return LocalAddress(name) if name else LocalAddress.drawn()
    raise WireError(f"address {address!r}; expected tcp://HOST:PORT, tls://HOST:PORT or shm://")
