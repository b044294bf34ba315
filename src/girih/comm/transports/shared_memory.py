"""Connections on one host: a local socket for small parts, and lanes of shared memory for large parts.

The server creates both lanes of a connection when it admits a client, and sends the lanes' files with the welcome. The
files have no names, so no file remains, even if the processes are killed. On Linux, the socket has no file either.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from girih.comm.rpc.frames import OWN_PART_BYTES, Part
from girih.comm.transports.streams import SocketStream
from girih.errors import WireError

NUM_SLOTS: Final = 4096
LANE_BYTES: Final = 64 << 20
_LINE: Final = 64
_GROWTH: Final = 1 << 20


class LaneFile:
    """The mapped memory of a lane, without a name.

    Args:
        file: the lane's file descriptor. The object owns it from now on.

    Raises:
        WireError, OSError: the file is not a lane.
    """

    def __init__(self, file: int) -> None:
        self.file = file
        size = os.fstat(file).st_size
        if size <= NUM_SLOTS:
            raise WireError(f"a file of {size} bytes is not a lane")
        self.num_bytes = size - NUM_SLOTS
        self._map = mmap.mmap(file, size)
        view = memoryview(self._map)
        self.slots, self.data = view[:NUM_SLOTS], view[NUM_SLOTS:]
        self.address: int = np.frombuffer(self.data, np.uint8).__array_interface__["data"][0]

    @classmethod
    def make(cls, num_bytes: int) -> LaneFile:
        """Creates a new lane. It is address space, which takes memory only when it is used.

        Raises:
            OSError: the system has no memory or no file descriptors left.
        """
        if hasattr(os, "memfd_create"):
            file = os.memfd_create("girih")
        else:
            file, path = tempfile.mkstemp(prefix="girih-")
            os.unlink(path)
        try:
            os.ftruncate(file, NUM_SLOTS + num_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, NUM_SLOTS)
            return cls(file)
        except BaseException:
            os.close(file)
            raise

    def view(self, slot: int, start: int, size: int) -> Part:
        """Returns a view of a part in the lane, for the receiver. The part's memory is free when its last view is gone.

        Raises:
            WireError: the part is outside the lane.
        """
        if slot >= NUM_SLOTS or start + size > self.num_bytes:
            raise WireError(f"an array of {size:,} bytes at {start:,} in a lane of {self.num_bytes:,}")
        array = np.frombuffer(self.data[start : start + size], np.uint8)
        _when_dropped(array, self.slots.__setitem__, slot, 0)
        return array

    def close(self) -> None:
        """Closes the file. Existing views stay valid. The mapping ends with the last view."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


@dataclass(order=True, slots=True)
class _Chunk:
    start: int
    end: int = field(compare=False)
    held: bool = field(compare=False, default=True)  # True while an array of this process uses the chunk
    slots: list[int] = field(compare=False, default_factory=list)  # the slots of its sent parts


class OutLane:
    """The sender's end of a lane. Any thread may take arrays. Only one thread sends."""

    def __init__(self, file: LaneFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []  # in the order of their starts
        self._free_slots = list(range(NUM_SLOTS))
        self._backed = 0  # the bytes that have memory; an access to later bytes could kill the process
        self._most = file.num_bytes

    def buffer(self, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> NDArray[Any] | None:
        """Returns an array in the lane's memory. Returns None if the array is small, or if there is no room."""
        num_bytes = dtype.itemsize * math.prod(shape)
        chunk = self._take(num_bytes) if num_bytes >= OWN_PART_BYTES else None
        if chunk is None:
            return None
        array = np.frombuffer(self._file.data[chunk.start : chunk.start + num_bytes], dtype)
        _when_dropped(array, setattr, chunk, "held", False)
        return array.reshape(shape)

    def send(self, part: Part) -> tuple[int, int] | None:
        """Makes a part readable for the other side. Returns its slot and start, or None if there is no room."""
        start = part.__array_interface__["data"][0] - self._file.address
        chunk = self._find(start, len(part)) if 0 <= start < self._file.num_bytes else None
        copied = chunk is None
        if chunk is None:
            chunk = self._take(len(part))
            if chunk is None:
                return None
            start = chunk.start
            np.copyto(np.frombuffer(self._file.data[start : start + len(part)], np.uint8), part)
        with self._lock:
            slot = self._free_slots.pop() if self._free_slots else None
            if slot is not None:
                self._file.slots[slot] = 1
                chunk.slots.append(slot)
            if copied:
                chunk.held = False
        return None if slot is None else (slot, start)

    def close(self) -> None:
        """Closes this end. Sent parts stay valid for the receiver, and taken arrays stay valid for their owners."""
        with self._lock:
            self._most = 0
            self._file.close()

    def _find(self, start: int, size: int) -> _Chunk | None:
        with self._lock:
            number = bisect_right(self._chunks, start, key=lambda chunk: chunk.start) - 1
            chunk = self._chunks[number] if number >= 0 else None
        return chunk if chunk is not None and start + size <= chunk.end else None

    def _take(self, num_bytes: int) -> _Chunk | None:
        size = max(1, -(-num_bytes // _LINE)) * _LINE
        with self._lock:
            self._reclaim()
            start = 0
            for chunk in self._chunks:
                if start + size <= chunk.start:
                    break
                start = chunk.end
            if start + size > self._most or not self._back(start + size):
                return None
            taken = _Chunk(start, start + size)
            insort(self._chunks, taken)
        return taken

    def _reclaim(self) -> None:
        """Frees the memory that neither side uses any more."""
        slots = self._file.slots
        kept = []
        for chunk in self._chunks:
            for slot in list(chunk.slots):
                if not slots[slot]:
                    chunk.slots.remove(slot)
                    self._free_slots.append(slot)
            if chunk.held or chunk.slots:
                kept.append(chunk)
        self._chunks = kept

    def _back(self, end: int) -> bool:
        """Makes the system reserve memory up to ``end``. Returns False if this fails.

        It can fail because a container's /dev/shm is small.
        """
        if end > self._backed and hasattr(os, "posix_fallocate"):
            more = min(self._file.num_bytes, -(-end // _GROWTH) * _GROWTH)
            try:
                os.posix_fallocate(self._file.file, NUM_SLOTS + self._backed, more - self._backed)
            except OSError:
                self._most = self._backed
                return False
            self._backed = more
        return True


def _when_dropped(array: NDArray[Any], call: Callable[..., None], *arguments: Any) -> None:
    """Calls a function when an array and all its views are gone, but not when the process ends."""
    weakref.finalize(array, call, *arguments).atexit = False


_SIGN: Final = b"LANE"
_LOCATION: Final = struct.Struct("<iQQ")  # slot, start, bytes
_INLINE: Final = -1


class SharedConnection:
    """A connection over a stream, with a lane in each direction."""

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
            raise WireError("the locations in a message were cut short")
        found = []
        for slot, start, size in _LOCATION.iter_unpack(table.tobytes()):
            if slot != _INLINE:
                found.append(self._inward.view(slot, start, size))
            elif inline:
                found.append(inline.pop(0))
            else:
                raise WireError("a part of a message is missing")
        return found + inline

    def close(self, linger_s: float = 0.0) -> None:
        self.stream.close(linger_s)
        self._outward.close()
        self._inward.close()
