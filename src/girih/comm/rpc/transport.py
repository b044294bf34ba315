"""The interface of transports for calls. A server listens, a client dials, and connections join them.

A connection transports messages, which are lists of parts. Each message arrives whole, once and in order, until the
connection breaks. Only ``dial`` blocks. In all other cases, callers wait on file descriptors.
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
        session: the session that the client wants to continue, or 0 for a new session.
        received: the number of messages of this session that the client has received.
    """

    session: int
    received: int


class Welcome(NamedTuple):
    """The server's answer to a client.

    Attributes:
        incarnation: the server's incarnation.
        session: the client's session, or a new session if the server does not know the client's session.
        received: the number of messages of the session that the server has received.
    """

    incarnation: int
    session: int
    received: int


def challenge() -> bytes:
    """Returns a challenge, which is the first message of each side."""
    return _SIGN + os.urandom(_RANDOM_BYTES)


def pack_hello(secret: bytes, challenged: bytes, hello: Hello) -> bytes:
    """Returns the client's answer to a challenge.

    Raises:
        WireError: ``challenged`` is not a challenge.
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
    """A peer left before it sent a message."""


class Connection(Protocol):
    """One end of a connection to a peer that knows the secret. One thread receives. A lock guards all other methods."""

    def fileno(self) -> int:
        """Returns a file. It is readable if a message may have arrived, and writable if ``flush`` can send more."""

    def send(self, parts: Sequence[Part]) -> bool:
        """Begins to send a message. Returns whether the whole message was sent. ``flush`` sends the rest.

        Raises:
            ConnectionLost: the connection broke. The receiving thread sees this too.
        """

    def flush(self) -> bool:
        """Continues to send. Returns whether all messages were sent.

        Raises:
            ConnectionLost: the connection broke.
        """

    def receive(self) -> list[Part] | None:
        """Returns the next message, or None if there is none until the file is readable.

        Raises:
            ConnectionLost: the connection broke, so no message will arrive.
        """

    def buffer(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Returns memory that is sent without a copy, or None if there is none. Callable from any thread."""

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the connection. Before, tries for ``linger_s`` to send the rest."""


class Stranger(Protocol):
    """A connected peer that has not proved yet that it knows the secret. It uses one file and a few bytes of memory.

    Attributes:
        origin: the peer's host, if it is known.
    """

    origin: str

    def fileno(self) -> int:
        """Returns a file that becomes readable when the peer sends."""

    def read_hello(self, secret: bytes) -> Hello | None:
        """Continues to read. Returns the peer's hello when the peer has proved that it knows the secret, else None.

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
    """Accepts connections at an address."""

    address: str

    def fileno(self) -> int:
        """Returns a file that is readable when a peer has connected."""

    def accept(self) -> Stranger | None:
        """Returns a peer that has connected, or None if there is none.

        Raises:
            OSError: there are no file descriptors left.
        """

    def close(self) -> None:
        """Stops listening."""


class Dialer(Protocol):
    """Connects to an address."""

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        """Connects to a server that proves that it knows the secret.

        Raises:
            OSError: no server listens at the address, or the server does not know the secret.
        """

    def stop(self) -> None:
        """Ends the current or next ``dial`` of another thread."""
