import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import jagged, libsvm
from reference import bag_tails, flatten, split_pairs

BAGS = st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(BAGS, st.integers(1, 6))
def test_tails_are_the_last_values(bags: list[list[int]], length: int) -> None:
    values, offsets = flatten(bags)
    want, short = flatten(bag_tails(bags, length))
    out = np.zeros(len(want), dtype=np.int64)
    jagged.copy_tails(values, offsets, short, out)
    assert out.tolist() == want.tolist()


def split(text: bytes, pairs: int) -> dict[str, np.ndarray]:
    data = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(data == 10)
    starts = np.concatenate([[0], ends[:-1] + 1])
    found = {
        "labels": np.zeros((len(ends), 2), dtype=np.int64),
        "indices": np.zeros((pairs, len(ends)), dtype=np.int64),
        "value_starts": np.zeros((pairs, len(ends)), dtype=np.int64),
        "value_ends": np.zeros((pairs, len(ends)), dtype=np.int64),
        "counts": np.zeros(len(ends), dtype=np.int64),
        "status": np.zeros(len(ends), dtype=np.uint8),
    }
    libsvm.split_pairs(data, starts, ends, *found.values())
    return found


def test_pairs_are_split_at_spaces_and_colons() -> None:
    text = b"1 12:1 -3:0.5 # note 9:9\r\n  0\t7:2  8:x:y\n5:1 6:1\n"
    found = split(text, 2)
    assert found["status"].tolist() == [libsvm.OK] * 3
    assert found["indices"].tolist() == [[12, 7, 5], [-3, 8, 6]]
    words = [
        [text[s:e] for s, e in zip(*line, strict=True)]
        for line in zip(found["value_starts"], found["value_ends"], strict=True)
    ]
    assert words == [[b"1", b"2", b"1"], [b"0.5", b"x:y", b"1"]]
    assert [text[s:e] for s, e in found["labels"]] == [b"1", b"0", b""]


WORD = st.tuples(
    st.integers(-(10**17), 10**17), st.text("01.e:x", max_size=4), st.sampled_from([" ", "\t ", " \r"])
)
LINE = st.tuples(
    st.sampled_from(["", "1 ", " -1\t"]), st.tuples(WORD, WORD), st.sampled_from(["", "#", "# 9:9"])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(LINE, min_size=1, max_size=4))
def test_lines_of_pairs_are_split_as_the_plain_twin_does(drawn: list[tuple]) -> None:
    lines = [
        (label + "".join(f"{index}:{value}{space}" for index, value, space in words) + comment).encode()
        for label, words, comment in drawn
    ]
    text = b"\n".join(lines) + b"\n"
    found = split(text, 2)
    for row, (label, pairs) in enumerate(split_pairs(lines)):
        first, last = found["labels"][row]
        assert text[first:last] == label
        values = [text[found["value_starts"][p, row] : found["value_ends"][p, row]] for p in range(2)]
        assert list(zip(found["indices"][:, row].tolist(), values, strict=True)) == pairs


def test_lines_that_are_not_pairs_are_told_apart() -> None:
    found = split(
        b"1 1:1\n1 1:1 2:1 3:1\n1 1:1 x\n1 a:1 2:1\n1 1234567890123456789:1 2:1\n\n# only\n1 1:1 2:1\n", 2
    )
    assert found["status"].tolist() == [
        libsvm.PAIR_COUNT, libsvm.PAIR_COUNT, libsvm.NO_COLON, libsvm.BAD_INDEX, libsvm.BAD_INDEX,
        libsvm.BLANK, libsvm.BLANK, libsvm.OK,
    ]  # fmt: skip
    assert found["counts"].tolist()[:2] == [1, 3]
