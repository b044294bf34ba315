"""Connections on one host: a local socket for what is small, lanes of shared memory for what is not.

The server makes both lanes of a connection when it welcomes a client that proved that it knows the secret, and sends
their files with the welcome. They have no names, so that nothing stays behind, however the processes end. On Linux
the socket has no file either.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from girih.comm.rpc.frames import OWN_PART_BYTES, Part
from girih.comm.transports.lanes import LaneFile, OutLane
from girih.comm.transports.streams import SocketStream
from girih.errors import WireError

_SIGN: Final = b"LANE"
_LOCATION: Final = struct.Struct("<iQQ")  # slot, start, bytes
_INLINE: Final = -1


class SharedConnection:
    """A stream, and a lane in each direction beside it."""

    def __init__(self, stream: SocketStream, outward: LaneFile, inward: LaneFile) -> None:
        self.stream = stream
        self._outward, self._inward = OutLane(outward), inward
        self.fileno, self.flush, self.buffer = stream.fileno, stream.flush, self._outward.buffer

    def send(self, parts: Sequence[Part]) -> bool:
        locations, inline = [], []
        for part in parts:
            location = self._outward.send(part) if len(part) >= OWN_PART_BYTES else None
            if location is None:
                inline.append(part)
                locations.append((_INLINE, 0, 0))
            else:
                locations.append((*location, len(part)))
        if len(inline) == len(parts):
            return self.stream.send(parts)
        table = _SIGN + b"".join(_LOCATION.pack(*location) for location in locations)
        return self.stream.send([np.frombuffer(table, np.uint8), *inline])

    def receive(self) -> list[Part] | None:
        parts = self.stream.receive()
        if not parts or parts[0][:4].tobytes() != _SIGN:
            return parts
        table, inline = parts[0][len(_SIGN) :], parts[1:]
        if len(table) % _LOCATION.size:
            raise WireError("a message with locations cut short")
        found = []
        for slot, start, size in _LOCATION.iter_unpack(table.tobytes()):
            if slot != _INLINE:
                found.append(self._inward.view(slot, start, size))
            elif inline:
                found.append(inline.pop(0))
            else:
                raise WireError("a message that lacks a part")
        return found + inline

    def close(self, linger_s: float = 0.0) -> None:
        self.stream.close(linger_s)
        self._outward.close()
        self._inward.close()
