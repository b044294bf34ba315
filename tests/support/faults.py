"""Connections on which things go wrong on purpose: those faults that a stream can have."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc import Client
from girih.comm.rpc.frames import Part
from girih.comm.rpc.transport import Connection, ConnectionLost, Dialer, Hello, Welcome
from girih.comm.service import dialer
from girih.comm.transports.streams import laid_out

_MOST_FLIPPED: Final = 4
_SOON_S: Final = 0.02
_HEADER_BYTES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities that something happens to a message, in either direction.

    Attributes:
        broken: the connection breaks before it, in its middle, or after it.
        refused: the same of each attempt to connect.
        corrupt: up to 4 bytes of its header are others.
        doubled: it comes twice.
        swapped: the one behind it comes first, where that is there.
        dropped: it does not come, and the connection breaks soon.
        delay: it, and all behind it, is late by up to ``delay_s`` seconds.
        parted: the connection breaks before it, and none is made to that address for ``parted_s`` seconds.
        cut_after: after so many messages the connection breaks, and no process listens any more; None: never.
        seed: of the dice.
    """

    broken: float = 0.0
    refused: float = 0.0
    corrupt: float = 0.0
    doubled: float = 0.0
    swapped: float = 0.0
    dropped: float = 0.0
    delay: float = 0.5
    delay_s: float = 0.0
    parted: float = 0.0
    parted_s: float = 1.0
    cut_after: int | None = None
    seed: int = 0


def faulty(
    dial: Callable[[str], Dialer], faults: Faults, tell: Callable[[str], object] = lambda fault: None
) -> Callable[[str], Dialer]:
    """Returns a ``dial`` on whose connections things go wrong; each address has dice of its own.

    Args:
        tell: called with the name of each fault when it happens, by whichever thread meets it.
    """
    dice: dict[str, _Dice] = {}

    def dial_faulty(address: str) -> Dialer:
        thrown = dice.setdefault(address, _Dice(faults, len(dice), tell))
        return FaultyDialer(dial(address), thrown)

    return dial_faulty


def connect(
    address: str,
    *,
    faults: Faults,
    secret: bytes,
    timeout_s: float = 40.0,
    resolve: Callable[[], str] | None = None,
    dialer: Callable[[str], Dialer] = dialer,
) -> Client:
    """See :func:`girih.comm.service.connect`."""
    return Client(
        faulty(dialer, faults),
        address,
        secret=secret,
        timeout_s=timeout_s,
        resolve=resolve,
    )


class _Dice(random.Random):
    """The dice of one address, and what lasts longer than a connection to it."""

    def __init__(self, faults: Faults, number: int, tell: Callable[[str], object]) -> None:
        super().__init__(f"{faults.seed}/{number}" if number else faults.seed)
        self.faults, self.tell = faults, tell
        self.num_messages = 0
        self._parted_until_s = 0.0

    def meets(self, fault: str) -> bool:
        """Whether a fault happens, which is told."""
        happens = bool(self.random() < getattr(self.faults, fault))
        if happens:
            self.tell(fault)
        return happens

    def part(self) -> None:
        """Has no connection made for a while, nor go on."""
        self._parted_until_s = time.monotonic() + self.faults.parted_s

    def is_parted(self) -> bool:
        """Whether it is so now."""
        return time.monotonic() < self._parted_until_s

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
        if self._dice.is_parted() or self._dice.meets("refused"):
            raise ConnectionResetError("of these faults")
        connection, welcome = self._inner.dial(secret, hello, timeout_s)
        if self._dice.meets("refused"):  # the server has begun a session by now
            connection.close()
            raise ConnectionResetError("of these faults")
        return FaultyConnection(connection, self._dice), welcome


class FaultyConnection:
    """A connection with faults."""

    def __init__(self, inner: Connection, dice: _Dice) -> None:
        self._inner, self._dice = inner, dice
        self._broken = False
        self._come: deque[list[Part]] = deque()  # not handed on yet
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
        if self._dice.meets("dropped"):
            self._break_soon()
            return True
        flushed = self._inner.send(parts)
        if self._dice.meets("doubled"):
            flushed = self._inner.send(parts)
        if kind == "after":
            self._break()
        return flushed

    def receive(self) -> list[Part] | None:
        if self._broken:
            raise ConnectionLost("broken")
        if self._come:
            return self._come.popleft()
        parts = self._inner.receive()
        if parts is None:
            return None
        if self._dice.meets("dropped"):
            self._break_soon()
            return self.receive()
        if self._dice.meets("swapped") and (behind := self._inner.receive()) is not None:
            self._come.append(parts)
            return behind
        if self._dice.meets("doubled"):
            self._come.append(parts)
        if self._breaks():
            self._break()
        return self._late_or_corrupt(parts)

    def _break_soon(self) -> None:
        def end() -> None:
            with suppress(ConnectionLost, OSError):
                self._break()

        timer = threading.Timer(_SOON_S, end)
        timer.daemon = True
        timer.start()

    def _breaks(self) -> str | None:
        self._dice.num_messages += 1
        if self._dice.cut() or self._dice.is_parted():
            return "before"
        if self._dice.meets("parted"):
            self._dice.part()
            return "before"
        if self._dice.meets("broken"):
            return self._dice.choice(("before", "amid", "after"))
        return None

    def _break(self, amid: Sequence[Part] | None = None) -> None:
        """Breaks the connection; some of a message may go out before."""
        self._broken = True
        stream = getattr(self._inner, "stream", self._inner)
        inner: socket.socket | None = getattr(stream, "socket", None)
        if inner is None:  # in this process
            ends: tuple[Any, ...] = (self._inner.other, self._inner)  # type: ignore[attr-defined]
            for each in ends:
                if each is not None:
                    each.end()
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
        if faults.delay_s and dice.meets("delay"):
            time.sleep(dice.uniform(0, faults.delay_s))
        if dice.meets("corrupt"):
            damaged: NDArray[Any] = np.array(parts[0])
            for _ in range(dice.randint(1, _MOST_FLIPPED)):
                damaged[dice.randrange(_HEADER_BYTES)] ^= dice.randint(1, 255)
            parts[0] = damaged
        return parts
