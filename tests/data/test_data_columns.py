import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from girih.data.decode import columns
from reference import split_string


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab|,", max_size=12), max_size=8), st.sampled_from(["|", ",", "a|", "aab"]))
@example(["||", "", "a||b|"], "|")
@example(["aaab", "aab", "ab"], "aab")
def test_splitting_leaves_out_empty_pieces(texts: list[str], separator: str) -> None:
    pieces, offsets = columns.pieces(pa.array(texts, type=pa.string()), separator)
    words = [word.decode() for word in pieces.to_pylist()]
    want = [split_string(text, separator) for text in texts]
    assert [words[offsets[r] : offsets[r + 1]] for r in range(len(texts))] == want


def test_a_missing_string_has_no_pieces() -> None:
    pieces, offsets = columns.pieces(pa.array(["a|b", None, "c"]).dictionary_encode(), "|")
    assert (pieces.to_pylist(), offsets.tolist()) == ([b"a", b"b", b"c"], [0, 2, 2, 3])


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.floats(allow_nan=False), st.integers(-(10**25), 10**25), st.decimals(-1000, 1000, places=3))
)
def test_numbers_are_correctly_rounded(number: object) -> None:
    for spaced in (str(number), f"  {number}\t"):
        values, null = columns.string_numbers(pa.array([spaced.encode()]))
        assert (values.tolist(), null) == ([float(str(number))], None)


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
        ("inf", np.inf),
    ],
)
def test_plain_numbers_are_read(text: str, value: float) -> None:
    assert columns.string_numbers(pa.array([text.encode()]))[0].tolist() == [value]


@pytest.mark.parametrize(
    "text", ["x", "1x", "--1", "1e", "e5", ".", "-", "1 2", "0x1", "1.2.3", "1,5", "1_0", "\u0663", "\xff"]
)
def test_of_other_strings_it_is_said_that_they_are_no_numbers(text: str) -> None:
    words = [b"7", text.encode("latin-1", "replace"), b"", b" 8", text.encode(), b"nan"]
    values, null = columns.string_numbers(pa.array(words))
    assert null is not None
    assert null.tolist() == [False, False, True, False, False, False]
    np.testing.assert_array_equal(values, [7, np.nan, np.nan, 8, np.nan, np.nan])


@pytest.mark.parametrize("words", [[], [None], [b""], [b" "], [b"", None, b"5 "], [None, b"5"], [b"", b"x"]])
def test_missing_and_blank_strings_are_told(words: list[bytes | None]) -> None:
    values, null = columns.string_numbers(pa.array(words, type=pa.binary()))
    blank = [not (word or b"").strip() for word in words]
    assert (null.tolist() if any(blank) else null) == (blank if any(blank) else None)
    assert np.isnan(values).tolist() == [
        none or word == b"x" for none, word in zip(blank, words, strict=True)
    ]
