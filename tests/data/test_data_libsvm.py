from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih import Categorical, Schema
from girih.data.formats.pairs import PairsSource, as_columns
from girih.data.formats.text import LineBlock
from girih.data.paths import find_files
from girih.data.position import Cursor
from girih.data.read_plan import make_read_plan
from girih.data.unit import Unit
from reference import split_pairs

SCHEMA = Schema([Categorical(name="a"), Categorical(name="b")], "y")
PLAN = make_read_plan(as_columns(SCHEMA), (), True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PairsSource:
    path: Path = tmp_path_factory.mktemp("libsvm") / "a.txt"
    path.write_text("1 1:1 2:1\n")
    return PairsSource(find_files(path), SCHEMA, 100)


def split(source: PairsSource, text: bytes) -> Unit:
    num_lines = text.count(b"\n") + (not text.endswith(b"\n"))
    return source.unit(0, LineBlock(text, 0, 1, num_lines), PLAN, Cursor())


def rows(unit: Unit) -> list[tuple]:
    names = ["y", "1:index", "1:value", "2:index", "2:value"]
    found = [tuple(row[name] for name in names) for row in unit.table.to_pylist()]
    return [tuple(float(word) if isinstance(word, bytes) else word for word in row) for row in found]


def test_pairs_are_split_at_spaces_and_colons(source: PairsSource) -> None:
    unit = split(source, b"1 12:1 -3:0.5 # note 9:9\r\n  0\t7:2  8:3 \n\n0.5 5:1 6:1")
    assert rows(unit) == [(1, 12, 1, -3, 0.5), (0, 7, 2, 8, 3), (0.5, 5, 1, 6, 1)]
    assert list(unit.numbers) == [1, 2, 4]
    assert unit.bad == []


WORD = st.tuples(
    st.integers(-(10**17), 10**17),
    st.sampled_from(["0", "1.5", ".5", "1e3"]),
    st.sampled_from([" ", "\t ", " \r"]),
)
LINE = st.tuples(st.sampled_from(["1 ", " -1\t"]), st.tuples(WORD, WORD), st.sampled_from(["", "#", "# 9:9"]))


@settings(max_examples=60, deadline=None)
@given(drawn=st.lists(LINE, min_size=1, max_size=4))
def test_lines_of_pairs_are_split_as_the_plain_twin_does(source: PairsSource, drawn: list[tuple]) -> None:
    lines = [
        (label + "".join(f"{index}:{value}{space}" for index, value, space in words) + comment).encode()
        for label, words, comment in drawn
    ]
    want = [
        (float(label), pairs[0][0], float(pairs[0][1]), pairs[1][0], float(pairs[1][1]))
        for label, pairs in split_pairs(lines)
    ]
    assert rows(split(source, b"\n".join(lines) + b"\n")) == want


def test_lines_that_are_not_pairs_are_told_apart(source: PairsSource) -> None:
    unit = split(
        source,
        b"1 1:1\n1 1:1 2:1 3:1\n1 1:1 x\n1 a:1 2:1\n1 18446744073709551616:1 2:1\n\n# only\n1 1:1 2:1\n"
        b"1 0x10:1 2:1\n1 1:1:1 2:1\n1:1 2:1\n1 1:one 2:\n",
    )
    assert rows(unit) == [(1, 1, 1, 2, 1), (None, 1, 1, 2, 1)]  # the decoder refuses a label that is missing
    assert {row.number: row.message.partition(":")[0] for row in unit.bad} == {
        1: "1 pairs",
        2: "3 pairs",
        3: "a word without a colon",
        4: "an index that is not an integer",
        5: "an index that is not an integer",
        9: "an index that is not an integer",
        10: "a word with several colons",
        12: "a value that is missing",
    }
    assert len(unit.bad) == 8


def test_indices_of_any_int64_are_read(source: PairsSource) -> None:
    for text in (b"1 9223372036854775807:1 -9223372036854775808:1\n", b"1 007:1 -0:1\n"):
        want = [
            tuple(float(i) if j % 2 == 0 else int(i) for j, i in enumerate(text.replace(b":", b" ").split()))
        ]
        assert rows(split(source, text)) == want
        assert rows(split(source, text + b"1 0x1:1 1:1\n")) == want
