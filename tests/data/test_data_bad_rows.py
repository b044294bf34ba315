"""Rows that cannot be used: named by file and line, or skipped and counted."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih.data import read_csv, read_libsvm, read_parquet
from girih.data.unit import BadRow
from girih.errors import DataError
from girih.schema import Categorical, Labels, Numeric, Schema
from reference import xxh64

LABELS = Labels(names=("y", "d"), derive={"d": "r > 1"}, weight="w")
SCHEMA = Schema(
    [
        Categorical(name="c"),
        Categorical(name="b", column="n", bucketize=(1.0,)),
        Categorical(name="tags", separator="|", weights="tw"),
        Numeric(name="x", transform="log1p"),
    ],
    LABELS,
)
HEADER = "c,n,tags,tw,x,y,r,w"
GOOD = ["1,2,a|b,1|2,3,1,1,1", "2,,,,,0,2,0"]

FLOAT = "expected an id, not a float: write 7 for 7.0 (in pandas, astype('Int64')), set float_ids = true, or bucketize"
CELLS = [
    ("1,2,a,1,3,1", "6 cells: expected 8", "wrong number of cells"),
    ("1,2,a,1,3,1,1,1,1", "9 cells: expected 8", "wrong number of cells"),
    ('1,2,"a,1,3,1,1,1', 'a quote " is not closed on its line', "a quote left open"),
    ("1,two,a,1,3,1,1,1", "column 'n' = 'two': expected a finite number", None),
    ("1,inf,a,1,3,1,1,1", "column 'n' = 'inf': expected a finite number", None),
    ("1,2,a,1,x,1,1,1", "column 'x' = 'x': expected a finite number", None),
    ("1,2,a,1,nan,1,1,1", "column 'x' = 'nan': expected a finite number", None),
    ("1,2,a,1,-inf,1,1,1", "column 'x' = '-inf': expected a finite number", None),
    ("1,2,a,1,1e999,1,1,1", "column 'x' = '1e999': expected a finite number", None),
    ("1,2,a,1,1_000,1,1,1", "column 'x' = '1_000': expected a finite number", None),
    ("1,2,a,1,3,2,1,1", "column 'y' = '2': expected a label in [0, 1]", None),
    ("1,2,a,1,3,-0.1,1,1", "column 'y' = '-0.1': expected a label in [0, 1]", None),
    ("1,2,a,1,3,,1,1", "column 'y' is missing: expected a label in [0, 1]", None),
    ("1,2,a,1,3,yes,1,1", "column 'y' = 'yes': expected a label in [0, 1]", None),
    ("1,2,a,1,3,nan,1,1", "column 'y' = 'nan': expected a label in [0, 1]", None),
    ("1,2,a,1,3,1,,1", "column 'r' is missing: expected a number to derive the label from", None),
    ("1,2,a,1,3,1,high,1", "column 'r' = 'high': expected a number to derive the label from", None),
    ("1,2,a,1,3,1,nan,1", "column 'r' = 'nan': expected a number to derive the label from", None),
    ("1,2,a,1,3,1,1,-1", "column 'w' = '-1': expected a finite weight ≥ 0", None),
    ("1,2,a,1,3,1,1,", "column 'w' is missing: expected a finite weight ≥ 0", None),
    ("1,2,a,1,3,1,1,inf", "column 'w' = 'inf': expected a finite weight ≥ 0", None),
    ("1,2,a|b,1,3,1,1,1", "column 'tw' = '1': expected as many weights as 'tags' has ids", None),
    ("1,2,,1,3,1,1,1", "column 'tw' = '1': expected as many weights as 'tags' has ids", None),
    ("1,2,a|b,1|x,3,1,1,1", "column 'tw' = '1|x': expected finite numbers as weights", None),
    ("1.0,2,a,1,3,1,1,1", f"column 'c' = '1.0': {FLOAT}", None),
    ("1.5e+18,2,a,1,3,1,1,1", f"column 'c' = '1.5e+18': {FLOAT}", None),
    ("1,2,a|2.0||b,1|1|1,3,1,1,1", f"column 'tags' = 'a|2.0||b': {FLOAT}", None),
    ("1,2,a|b,1|nan,3,1,1,1", "column 'tw' = '1|nan': expected finite numbers as weights", None),
]


@pytest.mark.parametrize(("line", "message", "reason"), CELLS, ids=[line for line, _, _ in CELLS])
def test_bad_lines_of_csv(tmp_path, line, message, reason):
    path = tmp_path / "a.csv"
    path.write_text("\n".join([HEADER, GOOD[0], "", line, GOOD[1], line]) + "\n")
    with pytest.raises(DataError) as caught:
        list(read_csv(path, SCHEMA))
    assert str(caught.value).startswith(f"{path}, line 4: {message}")
    assert "\n" not in str(caught.value)
    dataset = read_csv(path, SCHEMA, on_bad_row="skip")
    (batch,) = list(dataset)
    (tmp_path / "good.csv").write_text("\n".join([HEADER, *GOOD]))
    (want,) = list(read_csv(tmp_path / "good.csv", SCHEMA))
    for name in ("ids", "offsets", "weights", "numeric", "labels", "example_weights"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(want, name))
    assert dataset.num_skipped == 2
    assert dataset.skipped.by_reason == {
        reason or f"{message[: message.index(chr(39), 8) + 1]}: {message.partition(': ')[2]}": 2
    }
    assert dataset.skipped.first == str(caught.value)


ROWS = [
    ({"x": float("nan")}, "column 'x' = nan: expected a finite number"),
    ({"x": float("inf")}, "column 'x' = inf: expected a finite number"),
    ({"n": float("nan")}, "column 'n' = nan: expected a finite number"),
    ({"y": 1.5}, "column 'y' = 1.5: expected a label in [0, 1]"),
    ({"y": None}, "column 'y' is missing: expected a label in [0, 1]"),
    ({"r": None}, "column 'r' is missing: expected a number"),
    ({"w": -1.0}, "column 'w' = -1.0: expected a finite weight"),
    ({"tw": [1.0, 2.0, 3.0]}, "column 'tw' = [1.0, 2.0, 3.0]: expected as many weights as 'tags' has ids"),
    ({"tw": None}, "column 'tw' is missing: expected as many weights"),
    ({"tw": [1.0, None]}, "column 'tw' = [1.0, None]: expected finite numbers as weights"),
    ({"tags": None}, "column 'tw' = [1.0, 2.0]: expected as many weights"),
]


@pytest.mark.parametrize(("change", "message"), ROWS, ids=[str(change) for change, _ in ROWS])
def test_bad_rows_of_parquet(tmp_path, change, message):
    features = [*SCHEMA.features[:2], Categorical(name="tags", weights="tw"), SCHEMA.features[3]]
    schema = Schema(features, LABELS)
    good = {"c": 1, "n": 2.0, "tags": [1, 2], "tw": [1.0, 2.0], "x": 1.0, "y": 1.0, "r": 1, "w": 1.0}
    rows = [good, good, good | {"c": 5}, good | change, good | {"c": 7}]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    with pytest.raises(DataError) as caught:
        list(read_parquet(path, schema))
    assert str(caught.value).startswith(f"{path}, row 4 (row group 2): {message}")
    dataset = read_parquet(path, schema, on_bad_row="skip")
    (batch,) = list(dataset)
    assert batch.ids[:4].tolist() == [1, 1, 5, 7]
    assert batch.weights[batch.offsets[8] :].tolist() == [1, 2] * 4
    assert dataset.num_skipped == 1


def test_a_number_too_large_for_float32_is_a_bad_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,l,y\n1e300,1e300,1\n")
    with pytest.raises(
        DataError, match=r"line 2: column 'x' = '1e300': expected a number that float32 can hold"
    ):
        list(read_csv(path, Schema([Numeric(name="x")], "y")))
    (batch,) = list(read_csv(path, Schema([Numeric(name="l", transform="log1p")], "y")))
    assert batch.numeric[0, 0] == pytest.approx(690.7755)


PAIRS = [
    ("1 5:1", "1 pairs: expected 2, one for each feature"),
    ("1 5:1 6:1 7:1", "3 pairs: expected 2"),
    ("1 5:1 six", "a word without a colon"),
    ("1 a:1 6:1", "an index that is not an integer"),
    ("1 5:one 6:1", "column '1:value' = 'one': expected finite numbers as weights"),
    ("1 5: 6:1", "a value that is missing: expected label index:value"),
    ("1 5:1 6:nan", "column '2:value' = 'nan': expected a finite number"),
    ("1 5:inf 6:1", "column '1:value' = 'inf': expected finite numbers as weights"),
    ("2 5:1 6:1", "column 'y' = '2': expected a label in [0, 1]"),
    ("5:1 6:1", "column 'y' is missing: expected a label in [0, 1]"),
    ("x 5:1 6:1", "column 'y' = 'x': expected a label in [0, 1]"),
]


@pytest.mark.parametrize(("line", "message"), PAIRS, ids=[line for line, _ in PAIRS])
def test_bad_lines_of_libsvm(tmp_path, line, message):
    schema = Schema([Categorical(name="c"), Numeric(name="x")], "y")
    path = tmp_path / "a.txt"
    path.write_text(f"# a comment\n1 1:1 2:3\n{line}\n0 2:1 3:4\n")
    with pytest.raises(DataError) as caught:
        list(read_libsvm(path, schema))
    assert str(caught.value).startswith(f"{path}, line 3: {message}")
    dataset = read_libsvm(path, schema, on_bad_row="skip")
    (batch,) = list(dataset)
    assert (batch.ids.tolist(), batch.numeric[:, 0].tolist(), dataset.num_skipped) == ([1, 2], [3, 4], 1)


def test_the_first_bad_row_is_the_one_that_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,x,y\n1,1,1\n1,1,7\n1,zz,1\n1,1\n")
    with pytest.raises(DataError, match="line 3: column 'y'"):
        list(read_csv(path, Schema([Categorical(name="c"), Numeric(name="x")], "y")))


def test_text_that_only_looks_like_a_number_is_an_id_like_any_other(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,y\n1.1,1\n1.2.0,1\nv1.0,0\n1e5,0\n")
    assert len(next(iter(read_csv(path, Schema([Categorical(name="c")], "y")))).ids) == 4
    pq.write_table(pa.table({"c": ["1.0"], "y": [1]}), tmp_path / "a.parquet")  # whose columns have types
    assert (
        len(next(iter(read_parquet(tmp_path / "a.parquet", Schema([Categorical(name="c")], "y")))).ids) == 1
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1", "1 cells: expected 2"),
        ("", "1 cells: expected 2"),
        ("1,x", "column 'y' = 'x': expected a label"),
    ],
)
def test_the_first_bad_line_of_many_ends_it(tmp_path, monkeypatch, line, told):
    path, made = tmp_path / "a.csv", []
    path.write_text("c,y\n1,1\n\r\n" + "1,1\n" * 5 + (line or "\n1") + "\n" + f"{line or 1}\n" * 20_000)
    monkeypatch.setattr("girih.data.decode.decoder.BadRow", lambda *row: made.append(row) or BadRow(*row))
    monkeypatch.setattr("girih.data.formats.delimited.BadRow", lambda *row: made.append(row) or BadRow(*row))
    with pytest.raises(DataError, match=rf"line {9 if line else 10}: {told}"):
        list(read_csv(path, Schema([Categorical(name="c")], "y")))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 5", "a word without a colon"),
        ("1 5:1", "1 pairs: expected 2"),
        ("1 x:1 6:1", "an index that is not an integer"),
        ("1 5:1 6:x", "column '2:value' = 'x'"),
    ],
)
def test_the_first_bad_line_of_many_ends_libsvm(tmp_path, monkeypatch, line, told):
    path, made = tmp_path / "a.txt", []
    path.write_text("1 1:1 2:1\n\n" + "1 1:1 2:1\n" * 5 + f"{line}\n" * 20_000)
    for module in ("formats.pairs", "decode.decoder"):
        monkeypatch.setattr(f"girih.data.{module}.BadRow", lambda *row: made.append(row) or BadRow(*row))
    with pytest.raises(DataError, match=f"line 8: {told}"):
        list(read_libsvm(path, Schema([Categorical(name="c"), Numeric(name="x")], "y")))
    assert len(made) == 1


def test_a_bad_value_before_the_first_line_that_is_no_pairs_is_told_first(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1 1:1 2:1\n1 1:1 2:x\n1 1:x 2:1\n1 1:x 2:x\n1 x\n1 1:1 2:1\n")
    with pytest.raises(DataError, match="line 2: column '2:value' = 'x'"):
        list(read_libsvm(path, Schema([Categorical(name="c"), Numeric(name="x")], "y")))


def test_a_quote_left_open_before_the_first_short_line_is_told_first(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('c,y\n1,1\n"1,1\n2,1\n3\n4,1\n')
    with pytest.raises(DataError, match='line 3: a quote " is not closed on its line'):
        list(read_csv(path, Schema([Categorical(name="c")], "y")))


def test_line_numbers_hold_in_later_blocks_and_after_resuming(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,y\n" + "".join(f"{row},0\n\n" for row in range(50)) + "50,x\n")
    schema = Schema([Categorical(name="c")], "y")
    dataset = read_csv(path, schema, batch_size=7, block_bytes=40)
    steps = dataset.batches(0)
    positions = [position for _, position in (next(steps) for _ in range(5))]
    for resumed in (dataset.batches(0), dataset.batches(0, positions[-1])):
        with pytest.raises(DataError, match=r"line 102: column 'y' = 'x'"):
            list(resumed)


def test_a_quote_left_open_does_not_swallow_what_follows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('c,y\n1,0\n"2,0\n3,0\n4",1\n"5",1\n')
    dataset = read_csv(path, Schema([Categorical(name="c")], "y"), on_bad_row="skip")
    (batch,) = list(dataset)
    assert batch.ids.tolist() == [1, 3, 5]
    assert dataset.skipped.by_reason == {"a quote left open": 2}


def test_text_that_is_not_utf8_is_an_id_but_cannot_be_kept(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"c,y\n\xe9t\xe9,1\n2,1\n")
    schema = Schema([Categorical(name="c")], "y")
    assert len(next(iter(read_csv(path, schema))).ids) == 2
    dataset = read_csv(path, schema, keep=["c"], on_bad_row="skip")
    assert next(iter(dataset)).kept.to_pydict() == {"c": ["2"]}
    with pytest.raises(DataError, match=r"line 2: column 'c' = '.*': expected UTF-8 text"):
        list(read_csv(path, schema, keep=["c"]))


def test_a_cell_of_any_bytes_and_any_length_is_an_id_by_their_hash(tmp_path):
    path, cells = tmp_path / "a.csv", (b"\x00\xff\xfe", b"x" * 4000, b"2")
    path.write_bytes(b"c,y\n" + b"".join(cell + b",1\n" for cell in cells))
    for block_bytes in (40, 1 << 20):  # lines longer than a block, or all in one
        dataset = read_csv(path, Schema([Categorical(name="c")], "y"), block_bytes=block_bytes)
        assert next(iter(dataset)).ids.tolist() == [*map(xxh64, cells[:2]), 2]


def test_when_every_row_is_bad(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,y\n1,9\n2,9\n")
    with pytest.raises(DataError, match=r"every row is bad; the first: .*a.csv, line 2: column 'y' = '9'"):
        list(read_csv(path, Schema([Categorical(name="c")], "y"), on_bad_row="skip"))


def test_counts_begin_anew_with_each_pass(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,y\n1,9\n2,1\n")
    dataset = read_csv(path, Schema([Categorical(name="c")], "y"), on_bad_row="skip")
    for _ in range(3):
        list(dataset)
        assert dataset.num_skipped == 1
