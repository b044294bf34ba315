"""Frames in bytes: what is read back, and what hostile bytes do."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.comm.rpc import Frame, frames
from girih.comm.rpc.frames import Header, PackedFrame, unpack
from girih.errors import WireError

HEADER = Header(status=2, number=77, request=2**64 - 1, acknowledged=70)
ARRAYS = (np.arange(7, dtype=np.int16), np.ones((2, 3, 4), np.float32), np.zeros(5000), np.empty((0, 9)))


def message(arrays=ARRAYS):
    parts = PackedFrame(Frame(12, (1, -2), tuple(arrays))).parts(HEADER)
    return [part.copy() for part in parts]


def resealed(first, num_fields, num_arrays):
    end = 40 + 8 * num_fields + 32 * num_arrays
    first[end : end + 4] = np.frombuffer(struct.pack("<I", zlib.crc32(first[:end])), np.uint8)


def test_what_is_packed_is_unpacked():
    header, frame = unpack(message())
    assert header == HEADER
    assert (frame.kind, frame.fields) == (12, (1, -2))
    for got, want in zip(frame.arrays, ARRAYS, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got, want)


def test_any_changed_byte_of_the_header_is_found():
    for position in range(40 + 16 + 32 * 4 + 4):
        parts = message()
        parts[0][position] ^= 0x40
        with pytest.raises(WireError):
            unpack(parts)


LYING_SHAPES = [
    (2**40, 1, 1),
    (2**33, 2**33, 2**33),
    (2**63, 2, 1),
    (3, 1, 1),
    (1, 3, 0),
    (0, 2**63, 1),
    (0, 2**62, 4),
    (2**32, 0, 2**32),
]


def described(dtype=10, ndim=3, own=0, shape=(1, 1, 4), *, fields=2, content=b""):
    """A message that describes one array as it likes."""
    first = struct.pack("<4sHHHBxH2xQQQ", b"GRIH", 3, 12, 0, fields, 1, 1, 1, 1) + bytes(8 * fields)
    first += struct.pack("<BBB5x3Q", dtype, ndim, own, *shape)
    first += struct.pack("<I4x", zlib.crc32(first)) + content
    return np.frombuffer(first, np.uint8)


@pytest.mark.parametrize("shape", LYING_SHAPES)
@pytest.mark.parametrize("own", [0, 1])
def test_shapes_that_lie(shape, own):
    parts = message((np.zeros((1, 1, 4)),))
    parts[0][40 + 16 + 2] = own
    parts[0][40 + 16 + 8 : 40 + 16 + 32] = np.frombuffer(struct.pack("<3Q", *shape), np.uint8)
    resealed(parts[0], 2, 1)
    with pytest.raises(WireError):
        unpack(parts)


def test_a_shape_that_no_array_can_have_is_refused_though_its_bytes_agree():
    """136 bytes of a stranger ended any server: numpy cannot reshape nothing to (0, 2**63)."""
    with pytest.raises(WireError, match="larger than the limit"):
        unpack([described(0, 2, 0, (0, 2**63, 1), fields=0)])
    with pytest.raises(WireError, match="C-contiguous"):
        PackedFrame(Frame(1, (), (np.empty((0, 1 << 41), np.int8),)))


DIMS = st.sampled_from([0, 1, 2, 3, 7, 2**16, 2**31, 2**32 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@settings(deadline=None, max_examples=500)
@given(
    st.integers(0, 12), st.integers(0, 5), st.integers(0, 2), st.tuples(DIMS, DIMS, DIMS),
    st.integers(0, 64), st.lists(st.integers(0, 64), max_size=2),
)  # fmt: skip
def test_descriptions_that_disagree_with_themselves_raise_nothing_else(dtype, ndim, own, shape, size, parts):
    first = described(dtype, ndim, own, shape, content=bytes(size))
    try:
        _, frame = unpack([first, *(np.zeros(n, np.uint8) for n in parts)])
    except WireError:
        return
    assert frame.arrays[0].shape == shape[:ndim]
    assert sum(array.nbytes for array in frame.arrays) <= size + sum(parts)


def test_counts_and_parts_that_lie():
    for change in (
        lambda parts: parts.pop(),
        lambda parts: parts.append(np.zeros(8, np.uint8)),
        lambda parts: parts.insert(1, np.zeros(8, np.uint8)),
        lambda parts: parts.__setitem__(0, parts[0][:-8]),
        lambda parts: parts.__setitem__(0, np.append(parts[0], np.zeros(8, np.uint8))),
        lambda parts: parts.__setitem__(1, parts[1][8:]),
        lambda parts: parts.clear(),
    ):
        parts = message()
        change(parts)
        with pytest.raises(WireError):
            unpack(parts)


def test_what_is_beyond_the_limits_is_neither_sent_nor_read(monkeypatch):
    parts = message()
    for name, most, read, sent in (
        ("MOST_ARRAYS", 3, "at most 12, 3", "4 arrays, at most 3"),
        ("MOST_BYTES", 1000, "at most 1,000", "bytes of arrays, at most 1,000"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(frames, name, most)
            with pytest.raises(WireError, match=read):
                unpack(parts)
            with pytest.raises(WireError, match=sent):
                message()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=200), max_size=3), st.booleans())
def test_garbage_raises_nothing_else(parts, with_sign):
    if with_sign and parts:
        parts[0] = b"GRIH\x03\x00" + parts[0]
    with pytest.raises(WireError):
        unpack([np.frombuffer(part, np.uint8) for part in parts])
