"""Interface of transports, as calls need it: one side listens, one dials, and connections join the two.

Messages of parts go over a connection in order, whole and once, until it breaks. Nothing here blocks except ``dial``;
callers wait on the file descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import Part
from girih.comm.rpc.handshake import Hello, Welcome
from girih.errors import WireError


class ConnectionLost(WireError):
    """The connection broke, or what comes over it is no message."""


class SilentPeer(ConnectionLost):
    """Somebody left who had said nothing."""


class Connection(Protocol):
    """One end, whose other end has proved that it knows the secret. One thread receives; a lock guards the rest."""

    def fileno(self) -> int:
        """A file to wait for: readable when there may be a message, writable when ``flush`` may help."""

    def send(self, parts: Sequence[Part]) -> bool:
        """Takes a message; whether all was sent. The rest goes with ``flush``.

        Raises:
            ConnectionLost: it broke; the receiving thread will see it too.
        """

    def flush(self) -> bool:
        """Sends on; whether nothing is left.

        Raises:
            ConnectionLost: it broke.
        """

    def receive(self) -> list[Part] | None:
        """The next message; None when there is none until the file is readable.

        Raises:
            ConnectionLost: there will be none.
        """

    def buffer(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Memory that is sent without a copy, or None where any memory does as well. From any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Ends it; for so long it tries to send what is left."""


class Stranger(Protocol):
    """Somebody who connected, and has not proved anything yet. He takes a file and a fixed small number of bytes.

    Attributes:
        origin: the host that he is from, as far as it is known.
    """

    origin: str

    def fileno(self) -> int:
        """A file to wait for until it is readable."""

    def hear(self, secret: bytes) -> Hello | None:
        """Reads on; once he proved that he knows the secret, what he said.

        Raises:
            WireError, OSError: he did not, or left.
        """

    def welcome(self, secret: bytes, welcome: Welcome) -> Connection:
        """Answers the hello that was heard; he is no stranger any more.

        Raises:
            OSError: he left.
        """

    def close(self) -> None:
        """Ends the connection."""


class Listener(Protocol):
    """Takes connections at an address."""

    address: str

    def fileno(self) -> int:
        """A file that is readable when somebody connected."""

    def accept(self) -> Stranger | None:
        """Somebody who connected.

        Raises:
            OSError: there are no descriptors.
        """

    def close(self) -> None:
        """Ends it."""


class Dialer(Protocol):
    """Connects to an address."""

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        """A connection to a server that proved that it knows the secret.

        Raises:
            OSError: nobody listens there, or somebody without the secret.
        """

    def stop(self) -> None:
        """Ends a ``dial`` in another thread, this or the next one."""
