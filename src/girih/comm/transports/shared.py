"""Messages on one host: a local socket for what is small, lanes of shared memory for what is not.

The client makes both lanes and names them in its hello; a server that accepts it maps them and takes their names
away, so that nothing stays behind, however the processes end. On Linux the socket has no file either.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import OWN_PART_BYTES, Limits, Part
from girih.comm.transports.addresses import Local
from girih.comm.transports.lanes import InLane, LaneFile, OutLane
from girih.comm.transports.socket_client import SocketClient
from girih.comm.transports.socket_server import SocketServer
from girih.errors import WireError

_SIGN: Final = b"LANE"
_PLACE: Final = struct.Struct("<iQQ")  # slot, start, bytes
_INLINE: Final = -1


class _Lanes:
    """Both directions of one connection."""

    def __init__(self, outward: LaneFile, inward: LaneFile) -> None:
        self.files = (outward, inward)
        self.outward = OutLane(outward)
        self.inward = InLane(inward)

    def close(self) -> None:
        self.outward.close()
        self.inward.close()

    def put(self, parts: Sequence[Part]) -> Sequence[Part]:
        """What remains to be sent of a message once its large parts lie in a lane."""
        places, inline = [], []
        for part in parts:
            place = self.outward.send(part) if len(part) >= OWN_PART_BYTES else None
            if place is None:
                inline.append(part)
                places.append((_INLINE, 0, 0))
            else:
                places.append((*place, len(part)))
        if len(inline) == len(parts):
            return parts
        table = _SIGN + b"".join(_PLACE.pack(*place) for place in places)
        return [np.frombuffer(table, np.uint8), *inline]

    def get(self, table: Part, inline: list[Part]) -> list[Part]:
        """Undoes ``put``.

        Raises:
            WireError: there are no such places.
        """
        if (len(table) - len(_SIGN)) % _PLACE.size:
            raise WireError("a message with places cut short")
        parts = []
        for slot, start, size in _PLACE.iter_unpack(table[len(_SIGN) :].tobytes()):
            if slot != _INLINE:
                parts.append(self.inward.view(slot, start, size))
            elif inline:
                parts.append(inline.pop(0))
            else:
                raise WireError("a message that lacks a part")
        return parts + inline

    def buffer(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Memory of the lane that is sent as it is."""
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return self.outward.buffer(dtype, shape, num_bytes) if num_bytes >= OWN_PART_BYTES else None


def _resolved(message: tuple[bytes, list[Part]], lanes: _Lanes | None) -> tuple[bytes, list[Part]]:
    peer, parts = message
    if not parts or parts[0][:4].tobytes() != _SIGN:
        return message
    if lanes is None:
        raise WireError("a message through lanes that were not agreed on")
    return peer, lanes.get(parts[0], parts[1:])


class SharedServer(SocketServer):
    """Listens at a name that it draws: ``address`` is what clients connect to."""

    def __init__(self, limits: Limits) -> None:
        self._lanes: dict[bytes, _Lanes] = {}
        self._folder: Path | None = None
        name = f"@girih-{os.urandom(16).hex()}"
        if sys.platform != "linux":
            self._folder = Path(tempfile.mkdtemp(prefix="girih-"))
            name = str(self._folder / "socket")
        super().__init__(Local(name), limits)
        self.address = f"shm://{name}"

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        lanes = self._lanes.get(peer)
        super().send(peer, parts if lanes is None else lanes.put(parts))

    def receive(self) -> tuple[bytes, list[Part]] | None:
        message = super().receive()
        return None if message is None else _resolved(message, self._lanes.get(message[0]))

    def buffer(self, peer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        lanes = self._lanes.get(peer)
        return None if lanes is None else lanes.buffer(dtype, shape)

    def accept(self, peer: bytes, offer: bytes) -> bool:
        super().accept(peer, offer)
        if peer in self._lanes:
            return True
        files: list[LaneFile] = []
        try:
            for name in offer.decode("ascii").split(" ", 1):
                files.append(LaneFile.open(name))
            inward, outward = files
        except (OSError, ValueError):  # WireError is an OSError
            for file in files:
                file.close()
            return False
        self._lanes[peer] = _Lanes(outward, inward)
        for file in files:
            file.unlink()
        return True

    def forget(self, peer: bytes) -> None:
        super().forget(peer)
        lanes = self._lanes.pop(peer, None)
        if lanes is not None:
            lanes.close()

    def gone(self, peer: bytes) -> bool:
        lanes = self._lanes.get(peer)
        return (lanes is not None and lanes.files[1].maker_is_gone()) or super().gone(peer)

    def close(self) -> None:
        super().close()
        for lanes in self._lanes.values():
            lanes.close()
        self._lanes.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class SharedClient(SocketClient):
    """Connects to ``SharedServer.address``."""

    def __init__(self, address: str, limits: Limits) -> None:
        outward = LaneFile.make(limits.lane_bytes)
        try:
            self._lanes = _Lanes(outward, LaneFile.make(limits.lane_bytes))
        except BaseException:
            outward.unlink()
            outward.close()
            raise
        self._agreed = False
        try:
            super().__init__(Local(address.removeprefix("shm://")), limits)
        except BaseException:
            self._leave()
            raise

    def send(self, peer: bytes, parts: Sequence[Part]) -> None:
        super().send(peer, self._lanes.put(parts) if self._agreed else parts)

    def receive(self) -> tuple[bytes, list[Part]] | None:
        message = super().receive()
        return None if message is None else _resolved(message, self._lanes)

    def buffer(self, peer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
        return self._lanes.buffer(dtype, shape) if self._agreed else None

    def offer(self) -> bytes:
        return " ".join(file.name for file in self._lanes.files).encode()

    def accepted(self, useful: bool) -> None:
        for file in self._lanes.files:
            file.unlink()
        self._agreed = useful

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        self._agreed = False
        for file in self._lanes.files:
            file.unlink()
        self._lanes.close()
