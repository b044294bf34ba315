"""The narrow layer that RPC stands on: messages of parts, to and from peers, without any promise.

A message may be lost, doubled, late or damaged; the RPC above makes of that a call that happens exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import Part

SERVER = b""
"""The only peer of a client."""


class Channel(Protocol):
    """One end. The endpoint calls ``wait`` from its own thread; ``wake`` and ``buffer`` from any; all others under a
    lock of its own.
    """

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        """Takes a message; never waits. What cannot be sent is lost."""

    def receive(self) -> tuple[bytes, list[Part]] | None:
        """The next message and whose it is; None when there is none now.

        Raises:
            WireError: there was one, and it is no use.
        """

    def wait(self, seconds: float | None) -> None:
        """Until there may be a message, or ``wake`` was called, or so long. For the endpoint's own thread."""

    def wake(self) -> None:
        """Ends a ``wait``, this or the next one. From any thread."""

    def buffer(self, peer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Memory that goes to this peer without a copy, or None where any memory does as well. From any thread."""

    def offer(self) -> bytes:
        """What a client tells its server in a hello, for ``accept``."""

    def accept(self, peer: bytes, offer: bytes) -> bool:
        """Called by a server for a peer that knows the secret; False if the offer is of no use."""

    def accepted(self, useful: bool) -> None:
        """Called by a client with what ``accept`` said."""

    def forget(self, peer: bytes) -> None:
        """The peer is gone."""

    def gone(self, peer: bytes) -> bool:
        """Whether the peer is known to be dead."""

    def close(self) -> None:
        """Leaves no thread, file, socket or segment. What was sent just before may still go out."""


class PlainChannel:
    """The methods of a channel that has no memory to share."""

    def buffer(self, peer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        return None

    def offer(self) -> bytes:
        return b""

    def accept(self, peer: bytes, offer: bytes) -> bool:
        return True

    def accepted(self, useful: bool) -> None:
        pass

    def forget(self, peer: bytes) -> None:
        pass

    def gone(self, peer: bytes) -> bool:
        return False
