"""Cells that hold lists, pairs of id and weight, padding, or ids written as floats."""

import itertools
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import Categorical, Schema, Sequence
from girih.data import NULL_ID
from girih.data.decode.columns import scalar_ids
from girih.data.decode.lists import in_brackets
from girih.errors import ConfigError, DataError
from girih.serving.reading import RequestReader
from girih.serving.tensors import from_json


def ids_of(values):
    """The id of each value, by the rule of a column of strings."""
    return scalar_ids(pa.array(list(map(str, values)), pa.string()))[0].tolist()


def bags(batch, place=0):
    bounds = batch.offsets[place * batch.num_examples : (place + 1) * batch.num_examples + 1]
    return [batch.ids[start:end].tolist() for start, end in itertools.pairwise(bounds)]


def weights(batch, place=0):
    bounds = batch.offsets[place * batch.num_examples : (place + 1) * batch.num_examples + 1]
    return [batch.weights[start:end].tolist() for start, end in itertools.pairwise(bounds)]


def csv(folder, cells, name="x.csv"):
    quoted = (str(cell).replace('"', '""') for cell in cells)
    (folder / name).write_text("hist,click\n" + "".join(f'"{cell}",0\n' for cell in quoted))
    return folder / name


def parquet(folder, values, **options):
    pq.write_table(pa.table({"hist": values, "click": [0] * len(values)}), folder / "x.parquet", **options)
    return folder / "x.parquet"


def read(path, feature, **options):
    read_any = girih.read_csv if path.suffix == ".csv" else girih.read_parquet
    (batch,) = read_any(path, Schema([feature], "click"), **options)
    return batch


LISTS = {
    "[1, 2, 3]": ["1", "2", "3"],
    "[1,2]": ["1", "2"],
    "[]": [],
    "[ ]": [],
    "": [],
    "[7]": ["7"],
    "{1,2}": ["1", "2"],
    "set()": [],
    "frozenset({1, 2})": ["1", "2"],
    "array([3, 4])": ["3", "4"],
    "[np.int64(19), np.int64(7)]": ["19", "7"],
    "[np.str_('a'), np.str_('b')]": ["a", "b"],
    "[1 2 3]": ["1", "2", "3"],
    "[ 1  2\t3]": ["1", "2", "3"],
    "(1,)": ["1"],
    "{3, 4}": ["3", "4"],
    "['a', 'b']": ["a", "b"],
    "['a' 'b']": ["a", "b"],
    '["a,b", "q\\"x", "\\u00e9"]': ["a,b", 'q"x', "é"],
    "[\"it's\", 'b c']": ["it's", "b c"],
    "['18446744073709551615', -7]": ["18446744073709551615", "-7"],
    "[red shoe, hat]": ["red shoe", "hat"],
    "[True, false]": ["1", "0"],
}
NO_LISTS = ["[1, 2", "1, 2", "[1, [2]]", "[1 2 ... 3]", "['a]", "[1](2", "[1}", "['a', ...]"]


@pytest.mark.parametrize("kind", [girih.Categorical, girih.Sequence])
@pytest.mark.parametrize("form", ["csv", "parquet", "dictionary"])
def test_lists_in_brackets(tmp_path, kind, form):
    cells = [*LISTS, "[1, nan, None, null]", "['a', None]"]
    array = pa.array(cells)
    array = array.dictionary_encode() if form == "dictionary" else array
    path = csv(tmp_path, cells) if form == "csv" else parquet(tmp_path, array)
    batch = read(path, kind(name="hist", list_format="brackets"))
    want = [ids_of(values) for values in LISTS.values()]
    assert bags(batch) == [*want, [1, NULL_ID, NULL_ID, NULL_ID], [*ids_of("a"), NULL_ID]]


@pytest.mark.parametrize("cell", LISTS)
def test_a_list_alone_is_read_as_among_others(cell):
    values, offsets, good = in_brackets(pa.array([cell]))
    assert [value.as_py().decode() for value in values] == LISTS[cell]
    assert offsets.tolist() == [0, len(values)]
    assert good.all()


@pytest.mark.parametrize("cell", NO_LISTS)
def test_what_is_no_list_is_a_bad_row(tmp_path, cell):
    path = csv(tmp_path, ["[1]", "['a']", cell])
    with pytest.raises(DataError, match=r"line 4: column 'hist' = .*: expected a list in brackets"):
        read(path, Sequence(name="hist", list_format="brackets"))


