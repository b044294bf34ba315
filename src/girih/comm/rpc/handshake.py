"""Mutual proof of two processes that they know the run's secret, without sending it.

    server → client   challenge   sign, 32 random bytes
    client → server   hello       sign, 32 random bytes, the session to go on with, proof
    server → client   welcome     what comes of the session, proof

A proof is the HMAC-SHA256, under the secret, of who speaks and all that both have said so far, what it ends included.
The client proves itself first, so that a stranger gets nothing to try secrets on. All three have fixed sizes.
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Final, NamedTuple

from girih.comm.rpc.frames import LAYOUT
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
