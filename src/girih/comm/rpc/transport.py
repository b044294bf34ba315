"""Interface of transports for calls: one side listens, one side dials, and connections join the two.

Messages of parts go over a connection in order, whole and once, until it breaks. Only ``dial`` blocks. For everything
else callers wait on file descriptors.
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
    """The first message of a client.

    Attributes:
        session: the session that it wants to continue, or 0 for a new session.
        received: messages of this session that it has.
    """

    session: int
    received: int


class Welcome(NamedTuple):
    """The server's answer to a client.

    Attributes:
        incarnation: the server's.
        session: the client's session, or a new session if the server does not know it.
        received: messages of the session that the server has.
    """

    incarnation: int
    session: int
    received: int


def challenge() -> bytes:
    """Returns the first message of either side."""
    return _SIGN + os.urandom(_RANDOM_BYTES)


def pack_hello(secret: bytes, challenged: bytes, hello: Hello) -> bytes:
    """Returns the client's answer to a challenge.

    Raises:
        WireError: ``challenged`` is no challenge.
    """
    _check_sign(challenged)
    said = challenge() + _HELLO.pack(*hello)
    return said + _proof(secret, b"client", challenged, said)


def unpack_hello(secret: bytes, challenged: bytes, said: bytes) -> Hello:
    """Checks and reads a client's answer.

    Raises:
        WireError: the client does not know the secret.
    """
    _check_sign(said)
    content, proof = said[:-_PROOF_BYTES], said[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", challenged, content)):
        raise WireError("the client does not know the secret")
    return Hello(*_HELLO.unpack_from(content, CHALLENGE_BYTES))


def pack_welcome(secret: bytes, challenged: bytes, hello: bytes, welcome: Welcome) -> bytes:
    """Returns the server's answer to a hello."""
    said = _WELCOME.pack(*welcome)
    return said + _proof(secret, b"server", challenged, hello, said)


def unpack_welcome(secret: bytes, challenged: bytes, hello: bytes, said: bytes) -> Welcome:
    """Checks and reads a server's answer.

    Raises:
        WireError: the server does not know the secret.
    """
    content, proof = said[:-_PROOF_BYTES], said[-_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"server", challenged, hello, content)):
        raise WireError("the server does not know the secret")
    return Welcome(*_WELCOME.unpack(content))


def _check_sign(said: bytes) -> None:
    if not said.startswith(_SIGN):
        raise WireError(f"the other side began with {said[: len(_SIGN)]!r}; expected {_SIGN!r}")


def _proof(secret: bytes, who: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"".join((who, *said)), "sha256")


class ConnectionLost(WireError):
    """The connection broke, or a received message is invalid."""


class SilentPeer(ConnectionLost):
    """A peer left before it sent anything."""


class Connection(Protocol):
    """One end of a connection to a proved peer. One thread receives, and a lock guards the rest."""

    def fileno(self) -> int:
        """Returns a file to wait for: readable when there may be a message, writable when ``flush`` may help."""

    def send(self, parts: Sequence[Part]) -> bool:
        """Takes a message. Returns whether all of it was sent; ``flush`` sends the rest.

        Raises:
            ConnectionLost: the connection broke. The receiving thread sees this too.
        """

    def flush(self) -> bool:
        """Continues to send. Returns whether nothing is left.

        Raises:
            ConnectionLost: the connection broke.
        """

    def receive(self) -> list[Part] | None:
        """Returns the next message, or None if there is none until the file is readable.

        Raises:
            ConnectionLost: no message will come.
        """

    def buffer(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Returns memory that is sent without a copy, or None if other memory is as good. Callable from any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the connection, after trying for ``linger_s`` to send the rest."""


class Stranger(Protocol):
    """A connected peer that has not proved anything yet. It takes a file and a fixed small number of bytes.

    Attributes:
        origin: the peer's host, if known.
    """

    origin: str

    def fileno(self) -> int:
        """Returns a file that becomes readable when the peer sends."""

    def read_hello(self, secret: bytes) -> Hello | None:
        """Reads on. Returns the peer's hello once it has proved that it knows the secret.

        Raises:
            WireError, OSError: the proof failed, or the peer left.
        """

    def welcome(self, secret: bytes, welcome: Welcome) -> Connection:
        """Answers the hello, and returns the connection.

        Raises:
            OSError: the peer left.
        """

    def close(self) -> None:
        """Closes the connection."""


class Listener(Protocol):
    """Takes connections at an address."""

    address: str

    def fileno(self) -> int:
        """Returns a file that is readable when a peer has connected."""

    def accept(self) -> Stranger | None:
        """Returns a peer that has connected, or None if there is none.

        Raises:
            OSError: there are no descriptors.
        """

    def close(self) -> None:
        """Stops listening."""


class Dialer(Protocol):
    """Connects to an address."""

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        """Connects to a server that proves that it knows the secret.

        Raises:
            OSError: nobody listens there, or the server does not know the secret.
        """

    def stop(self) -> None:
        """Ends the current or next ``dial`` of another thread."""
