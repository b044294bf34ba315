"""Frames of JSON behind their length, and the proof of a secret that is never sent."""

from __future__ import annotations

import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

PROOF_S: Final = 5.0
"""How long a stranger may take to prove that it knows the secret."""
MOST_STRANGER_BYTES: Final = 1 << 10
MOST_BYTES: Final = 1 << 28
_LENGTH: Final = struct.Struct("!I")


def prove(secret: bytes, side: str, *challenges: str) -> str:
    """The answer to challenges that only somebody who knows the secret can give."""
    return hmac.digest(secret, "\0".join((side, *challenges)).encode(), "sha256").hex()


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Sends a frame."""
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket, most_bytes: int, until: float | None = None) -> Any:
    """The next frame.

    Raises:
        OSError: the connection ended, or time is over. ValueError: it is too long, or no JSON.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, until))
    if length > most_bytes:
        raise ValueError(f"a message of {length:,} bytes; at most {most_bytes:,}")
    return json.loads(_read(connection, length, until))


def _read(connection: socket.socket, num_bytes: int, until: float | None) -> bytes:
    """Exactly so many bytes; one that dribbles them does not get more time for it."""
    content = b""
    while len(content) < num_bytes:
        if until is not None:
            connection.settimeout(max(1e-3, until - time.monotonic()))
        part = connection.recv(min(1 << 16, num_bytes - len(content)))
        if not part:
            raise ConnectionError("the other side closed the connection")
        content += part
    return content
