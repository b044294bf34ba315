"""Requests that would take much more memory than their bytes: refused before anything of the kind is made."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from girih.errors import DataError
from girih.schema import Categorical, Schema, Sequence
from girih.serving import reading
from girih.serving.app import status_of
from girih.serving.protocol import metadata
from girih.serving.reading import MOST_IDS, RequestReader, TooLarge
from girih.serving.signature import inputs_of
from girih.serving.tensors import NUMPY, from_bytes, from_json, preview, shape_of

EXAMPLES = 8192
SCHEMA = Schema(
    [
        Categorical(name="item", dim=4),
        Categorical(name="genres", dim=4, separator="|"),
        Categorical(name="tags", dim=4, separator=",", weights="tag_weights"),
        Sequence(name="seen", dim=4, separator=" ", max_length=3),
    ],
    labels="click",
)


def tensors(size, **given):
    """All inputs, for ``size`` examples; those that are given are lists of strings, of one for all or of ``size``."""
    inputs = {name: ["1"] for name in ("genres", "tags", "tag_weights", "seen")} | given
    found = {name: from_json(name, "BYTES", (len(data),), data) for name, data in inputs.items()}
    return found | {"item": from_json("item", "INT64", (size,), list(range(size)))}


@pytest.fixture
def reader():
    return RequestReader(SCHEMA, EXAMPLES)


def refused(reader, given):
    with pytest.raises(TooLarge) as found:
        reader.read(given)
    told = str(found.value)
    assert status_of(found.value) == 413
    assert "\n" not in told
    assert told.endswith(": send several requests")
    return told


@pytest.mark.parametrize("name", ["genres", "seen"])
def test_ids_that_a_separator_makes_of_a_shared_string_are_counted_for_each_example(
    reader, name, monkeypatch
):
    def not_before(*_):
        raise AssertionError("it was split before it was refused")

    separator = {"genres": "|", "seen": " "}[name]
    shared = separator.join(["7"] * 600)  # 1.2 kB
    monkeypatch.setattr(reading, "decode", not_before)
    told = refused(reader, tensors(EXAMPLES, **{name: [shared]}))
    assert f"values in one request; expected at most {MOST_IDS:,}" in told


def test_ids_that_a_separator_makes_of_each_string_are_counted(reader, monkeypatch):
    monkeypatch.setattr(reading, "MOST_IDS", 1000)
    many = tensors(10, genres=["|".join(["7"] * 100)] * 10)
    assert "1,0" in refused(reader, many)
    assert reader.read(tensors(10, genres=["|".join(["7"] * 90)] * 10)).num_examples == 10


def test_a_shared_string_beside_weights_of_each_example_is_repeated_within_a_bound(reader):
    shared = ["x" * 50_000]  # 400 MB for all examples
    told = refused(reader, tensors(EXAMPLES, tags=shared, tag_weights=["1"] * EXAMPLES))
    assert "input 'tags': 50," in told
    assert f"bytes for each of {EXAMPLES:,} examples; expected at most 268,435,456 in all" in told


def test_strings_that_are_split_read_as_ever_within_the_bounds(reader):
    batch = reader.read(
        tensors(3, genres=["1|2"], tags=["5,6"], tag_weights=["1,2"] * 3, seen=["1 2 3 4", "", "9"])
    )
    counts = np.diff(batch.offsets).reshape(4, 3)
    assert counts.tolist() == [[1] * 3, [2] * 3, [2] * 3, [3, 0, 1]]
    seen = batch.ids[batch.offsets[9] : batch.offsets[12]]
    assert seen.tolist() == [2, 3, 4, 9]


def test_integers_of_a_column_that_would_be_split_are_counted_as_they_are(reader):
    missing = from_json("genres", "INT64", (3,), [1, None, 2])
    assert isinstance(missing.values, pa.Array)
    assert reader._num_values("genres", reading.RequestColumn(missing.values, None, 3)) == 3


def test_lists_without_lengths_are_said_to_have_none(reader):
    lists = {name: from_json(name, "INT64", (5,), [1, 2, 3, 4, 5]) for name in ("genres", "seen")}
    with pytest.raises(
        DataError, match=r"; seen has lists: seen\.lengths says how many values each example has"
    ):
        reader.read(tensors(3) | {"seen": lists["seen"]})
    with pytest.raises(DataError) as found:
        reader.read(tensors(3) | {"genres": lists["genres"]})
    assert "lists" not in str(found.value)


def test_numbers_of_json_are_as_large_as_their_datatype_lets_them_be():
    assert from_json("x", "UINT64", (1,), [(1 << 64) - 1]).values.tolist() == [(1 << 64) - 1]
    assert from_json("x", "FP32", (2,), [1 << 70, 0.5]).values.tolist() == [float(1 << 70), 0.5]
    assert np.isinf(from_json("x", "FP64", (1,), [float("inf")]).values).all()
    for datatype, value in (
        ("FP16", 7e4),
        ("FP32", -1e39),
        ("FP32", 1 << 200),
        ("FP64", 1 << 1100),
        ("UINT8", 256),
    ):
        with pytest.raises(DataError, match=f"expected values of {datatype}"):
            from_json("x", datatype, (2,), [1, value])


def test_halves_of_json_are_read_with_nulls_between():
    found = from_json("x", "FP16", (4,), [0.5, None, 65504, float("nan")]).values
    assert (found.type, found.null_count) == (pa.float16(), 1)
    np.testing.assert_array_equal(found.drop_null().to_numpy(), np.array([0.5, 65504, np.nan], np.float16))
    for value in (1e5, -70_000, 1 << 70):
        with pytest.raises(DataError, match=r"input 'x': value 1 is .*; expected values of FP16"):
            from_json("x", "FP16", (3,), [None, value, 0.5])


@pytest.mark.parametrize("datatype", sorted({*NUMPY} - {"BOOL"}))
@pytest.mark.parametrize("value", [True, "1", [1], {}])
def test_values_of_json_of_another_type_than_a_number(datatype, value):
    with pytest.raises(DataError, match=rf"input 'x': value 1 is .*; expected values of {datatype}"):
        from_json("x", datatype, (2,), [1, value])


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES"])
def test_values_of_json_that_are_no_flags_and_no_strings(datatype):
    with pytest.raises(DataError, match=rf"input 'x': value 1 is 1; expected values of {datatype}"):
        from_json("x", datatype, (2,), [None, 1])


class Untouched(list):
    """A list that says how many of its items were looked at."""

    def __init__(self, items):
        super().__init__(items)
        self.seen = 0

    def __iter__(self):
        for item in super().__iter__():
            self.seen += 1
            yield item


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_an_error_writes_no_more_of_a_value_than_it_shows():
    long = Untouched(range(100_000))
    for value, begin in (
        (long, "[0, 1, 2, 3"),
        ({"a": long}, '{"a": [0, 1'),
        ("é" * 100, '"\\u00e9'),
        (nested(100_000), "[[[["),  # deeper than any stack
        (None, "null"),
        (float("inf"), "Infinity"),
    ):
        assert preview(value).startswith(begin)
        assert len(preview(value)) <= 40
    assert long.seen < 200


def test_values_nested_deep_are_refused_where_values_are_expected():
    for given in (
        {"data": [nested(100_000)]},
        {"data": [1], "shape": nested(100_000)},
        {"datatype": nested(100_000)},
    ):
        described = {"datatype": "FP32", "shape": [1], "data": [1]} | given
        with pytest.raises(DataError, match=r"\[\[\[\["):
            from_json("x", described["datatype"], shape_of("x", described["shape"]), described["data"])


def test_ids_that_a_separator_splits_list_all_datatypes_that_are_taken_for_them():
    described = metadata(SimpleNamespace(inputs=inputs_of(SCHEMA), outputs=()), "clicks", "1")["inputs"]
    found = {
        each["name"]: (each["datatype"], each.get("parameters", {}).get("datatypes")) for each in described
    }
    every = ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "BYTES"]
    assert found["item"] == ("INT64", every)
    assert found["genres"] == found["tags"] == found["seen"] == ("BYTES", every)
    assert found["tag_weights"] == ("BYTES", None)


@pytest.mark.parametrize("shape", [[0, 10**30], [0, 2**63], [10**30], [2**31, 0], [0, 2**40]])
def test_a_shape_that_no_array_has_is_refused(shape):
    """Also one of no values, in JSON or as bytes."""
    for given in (
        lambda: from_json("item", "INT64", tuple(shape), []),
        lambda: from_bytes("item", "INT64", tuple(shape), memoryview(b"")),
    ):
        with pytest.raises(DataError, match=r"input 'item': a shape of .* has too many values"):
            given()


def test_booleans_are_no_ids(reader):
    """As bytes or as JSON."""
    truth = np.ones(1, np.bool_)
    for given in (
        from_bytes("item", "BOOL", (1,), memoryview(truth.tobytes())),
        from_json("item", "BOOL", (1,), [True]),
    ):
        with pytest.raises(
            DataError, match="input 'item': BOOL; expected ids, which are integers or strings"
        ):
            reader.read(tensors(1) | {"item": given})
