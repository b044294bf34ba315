"""One id has one row: the same integer gives the same id in every format, in dictionaries and in requests."""

import json
import struct

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih.data.decode.columns import scalar_ids
from girih.data.from_memory import as_table
from girih.errors import DataError
from girih.schema import Categorical, Schema, Sequence
from girih.serving.reading import RequestReader
from girih.serving.tensors import from_bytes, from_json

SIGNED = [0, 1, -1, 7, -7, 10**18, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1]
LARGE = [2**63, 2**63 + 1, 10**19, 11574219430428675553, 2**64 - 2, 2**64 - 1]
COLUMNS = {
    "signed": SIGNED,
    "large": LARGE,
    "unsigned": [value for value in SIGNED if value >= 0] + LARGE,
    "mixed": SIGNED + LARGE,
}
SCHEMA = Schema([Categorical(name="user"), Sequence(name="seen")], labels="click")


def expected(values):
    """The id of each value: the integer itself, or its 64 bits as a signed integer."""
    return [value if value < 2**63 else value - 2**64 for value in values]


def arrow(values):
    """Values in the widest Arrow integers that hold all of them; None if there are none."""
    kinds = [pa.int64(), pa.uint64()]
    return next((pa.array(values, kind) for kind in kinds if fits(values, kind)), None)


def fits(values, kind):
    low, high = (-(2**63), 2**63) if kind == pa.int64() else (0, 2**64)
    return all(low <= value < high for value in values)


def table_of(values, convert=None):
    users = pa.array(values) if convert is None else convert(values)
    offsets = pa.array(range(len(values) + 1), pa.int32())
    return pa.table(
        {"user": users, "seen": pa.ListArray.from_arrays(offsets, users), "click": [0] * len(values)}
    )


def strings(values):
    return pa.array([str(value) for value in values])


def from_parquet(convert):
    def read(values, tmp_path):
        users = convert(values)
        if users is None:
            pytest.skip("Arrow has no integers of both kinds")
        pq.write_table(table_of(values, lambda _: users), tmp_path / "x.parquet")
        return girih.read_parquet(tmp_path / "x.parquet", SCHEMA, batch_size=len(values))

    return read


def from_arrow(values, tmp_path):
    return girih.read_arrow(table_of(values, strings), SCHEMA, batch_size=len(values))


def frame_of_objects(values):
    return pd.DataFrame({"user": pd.Series(values, dtype=object)})


def from_pandas(values, tmp_path):
    return girih.read_arrow(frame_of_objects(values).assign(click=0, seen=[[v] for v in values]), SCHEMA)


def from_csv(values, tmp_path):
    lines = "".join(f"{value},{value},0\n" for value in values)
    (tmp_path / "x.csv").write_text("user,seen,click\n" + lines)
    schema = Schema([Categorical(name="user"), Sequence(name="seen", separator="|")], labels="click")
    return girih.read_csv(tmp_path / "x.csv", schema, batch_size=len(values))


def from_jsonl(spell):
    def read(values, tmp_path):
        lines = [json.dumps({"user": spell(v), "seen": [spell(v)], "click": 0}) for v in values]
        (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
        return girih.read_jsonl(tmp_path / "x.jsonl", SCHEMA, batch_size=len(values))

    return read


def from_libsvm(values, tmp_path):
    (tmp_path / "x.svm").write_text("".join(f"0 {value}:1 {value}:1\n" for value in values))
    return girih.read_libsvm(tmp_path / "x.svm", SCHEMA, batch_size=len(values))


READERS = {
    "parquet integers": from_parquet(arrow),
    "parquet strings": from_parquet(strings),
    "parquet large strings": from_parquet(lambda values: strings(values).cast(pa.large_string())),
    "parquet binary": from_parquet(lambda values: strings(values).cast(pa.binary())),
    "parquet dictionary": from_parquet(lambda values: strings(values).dictionary_encode()),
    "arrow": from_arrow,
    "pandas objects": from_pandas,
    "csv": from_csv,
    "jsonl integers": from_jsonl(int),
    "jsonl strings": from_jsonl(str),
    "libsvm": from_libsvm,
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("reader", READERS)
def test_the_same_integer_is_the_same_id_in_every_format(reader, column, tmp_path):
    values = COLUMNS[column]
    (batch,) = READERS[reader](values, tmp_path)
    assert batch.ids.tolist() == expected(values) * 2


GIVEN = {
    "dict of columns": lambda values: {"user": values},
    "dict of strings": lambda values: {"user": [str(value) for value in values]},
    "dict of mixed types": lambda values: {"user": [*values[:-1], str(values[-1])]},
    "dicts": lambda values: [{"user": value} for value in values],
    "numpy objects": lambda values: {"user": np.array(values, object)},
    "pandas objects": frame_of_objects,
    "pandas strings": lambda values: pd.DataFrame({"user": [str(value) for value in values]}),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("kind", GIVEN)
def test_the_same_integer_is_the_same_id_in_python(kind, column):
    values = COLUMNS[column]
    table = as_table(GIVEN[kind](values), ["user"])
    assert scalar_ids(table["user"].combine_chunks())[0].tolist() == expected(values)


@pytest.mark.parametrize("values", [[2**64], [-(2**63) - 1], [1, 2**70], ["a", 2**64]])
def test_an_integer_of_more_than_64_bits_is_refused_in_python(values):
    schema = Schema([Categorical(name="user")], labels="click")
    with pytest.raises(DataError, match="user"):
        girih.read_arrow(as_table({"user": values, "click": [0] * len(values)}), schema)


def test_numbers_beyond_int64_stay_numbers_in_a_dictionary():
    table = as_table({"price": [2**63, 0.5, -1], "cost": [2**70, 1, -1]})
    assert table["price"].to_pylist() == [2.0**63, 0.5, -1.0]
    assert table["cost"].to_pylist() == [2.0**70, 1.0, -1.0]


def binary_strings(values):
    texts = [str(value).encode() for value in values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def requests(values):
    shape = (len(values),)
    yield from_json("user", "BYTES", shape, [str(value) for value in values])
    yield from_bytes("user", "BYTES", shape, memoryview(binary_strings(values)))
    for datatype, kind in (("INT64", pa.int64()), ("UINT64", pa.uint64())):
        if fits(values, kind):
            yield from_json("user", datatype, shape, values)
            data = np.array(values, datatype.lower()).tobytes()
            yield from_bytes("user", datatype, shape, memoryview(data))


@pytest.mark.parametrize("column", COLUMNS)
def test_the_same_integer_is_the_same_id_in_a_request(column):
    values = COLUMNS[column]
    reader = RequestReader(Schema([Categorical(name="user")], labels="click"), 64)
    read = [reader.read({"user": tensor}).ids.tolist() for tensor in requests(values)]
    assert read == [expected(values)] * len(read)
    assert len(read) >= 2


def test_lines_that_mix_signs_keep_their_order_and_numbers(tmp_path):
    """A column of numbers that holds integers of both ranges is read as numbers, not as bits."""
    rows = [{"user": 1, "price": value, "click": 0} for value in (-1, 2**63, 2.5)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    schema = Schema([Categorical(name="user"), girih.Numeric(name="price")], labels="click")
    (batch,) = girih.read_jsonl(tmp_path / "x.jsonl", schema, batch_size=3)
    assert batch.numeric[:, 0].tolist() == [-1.0, 2.0**63, 2.5]
