"""Requests of bytes: by a plan, and as any other request is read; both give the same batch, or the same mistake."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import girih
from girih.errors import DataError, GirihError
from girih.serving.plain import PlainReader
from girih.serving.protocol import Parser
from girih.serving.reading import RequestReader
from girih.serving.signature import Output
from girih.serving.tensors import NUMPY

SCHEMA = girih.Schema(
    [
        girih.Categorical(name="user", dim=4),
        girih.Categorical(name="item", dim=4),
        girih.Categorical(name="again", dim=4, column="item"),
        girih.Sequence(name="seen", dim=4, max_length=3),
        girih.Numeric(name="price", transform="standardize"),
        girih.Numeric(name="age"),
    ],
    "click",
)
COLUMNS = ["user", "item", "seen", "price", "age"]
IDS, NUMBERS = COLUMNS[:3], COLUMNS[3:]
INTEGERS = [name for name, dtype in NUMPY.items() if dtype.kind in "iu"]
FLOATS = ["FP16", "FP32", "FP64"]
OUTPUTS = [Output(name="prediction", label="click", loss="bce")]


def body_of(tensors, **more):
    """A body of binary tensors, {name: (datatype, array)}, and the length of its JSON."""
    described = [
        {
            "name": name,
            "datatype": kind,
            "shape": list(values.shape),
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, (kind, values) in tensors.items()
    ]
    head = json.dumps({"inputs": described, **more}).encode()
    return head + b"".join(values.tobytes() for _, values in tensors.values()), str(len(head))


def drawn(rng, kind, shape):
    dtype = NUMPY[kind]
    if dtype.kind == "f":
        return rng.normal(size=shape).astype(dtype)
    bounds = np.iinfo(dtype)
    return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def fields(batch):
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def assert_same(batch, expected):
    for name, value in fields(expected).items():
        got = getattr(batch, name)
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype
            np.testing.assert_array_equal(got, value)
        else:
            assert got == value


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_plan_reads_what_the_long_way_reads(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    size = data.draw(st.integers(1, 9))
    tensors = {}
    for name in data.draw(st.permutations(COLUMNS)):
        kind = data.draw(st.sampled_from(INTEGERS if name in IDS else INTEGERS + FLOATS))
        rows = data.draw(st.sampled_from([1, size]))
        tensors[name] = kind, drawn(rng, kind, data.draw(st.sampled_from([(rows,), (rows, 1)])))
    parser, reader = Parser(OUTPUTS), RequestReader(SCHEMA, 64)
    body, length = body_of(tensors)
    request = parser.parse(body, length)
    quick = PlainReader(SCHEMA, {f.name for f in SCHEMA.features}, 64)
    assert quick.read(request.layout, request.data) is not None
    assert_same(reader.read_request(request), reader.read(request.tensors))
    others = {name: (kind, drawn(rng, kind, values.shape)) for name, (kind, values) in tensors.items()}
    body, length = body_of(others)
    again = parser.parse(body, length)
    assert again.layout is request.layout  # its JSON was not read
    assert again.given is None
    expected = reader.read(
        {
            name: dataclasses.replace(t, values=others[name][1].reshape(-1))
            for name, t in request.tensors.items()
        }
    )
    assert_same(reader.read_request(again), expected)


def outcome(read):
    try:
        return read()
    except GirihError as error:
        return error


def usual(size=3):
    rng = np.random.default_rng(0)
    numbers = {name: ("FP32", rng.random(size, np.float32)) for name in NUMBERS}
    return {name: ("INT64", rng.integers(0, 99, size)) for name in IDS} | numbers


LISTS = {"seen": ("INT64", np.arange(6)), "seen.lengths": ("INT32", np.array([1, 2, 3], np.int32))}


@pytest.mark.parametrize(
    "change",
    [
        {"price": ("FP32", np.array([1, np.nan, 2], np.float32))},
        {"price": ("FP32", np.array([1, np.inf, 2], np.float32))},
        {"age": ("FP64", np.array([1, 1e300, 2]))},
        {"user": ("FP32", np.ones(3, np.float32))},
        {"user": ("BOOL", np.ones(3, np.bool_))},
        {"user": ("INT64", np.arange(2))},
        {"user": ("INT64", np.arange(0))},
        {"stranger": ("INT64", np.arange(3))},
        {"seen": ("INT64", np.arange(6).reshape(3, 2))},
        LISTS,
        {"user": ("INT64", np.arange(99)), "item": ("INT64", np.arange(99))},
        {"user": ("BYTES", np.frombuffer(b"\x01\0\0\0a" * 3, np.uint8))},
    ],
)
def test_what_no_plan_is_for_is_read_the_long_way(change):
    body, length = body_of(usual() | change)
    if "BYTES" in str(change):
        body = body.replace(b'"BYTES", "shape": [15]', b'"BYTES", "shape": [3] ')
    reader, parser = RequestReader(SCHEMA, 64), Parser(OUTPUTS)
    for _ in range(2):  # the second time by the JSON that is known
        request = parser.parse(body, length)
        assert reader._quick.read(request.layout, request.data) is None
        expected = outcome(partial(lambda each: reader.read(each.tensors), request))
        got = outcome(partial(reader.read_request, request))
        if isinstance(expected, GirihError):
            assert (type(got), str(got)) == (type(expected), str(expected))
        else:
            assert_same(got, expected)


def test_json_that_is_known_is_held_to_what_follows_it():
    parser = Parser(OUTPUTS)
    body, length = body_of(
        usual(), id="seven", outputs=[{"name": "prediction", "parameters": {"binary_data": True}}]
    )
    first = parser.parse(body, length)
    second = parser.parse(body, length)
    assert second.layout is first.layout
    assert (second.id, second.outputs) == ("seven", first.outputs)
    for wrong in (body[:-1], body + b"0"):
        with pytest.raises(DataError, match="bytes"):
            parser.parse(wrong, length)
    other, other_length = body_of(usual(), id="eight")
    assert parser.parse(other, other_length).id == "eight"


def test_a_parser_keeps_the_json_of_few_requests():
    parser = Parser(OUTPUTS)
    layouts = [parser.parse(*body_of(usual(), id=str(number))).layout for number in range(200)]
    assert parser.parse(*body_of(usual(), id="199")).layout is layouts[199]
    assert parser.parse(*body_of(usual(), id="0")).layout is not layouts[0]
    long = body_of(usual(), id="x" * 100_000)
    assert parser.parse(*long).layout is not parser.parse(*long).layout
