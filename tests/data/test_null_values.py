"""Texts that mean a missing value, in every place that a value may be."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import Categorical, Labels, Numeric, Schema, Sequence
from girih.data import NULL_ID
from girih.data.decode.columns import scalar_ids
from girih.data.from_memory import as_table
from girih.errors import ConfigError, DataError

NULLS = ["NA", "\\N", "-"]
SCHEMA = Schema(
    [
        Categorical(name="user"),
        Sequence(name="seen", separator="|"),
        Categorical(name="hour", column="time", transform="hour"),
        Numeric(name="price"),
    ],
    Labels(names="click", missing="skip", weight="trust"),
    null_values=NULLS,
)
ROWS = [
    ["7", "1|NA|2", "2024-05-01 05:00:00", "1.5", "1", "2.0"],
    ["-", "NA", "\\N", "-", "NA", "1.0"],
    ["NAN", "3", "2024-05-01 06:00:00", "-1", "0", "1.0"],
]
NAMES = ["user", "seen", "time", "price", "click", "trust"]


def csv(folder, rows=ROWS):
    (folder / "x.csv").write_text("\n".join(",".join(row) for row in [NAMES, *rows]) + "\n")
    return folder / "x.csv"


def expect(batch):
    text = scalar_ids(pa.array(["NAN"]))[0][0]
    by_feature = [batch.ids[batch.ids_of(place)].tolist() for place in range(3)]
    assert by_feature == [[7, NULL_ID, text], [1, NULL_ID, 2, 3], [5, NULL_ID, 6]]
    assert np.diff(batch.offsets[3:7]).tolist() == [3, 0, 1]
    assert batch.numeric[:, 0].tolist() == [1.5, 0.0, -1.0]
    assert (batch.labels[:, 0] * batch.label_weights[:, 0]).tolist() == [1.0, 0.0, 0.0]
    assert batch.label_weights[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_cells_of_text_files(tmp_path):
    (batch,) = girih.read_csv(csv(tmp_path), SCHEMA)
    expect(batch)


def test_the_option_of_a_reader_replaces_those_of_the_schema(tmp_path):
    (batch,) = girih.read_csv(csv(tmp_path), Schema(SCHEMA.features, SCHEMA.labels), null_values=NULLS)
    expect(batch)
    with pytest.raises(DataError, match=r"line 3: .* = 'NA'.*null_values = \['NA'\] makes it missing"):
        list(girih.read_csv(csv(tmp_path), SCHEMA, null_values=[]))


@pytest.mark.parametrize("dictionary", [True, False])
def test_strings_of_parquet(tmp_path, dictionary):
    users = pa.array(["7", "-", "NAN"] * 100)
    lists = pa.array([["1", "NA", "2"], [], ["3"]] * 100)
    table = pa.table({"user": users, "seen": lists, "click": [0] * 300})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=dictionary)
    schema = Schema([Categorical(name="user"), Sequence(name="seen")], "click", null_values=NULLS)
    (batch,) = girih.read_parquet(tmp_path / "x.parquet", schema)
    assert batch.ids[:3].tolist()[:2] == [7, NULL_ID]
    assert batch.ids[batch.ids_of(1)][:4].tolist() == [1, NULL_ID, 2, 3]


def test_json_lines_whose_numbers_are_sometimes_text(tmp_path):
    rows = [
        {"user": "NA", "price": "NA", "click": 1},
        {"user": 5, "price": 1.5, "click": 0},
        {"user": 6, "price": "-", "click": 0},
        {"user": 7, "price": 2, "click": 0},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    schema = Schema([Categorical(name="user"), Numeric(name="price")], "click", null_values=NULLS)
    (batch,) = girih.read_jsonl(tmp_path / "x.jsonl", schema)
    assert batch.ids.tolist() == [NULL_ID, 5, 6, 7]
    assert batch.numeric[:, 0].tolist() == [0.0, 1.5, 0.0, 2.0]


@pytest.mark.parametrize(
    "data",
    [
        {"user": ["NA", 5], "price": ["-", 1.5]},
        [{"user": "NA", "price": "-"}, {"user": 5, "price": 1.5}],
        pd.DataFrame({"user": ["NA", 5], "price": ["-", 1.5]}, dtype=object),
    ],
)
def test_values_in_python(data):
    table = as_table(data, ["user", "price"], NULLS)
    assert table["user"].to_pylist() == [None, 5]
    assert table["price"].to_pylist() == [None, 1.5]


def test_a_condition_and_a_split_see_missing_values(tmp_path):
    path = csv(tmp_path)
    (batch,) = girih.read_csv(path, SCHEMA, where="user != 'x' and price is not null")
    assert batch.num_examples == 2


def test_a_model_keeps_them_and_old_schemas_have_none():
    again = Schema.from_dict(SCHEMA.to_dict())
    assert again.null_values == tuple(NULLS)
    assert again.narrowed(["user"]).null_values == tuple(NULLS)
    plain = Schema(SCHEMA.features, SCHEMA.labels)
    assert "data" not in plain.to_dict()
    assert plain.fingerprint() == SCHEMA.fingerprint()


@pytest.mark.parametrize("given", ["NA", [1], {"NA": 1}])
def test_null_values_are_a_list_of_texts(tmp_path, given):
    with pytest.raises(ConfigError, match="null_values"):
        Schema(SCHEMA.features, SCHEMA.labels, null_values=given)
    with pytest.raises(ConfigError, match="null_values"):
        girih.read_csv(csv(tmp_path), SCHEMA, null_values=given)
