"""Connections on which things go wrong on purpose: those faults that a stream can have."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.endpoints import dialer
from girih.comm.rpc import Client
from girih.comm.rpc.frames import Part
from girih.comm.rpc.handshake import Hello, Welcome
from girih.comm.rpc.transport import Connection, ConnectionLost, Dialer
from girih.comm.transports.streams import laid_out

_MOST_FLIPPED: Final = 4
_HEADER_BYTES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities that something happens to a message, in either direction.

    Attributes:
        broken: the connection breaks before it, in its middle, or after it.
        refused: the same of each attempt to connect.
        corrupt: up to 4 bytes of its header are others.
        delay: it, and all behind it, is late by up to ``delay_s`` seconds.
        cut_after: after so many messages the connection breaks, and nobody listens any more; None: never.
        seed: of the dice.
    """

    broken: float = 0.0
    refused: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.5
    delay_s: float = 0.0
    cut_after: int | None = None
    seed: int = 0


def connect(
    address: str,
    *,
    faults: Faults,
    secret: bytes,
    timeout_s: float = 40.0,
    resolve: Callable[[], str] | None = None,
    dialer: Callable[[str], Dialer] = dialer,
) -> Client:
    """See :func:`girih.comm.endpoints.connect`."""
    dice = _Dice(faults)
    return Client(
        lambda where: FaultyDialer(dialer(where), dice),
        address,
        secret=secret,
        timeout_s=timeout_s,
        resolve=resolve,
    )


class _Dice(random.Random):
    """One client's."""

    def __init__(self, faults: Faults) -> None:
        super().__init__(faults.seed)
        self.faults = faults
        self.num_messages = 0

    def cut(self) -> bool:
        """Whether it is over for good."""
        return self.faults.cut_after is not None and self.num_messages > self.faults.cut_after


class FaultyDialer:
    """Makes faulty connections."""

    def __init__(self, inner: Dialer, dice: _Dice) -> None:
        self._inner, self._dice = inner, dice
        self.stop = inner.stop

    def dial(self, secret: bytes, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
        if self._dice.cut():
            raise ConnectionRefusedError("cut")
        if self._dice.random() < self._dice.faults.refused:
            raise ConnectionResetError("of these faults")
        connection, welcome = self._inner.dial(secret, hello, timeout_s)
        if self._dice.random() < self._dice.faults.refused:  # the server has begun a session by now
            connection.close()
            raise ConnectionResetError("of these faults")
        return FaultyConnection(connection, self._dice), welcome


class FaultyConnection:
    """A connection with faults."""

    def __init__(self, inner: Connection, dice: _Dice) -> None:
        self._inner, self._dice = inner, dice
        self._broken = False
        self.fileno, self.flush, self.buffer, self.close = (
            inner.fileno,
            inner.flush,
            inner.buffer,
            inner.close,
        )

    def send(self, parts: Sequence[Part]) -> bool:
        if self._broken:
            raise ConnectionLost("broken")
        parts = self._late_or_corrupt(parts)
        kind = self._breaks()
        if kind == "before":
            self._break()
        elif kind == "amid":
            self._break(parts)
        flushed = self._inner.send(parts)
        if kind == "after":
            self._break()
        return flushed

    def receive(self) -> list[Part] | None:
        if self._broken:
            raise ConnectionLost("broken")
        parts = self._inner.receive()
        if parts is None:
            return None
        if self._breaks():
            self._break()
        return self._late_or_corrupt(parts)

    def _breaks(self) -> str | None:
        self._dice.num_messages += 1
        if self._dice.cut():
            return "before"
        if self._dice.random() < self._dice.faults.broken:
            return self._dice.choice(("before", "amid", "after"))
        return None

    def _break(self, amid: Sequence[Part] | None = None) -> None:
        """Breaks the connection; some of a message may go out before."""
        self._broken = True
        stream = getattr(self._inner, "stream", self._inner)
        inner: socket.socket | None = getattr(stream, "socket", None)
        if inner is None:  # in this process
            self._inner.other.end()  # type: ignore[attr-defined]
            self._inner.end()  # type: ignore[attr-defined]
            raise ConnectionLost("broken")
        with suppress(OSError):
            if amid is not None and stream.flush():
                whole = b"".join(laid_out(amid))
                inner.send(whole[: self._dice.randrange(len(whole))])
        with suppress(OSError):
            inner.shutdown(socket.SHUT_RDWR)
        raise ConnectionLost("broken")

    def _late_or_corrupt(self, parts: Sequence[Part]) -> list[Part]:
        faults, dice, parts = self._dice.faults, self._dice, list(parts)
        if faults.delay_s and dice.random() < faults.delay:
            time.sleep(dice.uniform(0, faults.delay_s))
        if dice.random() < faults.corrupt:
            damaged: NDArray[Any] = np.array(parts[0])
            for _ in range(dice.randint(1, _MOST_FLIPPED)):
                damaged[dice.randrange(_HEADER_BYTES)] ^= dice.randint(1, 255)
            parts[0] = damaged
        return parts