def test_lists_as_pandas_and_numpy_write_them(tmp_path):
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 99, rng.integers(0, 6)) for _ in range(50)]
    frame = pd.DataFrame({"hist": [list(map(int, each)) for each in lists], "array": lists, "click": 0})
    frame["json"] = frame["hist"].map(json.dumps)
    frame.to_csv(tmp_path / "x.csv", index=False)
    features = [Sequence(name=name, list_format="brackets") for name in ("hist", "array", "json")]
    (batch,) = girih.read_csv(tmp_path / "x.csv", Schema(features, "click"))
    for place in range(3):
        assert bags(batch, place) == [each.tolist() for each in lists]


def test_weights_beside_lists_in_brackets(tmp_path):
    (tmp_path / "x.csv").write_text('tags,w,click\n"[1, 2]","[0.5, 2]",0\n"[\'a\']","[1.5]",0\n[],[],0\n')
    feature = Categorical(name="tags", list_format="brackets", weights="w")
    (batch,) = girih.read_csv(tmp_path / "x.csv", Schema([feature], "click"))
    assert weights(batch) == [[0.5, 2.0], [1.5], []]


@pytest.mark.parametrize(
    ("separator", "cells"),
    [
        ("|", ["1|2", "1 | 2", " 1|2 ", "1|2|", "|1 |\t2"]),
        ("::", ["1::2", "1 :: 2", "1::::2"]),
        (" ", ["1 2", " 1  2 "]),
    ],
)
def test_blanks_around_pieces_do_not_count(tmp_path, separator, cells):
    batch = read(csv(tmp_path, cells), Sequence(name="hist", separator=separator))
    assert bags(batch) == [[1, 2]] * len(cells)


def test_blanks_within_pieces_count(tmp_path):
    batch = read(csv(tmp_path, ["red shoe | hat"]), Sequence(name="hist", separator="|"))
    assert bags(batch) == [ids_of(["red shoe", "hat"])]


def test_pairs_of_id_and_weight(tmp_path):
    cells = ["t3:0.5|t4:2", "", "t3 : 1e-1", "a:b:3|7:1", "9:-1"]
    feature = Categorical(name="hist", separator="|", weight_separator=":")
    batch = read(csv(tmp_path, cells), feature)
    assert bags(batch) == [ids_of(["t3", "t4"]), [], ids_of(["t3"]), ids_of(["a:b", "7"]), [9]]
    assert weights(batch) == [[0.5, 2.0], [], [np.float32(0.1)], [3.0, 1.0], [-1.0]]


def test_one_pair_a_cell_lists_of_pairs_and_max_length(tmp_path):
    batch = read(csv(tmp_path, ["5:0.5", "6:2"]), Categorical(name="hist", weight_separator=":"))
    assert (bags(batch), weights(batch)) == ([[5], [6]], [[0.5], [2.0]])
    feature = Categorical(name="hist", weight_separator=":", max_length=2)
    batch = read(parquet(tmp_path, pa.array([["a:1", "b:2", "c:3"], ["7:4"]])), feature)
    assert (bags(batch), weights(batch)) == ([ids_of("bc"), [7]], [[2.0, 3.0], [4.0]])


@pytest.mark.parametrize("cell", ["t3", "t3:0.5|t4", "t3:x", ":0.5", "t3:nan", "t3:1e99", "t3:"])
def test_what_is_no_pair_is_a_bad_row(tmp_path, cell):
    feature = Categorical(name="hist", separator="|", weight_separator=":")
    with pytest.raises(DataError, match=r"line 3: column 'hist' = .*: expected id:weight"):
        read(csv(tmp_path, ["t3:1", cell]), feature)


PADDED = ["5|6|0|0|0|0", "0|0", "7|0|8|9|10|11", ""]


@pytest.mark.parametrize("padding", [0, "0"])
def test_padding_is_left_out_before_the_length_is_cut(tmp_path, padding):
    feature = Sequence(name="hist", separator="|", max_length=4, padding_id=padding)
    assert bags(read(csv(tmp_path, PADDED), feature)) == [[5, 6], [], [8, 9, 10, 11], []]
    lists = pa.array([[int(id) for id in cell.split("|") if id] for cell in PADDED])
    feature = Sequence(name="hist", max_length=4, padding_id=padding)
    assert bags(read(parquet(tmp_path, lists), feature)) == [[5, 6], [], [8, 9, 10, 11], []]


@pytest.mark.parametrize(("padding", "cell"), [("<pad>", "<pad>"), (-1, "-1"), (2**64 - 1, str(2**64 - 1))])
def test_padding_is_an_id_like_others(tmp_path, padding, cell):
    feature = Categorical(name="hist", separator="|", padding_id=padding)
    assert bags(read(csv(tmp_path, [f"{cell}|3|{cell}", "4"]), feature)) == [[3], [4]]


