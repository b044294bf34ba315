import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import strings
from reference import id_of_string, split_string, xxh64

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
    return np.frombuffer(b"".join(words) + b"\0", dtype=np.uint8), ends[:-1], ends[1:]


@pytest.mark.parametrize("text", GOLDEN, ids=repr)
def test_hash_has_not_changed(text: bytes) -> None:
    assert strings.xxh64(text) == GOLDEN[text]


def test_hash_is_xxh64_at_every_length() -> None:
    rng = np.random.default_rng(0)
    for length in range(130):
        text = rng.bytes(length)
        assert strings.xxh64(text) == xxh64(text)


WORDS = [
    b"0", b"-0", b"00", b"7", b"-7", b"+7", b"07", b"", b"-", b" 7", b"7 ", b"7.0", b"1e3",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"-9223372036854775809",
    b"9999999999999999999", b"99999999999999999999", b"12a", b"a12", "نام".encode(), b"\xff\xfe",
]  # fmt: skip


def test_canonical_decimals_are_their_integers_and_all_else_is_hashed() -> None:
    assert strings.ids_of_strings(*spans(WORDS)).tolist() == [id_of_string(word) for word in WORDS]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=40), st.integers(-(2**64), 2**64).map(lambda i: str(i).encode())))
)
def test_ids_of_any_strings(words: list[bytes]) -> None:
    assert strings.ids_of_strings(*spans(words)).tolist() == [id_of_string(word) for word in words]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab|,", max_size=12), max_size=8), st.sampled_from(["|", ",", "a|", "aab"]))
@example(["||", "", "a||b|"], "|")
@example(["aaab", "aab", "ab"], "aab")
def test_splitting_leaves_out_empty_pieces(texts: list[str], separator: str) -> None:
    data, starts, ends = spans([text.encode() for text in texts])
    first, last, offsets = strings.split_strings(data, starts, ends, separator.encode())
    pieces = [data[i:j].tobytes().decode() for i, j in zip(first, last, strict=True)]
    want = [split_string(text, separator) for text in texts]
    assert [pieces[offsets[r] : offsets[r + 1]] for r in range(len(texts))] == want


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.floats(allow_nan=False), st.integers(-(10**25), 10**25), st.decimals(-1000, 1000, places=3))
)
def test_decided_numbers_are_correctly_rounded(number: object) -> None:
    values, status = strings.numbers_of_strings(*spans([str(number).encode(), f"  {number}\t".encode()]))
    assert status[0] == status[1] != strings.EMPTY
    if status[0] == strings.OK:
        assert values.tolist() == [float(str(number))] * 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1.0),
        ("-2.5", -2.5),
        ("+3", 3.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e3", 1000.0),
        ("25E-2", 0.25),
        ("0", 0.0),
    ],
)
def test_plain_numbers_are_decided(text: str, value: float) -> None:
    values, status = strings.numbers_of_strings(*spans([text.encode()]))
    assert (values[0], status[0]) == (value, strings.OK)


@pytest.mark.parametrize(
    "text", ["x", "1x", "--1", "1e", "e5", ".", "-", "1 2", "nan", "inf", "0x1", "1.2.3", "1,5"]
)
def test_what_is_no_plain_number_is_left_undecided(text: str) -> None:
    _, status = strings.numbers_of_strings(*spans([text.encode()]))
    assert status[0] == strings.UNDECIDED


def test_joining_copies_spans_side_by_side() -> None:
    data = np.frombuffer(b"abcdefgh", dtype=np.uint8)
    joined, offsets = strings.join_strings(data, np.array([6, 0, 3]), np.array([8, 1, 3]))
    assert joined.tobytes() == b"gha"
    assert offsets.tolist() == [0, 2, 3, 3]
