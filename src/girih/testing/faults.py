"""A connection on which things go wrong on purpose: any channel with faults between it and the RPC."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.channel import SERVER, Channel
from girih.comm.rpc.frames import Part

_OVERTAKEN_S: Final = 0.01
_LOOKS_S: Final = 0.003
_MOST_FLIPPED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often a message, in either direction, meets which fault: probabilities.

    Attributes:
        drop: it is lost.
        delay: it is late, by up to ``delay_s`` seconds; others may come before it.
        duplicate: it comes twice.
        reorder: those sent within the next 10 ms come before it.
        corrupt: up to 4 of its bytes are others; arrays notice only with checksums.
        cut_after: after so many messages nothing passes any more; None: never.
        seed: of the dice.
    """

    drop: float = 0.0
    delay_s: float = 0.0
    delay: float = 0.5
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0
    cut_after: int | None = None
    seed: int = 0


class FaultyChannel:
    """A client's channel with faults."""

    def __init__(self, channel: Channel, faults: Faults) -> None:
        self._channel = channel
        self._faults = faults
        self._dice = random.Random(faults.seed)
        self._num_messages = 0
        self._late: list[
            tuple[float, int, bool, list[Part]]
        ] = []  # a heap: when, tie-breaker, outward, message
        self._received: deque[list[Part]] = deque()
        # what the faults do not touch
        self.wake = channel.wake
        self.buffer = channel.buffer
        self.offer = channel.offer
        self.accept = channel.accept
        self.accepted = channel.accepted
        self.forget = channel.forget
        self.gone = channel.gone
        self.close = channel.close

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        self._pass(list(parts), outward=True)

    def receive(self) -> tuple[bytes, list[Part]] | None:
        self._release()
        while not self._received:
            message = self._channel.receive()
            if message is None:
                return None
            self._pass(message[1], outward=False)
        return SERVER, self._received.popleft()

    def wait(self, seconds: float | None) -> None:
        self._channel.wait(self._until_due(seconds))

    def _until_due(self, seconds: float | None) -> float:
        """What is late may be sent while another thread waits: so none waits for long."""
        if self._received:
            return 0.0
        return _LOOKS_S if seconds is None else min(seconds, _LOOKS_S)

    def _pass(self, parts: list[Part], *, outward: bool) -> None:
        faults, dice = self._faults, self._dice
        self._num_messages += 1
        if faults.cut_after is not None and self._num_messages > faults.cut_after:
            return
        if dice.random() < faults.drop:
            return
        if dice.random() < faults.corrupt:
            parts = self._corrupted(parts)
        for _ in range(2 if dice.random() < faults.duplicate else 1):
            late_s = dice.uniform(0, faults.delay_s) if dice.random() < faults.delay else 0.0
            if dice.random() < faults.reorder:
                late_s += _OVERTAKEN_S
            if late_s:
                item = (time.monotonic() + late_s, dice.getrandbits(60), outward, parts)
                heapq.heappush(self._late, item)
            else:
                self._deliver(parts, outward)

    def _deliver(self, parts: list[Part], outward: bool) -> None:
        if outward:
            self._channel.send(SERVER, parts)
        else:
            self._received.append(parts)

    def _release(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, outward, parts = heapq.heappop(self._late)
            self._deliver(parts, outward)

    def _corrupted(self, parts: list[Part]) -> list[Part]:
        parts = list(parts)
        number = self._dice.randrange(len(parts))
        damaged: NDArray[Any] = np.array(parts[number])
        for _ in range(self._dice.randint(1, _MOST_FLIPPED)):
            damaged[self._dice.randrange(len(damaged))] ^= self._dice.randint(1, 255)
        parts[number] = damaged
        return parts
