"""Interface of transports, as calls need it: one side listens, one dials, and connections join the two.

Messages of parts go over a connection in order, whole and once, until it breaks. Nothing here blocks except ``dial``;
callers wait on the file descriptors.
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import LAYOUT, Part
from girih.errors import WireError

_SIGN: Final = b"girih" + struct.pack("<HB", LAYOUT, 0)
_RANDOM_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_HELLO: Final = struct.Struct("<QQ")
_WELCOME: Final = struct.Struct("<QQQ")
CHALLENGE_BYTES: Final = len(_SIGN) + _RANDOM_BYTES
HELLO_BYTES: Final = CHALLENGE_BYTES + _HELLO.size + _PROOF_BYTES
WELCOME_BYTES: Final = _WELCOME.size + _PROOF_BYTES


class Hello(NamedTuple):
    """The message with which a client begins.

    Attributes:
        session: the one it wants to go on with; 0 for a new one.
        received: messages of that session that it has.
    """

    session: int
    received: int


class Welcome(NamedTuple):
    """The server's answer to a client.

    Attributes:
        incarnation: the server's.
        session: the client's own, or a new one where the server does not know that.
        received: messages of the session that the server has.
    """

    incarnation: int
    session: int
    received: int


def challenge() -> bytes:
    """The message with which either side begins."""
    return _SIGN + os.urandom(_RANDOM_BYTES)


def pack_hello(secret: bytes, challenged: bytes, hello: Hello) -> bytes:
    """The client's answer to a challenge.

    Raises:
        WireError: it is none.
    """
    _check_sign(challenged)
    said = challenge() + _HELLO.pack(*hello)
    return said + _proof(secret, b"client", challenged, said)


def unpack_hello(secret: bytes, challenged: bytes, said: bytes) -> Hello:
    """Checks and reads a client's answer.

    Raises:
        WireError: it does not know the secret.
    """
    _check_sign(said)
    content, proof = said[:-_PROOF_BYTES], said[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", challenged, content)):
        raise WireError("a stranger who does not know the secret")
    return Hello(*_HELLO.unpack_from(content, CHALLENGE_BYTES))


def pack_welcome(secret: bytes, challenged: bytes, hello: bytes, welcome: Welcome) -> bytes:
    """The server's answer to a hello."""
    said = _WELCOME.pack(*welcome)
    return said + _proof(secret, b"server", challenged, hello, said)


def unpack_welcome(secret: bytes, challenged: bytes, hello: bytes, said: bytes) -> Welcome:
    """Checks and reads a server's answer.

    Raises:
        WireError: the server does not know the secret.
    """
    content, proof = said[:-_PROOF_BYTES], said[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"server", challenged, hello, content)):
        raise WireError("who listens there does not know the secret")
    return Welcome(*_WELCOME.unpack(content))


def _check_sign(said: bytes) -> None:
    if not said.startswith(_SIGN):
        raise WireError(f"a stranger who says {said[: len(_SIGN)]!r}; expected {_SIGN!r}")


def _proof(secret: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"".join((who, *said)), "sha256")


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

    def buffer(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[Any] | None:
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

    def read_hello(self, secret: bytes) -> Hello | None:
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
