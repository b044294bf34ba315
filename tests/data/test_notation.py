"""Numbers as people of a country write them, wherever a number is read."""

import pytest

import girih
from girih import Categorical, Labels, Numeric, Schema
from girih.config import build
from girih.data import DataOptions
from girih.errors import ConfigError, DataError

GERMAN = {"decimal": ",", "thousands": ".", "units": ["€", "%", "EUR"]}
AMERICAN = {"thousands": ",", "units": ["$", "%"]}
NUMBERS = {
    "german": (GERMAN, {
        "1.234,56": 1234.56, "1.234.567": 1234567, "12,5 %": 12.5, "9,99€": 9.99, "€ 3": 3, "-1,5": -1.5, "- € 2,5": -2.5, "€-4": -4,
        ",5": 0.5, "7,": 7, "1,5e3": 1500, "1234,5": 1234.5, "0,125": 0.125, "12 EUR": 12, " 5 ": 5, "+3": 3, "9\u00a0€": 9,
    }),
    "accounts": (AMERICAN, {
        "(1,234.5)": -1234.5, "$(7)": -7, "($7.5)": -7.5, "7.5-": -7.5, "\u22127.5": -7.5, "-1,234": -1234, "$8": 8
    }),
    "american": (AMERICAN, {"$1,234.50": 1234.5, "1,23,456": 123456, "50%": 50, "0.5": 0.5, "-$7": -7, "1e-2": 0.01}),
    "french": ({"decimal": ",", "thousands": "\u202f"}, {"1\u202f234,5": 1234.5, "3,25": 3.25}),
    "swiss": ({"thousands": "'"}, {"1'234.5": 1234.5}),
    "blank": ({"thousands": " "}, {"1 234.5": 1234.5}),
    "plain": ({}, {"1.5": 1.5, "-2e3": -2000}),
}  # fmt: skip


def read(folder, cells, options, schema=None, **more):
    (folder / "x.csv").write_text("x;y\n" + "".join(f"{cell};0\n" for cell in cells))
    schema = schema or Schema([Numeric(name="x")], "y")
    return girih.read_csv(folder / "x.csv", schema, separator=";", **options, **more)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(tmp_path, name):
    options, numbers = NUMBERS[name]
    (batch,) = read(tmp_path, [*numbers, ""], options)
    assert batch.numeric[:, 0].tolist() == pytest.approx([*numbers.values(), 0.0])


@pytest.mark.parametrize(
    "cell",
    [
        "1.5",
        "0.123",
        "1.23",
        "1.2345",
        "1,2,3",
        "12 %%",
        "€",
        ",",
        "1,5 kg",
        "abc",
        "1.234.5",
        "--1",
        "-€-1",
        "()",
        "(-1)",
        "(1",
        "nan",
        "1e",
    ],
)
def test_other_spellings_are_bad_rows(tmp_path, cell):
    with pytest.raises(DataError, match=r"line 3: column 'x' = .*expected a finite number"):
        list(read(tmp_path, ["1,5", cell], GERMAN))


def test_without_options_local_numbers_are_bad_rows(tmp_path):
    with pytest.raises(DataError, match="line 2: column 'x' = '1,5'"):
        list(read(tmp_path, ["1,5"], {}))


def test_labels_weights_conditions_and_buckets(tmp_path):
    (tmp_path / "x.csv").write_text(
        "r;w;p;t;y\n4,5;0,5;1.000,5;a:1,5|b:0,5;0,25\n2;1;10;;1\n3,5;2;9,5;c:1;0\n"
    )
    schema = Schema(
        [
            Categorical(name="p", bucketize=[100.5]),
            Categorical(name="t", separator="|", weight_separator=":"),
        ],
        Labels(names=("y", "good"), derive={"good": "r >= 3.5"}, weight="w", mask={"good": "r > 2.5"}),
    )
    (batch,) = girih.read_csv(
        tmp_path / "x.csv", schema, separator=";", where="p > 9.75 or r in [3.5]", decimal=",", thousands="."
    )
    assert batch.labels.tolist() == [[0.25, 1.0], [1.0, 0.0], [0.0, 1.0]]
    assert batch.example_weights.tolist() == [0.5, 1.0, 2.0]
    assert batch.label_weights[:, 1].tolist() == [1.0, 0.0, 1.0]
    assert batch.ids[:3].tolist() == [1, 0, 0]
    assert batch.weights[3:].tolist() == [1.5, 0.5, 1.0]
    few = girih.read_csv(
        tmp_path / "x.csv", schema, separator=";", where="p > 9.75", decimal=",", thousands="."
    )
    assert [batch.num_examples for batch in few] == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decimal": ",,"}, "decimal = ',,'"),
        ({"decimal": "5"}, "decimal = '5'"),
        ({"thousands": ""}, "thousands"),
        ({"decimal": ",", "thousands": ","}, "expected different ones"),
        ({"units": "€"}, "units"),
        ({"units": [""]}, "units: ''"),
        ({"units": ["m2"]}, "units: 'm2'"),
    ],
)
def test_notations_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, ["1"], options)


def test_only_csv_has_a_notation():
    with pytest.raises(ConfigError, match="decimal: only format csv has it"):
        build(DataOptions, {"train": "x.parquet", "decimal": ","}, "[data]")
