"""Frames: the content of one message between processes, and its layout in bytes.

A message is a list of parts, each uint8[n]. The first part has a header of fixed size, the integers, a description of
each array, a CRC-32 of all this, and the small arrays. Each large array is a separate part, which is the array's memory
without changes. All numbers are little-endian.

    header   magic, layout version, kind, status, number of fields and arrays, number, request, acknowledged
    fields   int64 each
    arrays   dtype, dims, separate part or not, shape
    CRC-32   of everything before it
    small arrays, each from a multiple of 8 bytes on
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from girih.errors import WireError

Part = NDArray[np.uint8]
"""uint8[n], C-contiguous. Received parts start at a multiple of 8 bytes and are read-only."""

OWN_PART_BYTES: Final = 1 << 14
MOST_FIELDS: Final = 12
MOST_ARRAYS: Final = 4096
MOST_BYTES: Final = 1 << 30  # of all arrays of a frame; a larger frame is refused before it takes memory
MOST_DIMS: Final = 3
MOST_EXTENT: Final = 1 << 40  # numpy refuses the shape (0, 2⁶³), although it has no elements
MAGIC: Final = b"GRIH"
LAYOUT: Final = 3

_HEADER: Final = struct.Struct("<4sHHHBxH2xQQQ")
_ARRAY: Final = struct.Struct("<BBB5x3Q")
_CRC: Final = struct.Struct("<I")
_DTYPES: Final = tuple(
    np.dtype(name)
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    )
)  # fmt: skip
_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Status(IntEnum):
    """Kind of a message, for the session."""

    REQUEST, REPLY, FAILED, ACKNOWLEDGE, GOODBYE = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A request or an answer.

    Attributes:
        kind: the number of the verb, 0 to 65,535.
        fields: up to 12 integers, each an int64.
        arrays: up to 4,096 arrays, of at most 1 GiB together. Each is C-contiguous and little-endian, with up to 3 dims.
            Items are integers of 8 to 64 bits, or floats of 16, 32 or 64 bits. Arrays of a received frame are read-only
            views of the frame's memory.
    """

    kind: int
    fields: tuple[int, ...] = ()
    arrays: tuple[NDArray[Any], ...] = ()


class Header(NamedTuple):
    """Facts about a message that the session needs.

    Attributes:
        status: a :class:`Status`, or any other number that was received.
        number: the message's number. The sender counts from 1 in the order of sending. 0 means that the message is not
            counted.
        request: the number of the request that a reply answers, or 0 in other messages.
        acknowledged: the sender has received the other side's messages up to this number.
    """

    status: int
    number: int
    request: int
    acknowledged: int


class PackedFrame:
    """A checked frame as the bytes of a message, without the header.

    Attributes:
        num_bytes: the size of its arrays in bytes.

    Raises:
        WireError: the frame does not fit the layout, or exceeds the limits.
    """

    __slots__ = ("_counts", "_described", "_kind", "_large", "_small", "num_bytes")

    def __init__(self, frame: Frame) -> None:
        if len(frame.fields) > MOST_FIELDS:
            raise WireError(
                f"kind {frame.kind}: {len(frame.fields)} fields; at most {MOST_FIELDS}; use an array"
            )
        num_arrays, num_bytes = len(frame.arrays), sum(array.nbytes for array in frame.arrays)
        if num_arrays > MOST_ARRAYS:
            raise WireError(f"kind {frame.kind}: {num_arrays} arrays, at most {MOST_ARRAYS}; join some")
        if num_bytes > MOST_BYTES:
            raise WireError(
                f"kind {frame.kind}: {num_bytes:,} bytes of arrays, at most {MOST_BYTES:,}; send less in one message"
            )
        self.num_bytes = num_bytes
        self._kind, self._counts = frame.kind, (len(frame.fields), num_arrays)
        try:
            described = [struct.pack(f"<{len(frame.fields)}q", *frame.fields)]
        except struct.error as error:
            raise WireError(f"kind {frame.kind}: fields {frame.fields}: each must be an int64") from error
        self._small: list[bytes] = []
        self._large: list[Part] = []
        for number, array in enumerate(frame.arrays):
            described.append(self._lay(array, f"kind {frame.kind}: array {number}"))
        self._described = b"".join(described)

    def _lay(self, array: NDArray[Any], label: str) -> bytes:
        code = _CODES.get(array.dtype)
        unfit = array.ndim > MOST_DIMS or not array.flags.c_contiguous or _extent(array.shape) > MOST_EXTENT
        if code is None or unfit:
            raise WireError(
                f"{label} is {array.dtype}{list(array.shape)}, strides {array.strides}; expected a C-contiguous"
                f" array of integers or floats with at most {MOST_DIMS} dims; see np.ascontiguousarray"
            )
        data: Part = array.reshape(-1).view(np.uint8)
        own = array.nbytes >= OWN_PART_BYTES
        if own:
            self._large.append(data)
        elif array.nbytes:
            self._small.append(data.tobytes() + bytes(-array.nbytes % 8))
        shape = (*array.shape, *(1,) * (MOST_DIMS - array.ndim))
        return _ARRAY.pack(code, array.ndim, own, *shape)

    def parts(self, header: Header) -> list[Part]:
        """Returns the message's parts. Call it each time that the message is sent."""
        status, *numbers = header
        head = _HEADER.pack(MAGIC, LAYOUT, self._kind, status, *self._counts, *numbers)
        crc = zlib.crc32(self._described, zlib.crc32(head))
        first = b"".join((head, self._described, _CRC.pack(crc), b"\0\0\0\0", *self._small))
        return [np.frombuffer(first, np.uint8), *self._large]


