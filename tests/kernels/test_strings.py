from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import strings
from girih.kernels.cpu.arrays import sealed
from reference import id_of_string

GOLDEN = {
    b"": -1205034819632174695,
    b"a": -3292477735350538661,
    b"abc": 4952883123889572249,
    b"girih.null": 3308892442114646408,
    b"68fd1e64": 6718470718629228516,
    b"x" * 100: -7858536869340659564,
}


def spans(words: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ends = np.cumsum([0, *map(len, words)], dtype=np.int64)
    data = np.frombuffer(b"".join(words) + b"\0", dtype=np.uint8)
    return data, sealed(ends[:-1]), sealed(ends[1:])


@pytest.mark.parametrize("text", GOLDEN, ids=repr)
def test_hash_has_not_changed(text: bytes) -> None:
    assert strings.ids_of_strings(*spans([text]))[0] == GOLDEN[text]


def test_hash_is_xxh64_at_every_length() -> None:
    rng = np.random.default_rng(0)
    for length in range(130):
        text = rng.bytes(length)
        assert strings.ids_of_strings(*spans([text]))[0] == id_of_string(text)


WORDS = [
    b"0", b"-0", b"00", b"7", b"-7", b"+7", b"07", b"", b"-", b" 7", b"7 ", b"7.0", b"1e3",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"-9223372036854775809",
    b"9999999999999999999", b"99999999999999999999", b"12a", b"a12", "نام".encode(), b"\xff\xfe",
]  # fmt: skip


def test_canonical_decimals_are_their_integers_and_all_else_is_hashed() -> None:
    assert strings.ids_of_strings(*spans(WORDS))[0].tolist() == [id_of_string(word) for word in WORDS]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(-(2**64), 2**64).map(lambda i: str(i).encode())))
)
def test_ids_of_any_strings(words: list[bytes]) -> None:
    assert strings.ids_of_strings(*spans(words))[0].tolist() == [id_of_string(word) for word in words]


FLOATS = [b"7.0", b"-7.0", b"0.0", b"10.0", b"1e+17", b"-1.5e+18", b"1.2345678901234568e+18", b"007.0"]
TEXT = [
    b"7", b"7.5", b"1.2.0", b".0", b"-.0", b"v1.0", b"1.0a", b"7.00", b"1e3", b"1e+3", b"e+17", b"ae+17", b"1,5e+17", b"0", b"",
]  # fmt: skip


def test_whole_numbers_spelled_as_floats_are_marked() -> None:
    _, floats = strings.ids_of_strings(*spans([*FLOATS, *TEXT]))
    assert floats.tolist() == [True] * len(FLOATS) + [False] * len(TEXT)


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(-3, 3))
def test_strings_behind_their_lengths_are_unpacked(words, cut):
    """As the Open Inference Protocol sends them; what is too short or too long is found."""
    packed = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    given = packed[:cut] if cut < 0 else packed + b"\1" * cut
    offsets = np.zeros(len(words) + 1, np.int64)
    out = np.empty(max(0, len(given) - 4 * len(words)), np.uint8)
    taken = strings.unpack(sealed(np.frombuffer(given, np.uint8)), offsets, out)
    if cut < 0 and packed:
        assert taken != len(given)
    else:
        assert taken == len(packed)
        assert [bytes(out[begin:end]) for begin, end in pairwise(offsets)] == words


def test_a_length_that_leads_outside_is_found():
    for length in (5, 2**31, 2**32 - 1):
        data = length.to_bytes(4, "little") + b"abcd"
        assert (
            strings.unpack(
                sealed(np.frombuffer(data, np.uint8)), np.zeros(2, np.int64), np.empty(4, np.uint8)
            )
            == -1
        )