def test_padding_takes_its_weight_along_and_is_missing_where_one_id_is_read(tmp_path):
    feature = Categorical(name="hist", separator="|", weight_separator=":", padding_id=0)
    batch = read(csv(tmp_path, ["0:9|3:2", "0:1"]), feature)
    assert (bags(batch), weights(batch)) == ([[3], []], [[2.0], []])
    batch = read(csv(tmp_path, ["0", "3"]), Categorical(name="hist", padding_id=0))
    assert bags(batch) == [[NULL_ID], [3]]


@pytest.mark.parametrize("form", ["csv", "parquet", "lists"])
def test_ids_written_as_floats(tmp_path, form):
    if form == "csv":
        path = csv(tmp_path, ["1.0", "", "7", "-3.0", "x", "1.5e+15"])
        want = [[1], [NULL_ID], [7], [-3], ids_of("x"), [1500000000000000]]
    elif form == "parquet":
        path, want = (
            parquet(tmp_path, pa.array([1.0, None, float("nan"), -3.0])),
            [[1], [NULL_ID], [NULL_ID], [-3]],
        )
    else:
        path, want = parquet(tmp_path, pa.array([[1.0, 2.0], [], None])), [[1, 2], [], []]
    assert bags(read(path, Categorical(name="hist", float_ids=True))) == want


def test_floats_that_are_no_ids_stay_refused(tmp_path):
    feature = Categorical(name="hist", float_ids=True)
    with pytest.raises(DataError, match=r"line 3: column 'hist' = '2.5': expected ids that are whole"):
        read(csv(tmp_path, ["1.0", "2.5"]), feature)
    with pytest.raises(DataError, match=r"line 3: column 'hist' = '1.5e.18': expected ids that are whole"):
        read(csv(tmp_path, ["1.0", "1.5e+18"]), feature)
    with pytest.raises(DataError, match=r"row 2.*expected ids that are whole numbers"):
        read(parquet(tmp_path, pa.array([1.0, 2.5])), feature)
    with pytest.raises(DataError, match="float_ids = true"):
        read(csv(tmp_path, ["1.0"]), Categorical(name="hist"))
    with pytest.raises(DataError, match="float_ids = true"):
        read(parquet(tmp_path, pa.array([1.0])), Categorical(name="hist"))


@pytest.mark.parametrize(
    ("feature", "tensor", "want"),
    [
        (Sequence(name="h", list_format="brackets"), ("BYTES", (2,), ["[1, 2]", "[]"]), [[1, 2], []]),
        (Sequence(name="h", padding_id=0), ("INT64", (2, 3), [1, 2, 0, 0, 0, 0]), [[1, 2], []]),
        (Categorical(name="h", padding_id=0), ("INT64", (2,), [0, 5]), [[NULL_ID], [5]]),
        (Categorical(name="h", separator="|", weight_separator=":"), ("BYTES", (1,), ["4:2|5:1"]), [[4, 5]]),
        (Categorical(name="h", weight_separator=":"), ("BYTES", (1, 2), ["4:2", "5:1"]), [[4, 5]]),
        (Categorical(name="h", float_ids=True), ("FP64", (2,), [4.0, 5.0]), [[4], [5]]),
    ],
)
def test_requests_are_read_as_files_are(feature, tensor, want):
    reader = RequestReader(Schema([feature], "click"), 8)
    assert bags(reader.read({"h": from_json("h", *tensor)})) == want


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Sequence, {"separator": "|", "list_format": "brackets"}, "drop one"),
        (Sequence, {"list_format": "json"}, "list_format = 'json'"),
        (Sequence, {"weight_separator": ":"}, "unknown option 'weight_separator'"),
        (Sequence, {"padding_id": 2**64}, "expected an id"),
        (Sequence, {"padding_id": 1.5}, "padding_id = 1.5"),
        (Categorical, {"separator": ":", "weight_separator": ":"}, "weight_separator = ':'"),
        (Categorical, {"weight_separator": ""}, "weight_separator = ''"),
        (Categorical, {"weights": "w", "weight_separator": ":"}, "drop one"),
        (Categorical, {"bucketize": [1.0], "padding_id": 0}, "padding_id is for ids"),
        (Categorical, {"transform": "hour", "float_ids": True}, "float_ids is for ids"),
    ],
)
def test_options_that_do_not_go_together(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind(name="h", **options)


@pytest.mark.parametrize("option", [{"list_format": "brackets"}, {"weight_separator": ":"}])
def test_options_of_text_are_refused_for_other_columns(tmp_path, option):
    with pytest.raises(DataError, match="splits strings; drop it"):
        read(parquet(tmp_path, pa.array([1, 2])), Categorical(name="hist", **option))