def _extent(shape: Sequence[int]) -> int:
    """Returns the product of all dims that are not 0."""
    return math.prod(dim or 1 for dim in shape)


def unpack(parts: Sequence[Part]) -> tuple[Header, Frame]:
    """Reads a message. The arrays are views of the message's parts.

    Raises:
        WireError: the message is damaged, has another layout, or exceeds the limits.
    """
    first = parts[0] if parts else np.empty(0, np.uint8)
    if len(first) < _HEADER.size:
        raise WireError(f"a message of {len(first)} bytes; a header has {_HEADER.size}")
    head = first.data
    magic, layout, kind, status, num_fields, num_arrays, *numbers = _HEADER.unpack_from(head)
    if magic != MAGIC or layout != LAYOUT:
        raise WireError(f"a message of {magic!r}, layout {layout}; expected {MAGIC!r}, layout {LAYOUT}")
    if num_fields > MOST_FIELDS or num_arrays > MOST_ARRAYS:
        raise WireError(
            f"a message of {num_fields} fields, {num_arrays} arrays; at most {MOST_FIELDS}, {MOST_ARRAYS}"
        )
    arrays_at = _HEADER.size + 8 * num_fields
    end = arrays_at + _ARRAY.size * num_arrays
    if len(first) < end + 8:
        raise WireError(f"a message was cut short: {len(first)} bytes of at least {end + 8}")
    if zlib.crc32(head[:end]) != _CRC.unpack_from(head, end)[0]:
        raise WireError("a message has a damaged header: its CRC-32 differs")
    fields = struct.unpack_from(f"<{num_fields}q", head, _HEADER.size)
    described = list(_ARRAY.iter_unpack(head[arrays_at:end]))
    arrays = _views(described, parts, end + 8)
    return Header(status, *numbers), Frame(kind, fields, arrays)


def _views(described: Sequence[Sequence[int]], parts: Sequence[Part], start: int) -> tuple[NDArray[Any], ...]:
    """Returns the described arrays. They must fill the parts exactly."""
    arrays: list[NDArray[Any]] = []
    num_bytes, next_part = 0, 1
    for code, ndim, own, *shape in described:
        if code >= len(_DTYPES) or ndim > MOST_DIMS:
            raise WireError(f"a message with an array of dtype {code} and {ndim} dims, which are unknown")
        if _extent(shape[:ndim]) > MOST_EXTENT:
            raise WireError(f"a message with an array of shape {shape[:ndim]}; it is larger than the limit")
        count = math.prod(shape[:ndim])
        size = count * _DTYPES[code].itemsize
        num_bytes += size
        if num_bytes > MOST_BYTES:
            raise WireError(f"a message of {num_bytes:,} bytes or more; at most {MOST_BYTES:,}")
        if own:
            data = parts[next_part] if next_part < len(parts) else parts[0][:0]
            next_part += 1
            fits = len(data) == size
        else:
            data = parts[0][start : start + size]
            start += size + -size % 8
            fits = start <= len(parts[0])
        if not fits:
            raise WireError(f"a message with an array of {size:,} bytes, but only {len(data):,} arrived")
        array = data.view(_DTYPES[code]).reshape(shape[:ndim])
        array.flags.writeable = False
        arrays.append(array)
    if next_part != len(parts) or start != len(parts[0]):
        raise WireError(f"a message has more bytes than its {len(described)} arrays")
    return tuple(arrays)
