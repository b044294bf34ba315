"""Conditions on rows, splits by the order of a column, and parts of times."""

import datetime
import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih.data import DataOptions, open_dataset
from girih.data.decode.conditions import parse_where
from girih.errors import ConfigError, DataError

BEGIN = datetime.datetime(2024, 2, 28, 22, 30)
SCHEMA = girih.Schema([girih.Categorical(name="row")], "click")
ROWS = [
    {"row": i, "price": None if i % 5 == 0 else i / 2, "country": ["NL", "BE", "d'or", None][i % 4], "new": i % 3 == 0,
     "time": BEGIN + datetime.timedelta(hours=i), "click": i % 2, "odd name": i % 7}
    for i in range(48)
]  # fmt: skip


def rows_of(data):
    return [row for batch in data for row in batch.ids.tolist()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("where")
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, root / "a.parquet", row_group_size=7)
    lines = [",".join(ROWS[0])]
    for row in ROWS:
        cells = [
            "" if value is None else str(int(value) if value is True or value is False else value)
            for value in row.values()
        ]
        lines.append(",".join(cells))
    (root / "a.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return root


def opened(files, kind, schema=SCHEMA, **options):
    if kind == "arrow":
        return girih.read_arrow(pa.Table.from_pylist(ROWS), schema, **options)
    if kind == "csv":
        return girih.read_csv(files / "a.csv.gz", schema, block_bytes=200, **options)
    return girih.read_parquet(files / "a.parquet", schema, **options)


CONDITIONS = {
    "price > 7": lambda r: r["price"] is not None and r["price"] > 7,
    "not price > 7": lambda r: r["price"] is not None and not r["price"] > 7,
    "7 < price <= 12.5 and new == true": lambda r: (
        r["price"] is not None and 7 < r["price"] <= 12.5 and r["new"]
    ),
    "price is null or country is null": lambda r: r["price"] is None or r["country"] is None,
    "not (price is null or country is null)": lambda r: not (r["price"] is None or r["country"] is None),
    "country in ['NL', 'BE']": lambda r: r["country"] in ("NL", "BE"),
    "country not in ['NL', 'BE']": lambda r: r["country"] == "d'or",
    'country == "d\'or"': lambda r: r["country"] == "d'or",
    "row in (3, 4, 40)": lambda r: r["row"] in (3, 4, 40),
    "column('odd name') != 3 and -1 < row": lambda r: r["odd name"] != 3,
    "new == 1 or price == 3": lambda r: r["new"] or r["price"] == 3,
    "time >= '2024-03-01'": lambda r: r["time"] >= datetime.datetime(2024, 3, 1),
}


@pytest.mark.parametrize("kind", ["parquet", "csv", "arrow"])
@pytest.mark.parametrize("text", CONDITIONS)
def test_rows_that_meet_a_condition_are_read(files, kind, text):
    data = opened(files, kind, where=text)
    assert rows_of(data) == [row["row"] for row in ROWS if CONDITIONS[text](row)]
    assert data.num_examples is None
    assert data.num_skipped == 0


def test_a_missing_value_decides_nothing_by_itself(files):
    every = [row["row"] for row in ROWS]
    assert rows_of(opened(files, "parquet", where="price > 7 or row >= 0")) == every
    assert rows_of(opened(files, "parquet", where="price > 7 or price <= 7")) != every


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("price >", "cannot be read"),
        ("price", "'price' is not a comparison"),
        ("price = 3", "cannot be read at character [0-9]+: write ==, not =;"),
        ("price => 3", "cannot be read at character [0-9]+: write >=, not =>;"),
        ("price =< 3", "write <=, not =<;"),
        ("price <> 3", "write !=, not <>;"),
        ("price > 3 && price < 5", "write and, not &&;"),
        ("(price > 3) & (price < 5)", "is not a comparison; .*; write and, not &$"),
        ("price > 3 OR price < 5", "write or, not OR;"),
        ("price between 3 and 5", "write low <= column and column <= high, not between;"),
        (r"price > 3 || price < 2", r"write or, not \|\|;"),
        ("country == 'a && b' and", "cannot be read; expected"),
        ("price > cost", "'price' and 'cost': expected a column on one side"),
        ("3 > 2", "expected a column on one side"),
        ("__import__('os').system('x') == 1", "is not a column: expected a name"),
        ("open('x') == 1", "is not a column"),
        ("price.real > 1", "expected a column on one side"),
        ("price > null", "write 'is null'"),
        ("price is 3", "is not null, the only word allowed"),
        ("country in 'NL'", "is not a list of values"),
        ("country in ['NL', 3]", "has both text and numbers"),
        ("price > 1e999", r"is not a value|cannot be"),
        ("price > 3 + 4", "is not a value: expected a number|expected a column"),
        ("(" * 5000, "cannot be read"),
        ("[x for x in y] == 3", "expected a column on one side"),
        ("(lambda: 1)", "is not a comparison"),
        ("a := 3", "cannot be read"),
    ],
)
def test_what_is_no_condition(text, message):
    with pytest.raises(ConfigError, match=f"(?s)where = .*({message})") as caught:
        parse_where(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cost > 3", "no column 'cost' .where."),
        ("country > 3", "'country' of where = 'country > 3': 3 is compared with strings: put it in quotes"),
        ("price > 'much'", "'much' is compared with floats: compare with a number"),
        ("price > '3.5'", "'3.5' is compared with floats: write 3.5, without quotes"),
        ("time > 'yesterday'", r"'yesterday' is not a time, which timestamp\[us\] needs: write '2024-05-01'"),
        ("time > 3", "3 is not a time"),
    ],
)
def test_conditions_that_do_not_go_with_columns(files, text, message):
    with pytest.raises(DataError, match=message):
        opened(files, "parquet", where=text)


def test_no_row_meets_the_condition(files):
    with pytest.raises(DataError, match=r"a.parquet: no row meets where = 'row > 1000'"):
        list(opened(files, "parquet", where="row > 1000"))
    with pytest.raises(ConfigError, match=r"where = 3: expected a string"):
        opened(files, "parquet", where=3)


def test_rows_left_out_are_never_bad(files):
    schema = girih.Schema([girih.Numeric(name="price")], "row")  # most rows are no labels
    assert sum(batch.num_examples for batch in opened(files, "csv", schema, where="row <= 1")) == 2
    with pytest.raises(DataError, match=r"line 4: column 'row' = '2': expected a label"):
        list(opened(files, "csv", schema, where="row in [1, 2]"))


def test_positions_know_the_condition(files):
    options = {"batch_size": 5, "shuffle": True, "shuffle_rows": 10}
    steps = list(opened(files, "parquet", where="row > 3", **options).batches())
    rest = list(opened(files, "parquet", where="row > 3", **options).batches(0, steps[2][1]))
    assert [batch.ids.tolist() for batch, _ in rest] == [batch.ids.tolist() for batch, _ in steps[3:]]
    with pytest.raises(ConfigError, match=r"or where"):
        opened(files, "parquet", where="row > 4", **options).batches(0, steps[2][1])


def cut(files, kind, name, split, **options):
    found = DataOptions(
        format="csv" if kind == "csv" else "parquet", train=str(files / ("a.csv.gz" if kind == "csv" else "a.parquet")),
        split=split, shuffle=False, **options,
    )  # fmt: skip
    return rows_of(open_dataset(found, SCHEMA, split=name))


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("by", ["time", "row"])
def test_the_last_rows_are_the_test(files, kind, by):
    split = {"by": by, "valid": 0.25, "test": 0.125}
    got = {name: cut(files, kind, name, split) for name in ("train", "valid", "test")}
    assert got == {"train": list(range(30)), "valid": list(range(30, 42)), "test": list(range(42, 48))}
    assert cut(files, kind, "test", {"by": by, "test": 0.5}) == list(range(24, 48))
    assert cut(files, kind, "valid", {"by": by, "valid": 0.5}) == list(range(24, 48))
    assert cut(files, kind, "test", {"by": by, "test": 0.5}, where="row >= 40") == list(range(44, 48))


def test_a_cut_is_where_its_rank_is_whatever_the_order_of_rows(tmp_path):
    rng = np.random.default_rng(3)
    stamps = rng.permutation(10_000) + (1 << 60)  # beyond what a float64 tells apart
    table = pa.table({"row": stamps, "at": stamps, "click": stamps % 2})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1024)
    options = DataOptions(
        train=str(tmp_path / "a.parquet"), split={"by": "at", "valid": 0.1, "test": 0.2}, shuffle=False
    )
    got = {
        name: sorted(rows_of(open_dataset(options, SCHEMA, split=name)))
        for name in ("train", "valid", "test")
    }
    assert [len(rows) for rows in got.values()] == [7000, 1000, 2000]
    assert got["train"] + got["valid"] + got["test"] == sorted(stamps.tolist())


def test_splits_that_cannot_be(files):
    path = str(files / "a.parquet")
    for split, message in (
        ({"by": "time"}, "together above 0 and below 1"),
        ({"by": "time", "valid": 0.5, "test": 0.5}, "together above 0 and below 1"),
        ({"by": "time", "valid": 2}, "valid = 2"),
        ({"valid": 0.5}, "key 'by' is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            DataOptions(train=path, split=split)
    with pytest.raises(
        ConfigError, match=r"split: cuts valid off train, and valid = 'x' names files; drop one"
    ):
        DataOptions(train=path, valid="x", split={"by": "time", "valid": 0.1})
    for by, message in (
        ("tim", "a.parquet: split.by = 'tim': no such column; did you mean 'time'"),
        (
            "new",
            r"a.parquet: split.by = 'new' \(bool\): expected times, or numbers, one per row; cast it, or name another column",
        ),
        ("price", 'no number or time, but data.split needs one in each; add where = "price is not null"'),
        ("country", "a.parquet: split.by = 'country': column 'country': .* no number or time"),
    ):
        with pytest.raises(DataError, match=message):
            cut(files, "parquet", "train", {"by": by, "test": 0.1})
    with pytest.raises(DataError, match=r"too few different values"):
        cut(files, "parquet", "train", {"by": "row", "test": 0.1}, where="row == 3")
    split, there = {"by": "price", "test": 0.2}, "price is not null"  # as the message says
    parts = [cut(files, "parquet", name, split, where=there) for name in ("train", "test")]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == rows_of(girih.read_parquet(path, SCHEMA, where=there))


def test_a_column_of_nulls_has_no_order_but_may_be_left_out(tmp_path):
    none, some = str(tmp_path / "none.parquet"), str(tmp_path / "some.parquet")
    pq.write_table(pa.table({"row": [1], "at": pa.nulls(1), "click": [0]}), none)
    pq.write_table(pa.table({"row": range(8), "at": range(8), "click": [0, 1] * 4}), some)
    split = {"by": "at", "test": 0.25}
    with pytest.raises(DataError, match=r"none.parquet: split.by = 'at': .* add where = \"at is not null\""):
        open_dataset(DataOptions(train=(none, some), split=split), SCHEMA)
    options = DataOptions(train=(none, some), split=split, where="at is not null", shuffle=False)
    assert rows_of(open_dataset(options, SCHEMA, split="test")) == [6, 7]


TIMES = {
    "naive": pa.array([datetime.datetime(2024, 5, 4, 23, 59), None, datetime.datetime(1969, 12, 31, 1)]),
    "text": pa.array(["2024-05-04T23:59", None, "1969-12-31 01:00:00"]),
    "offsets": pa.array(["2024-05-05T01:59+02:00", None, "1969-12-31 01:00:00Z"]),
    "seconds": pa.array([1714867140, None, -82800]),
    "seconds as text": pa.array(["1714867140", None, "-82800"]),
    "floats": pa.array([1714867140.5, None, -82800.0]),
    "words": pa.array(["2024-05-04T23:59", None, "1969-12-31 01:00:00"]).dictionary_encode(),
}


@pytest.mark.parametrize("form", TIMES)
def test_hours_and_weekdays(form):
    schema = girih.Schema(
        [
            girih.Categorical(name="hour", column="at", transform="hour"),
            girih.Categorical(name="weekday", column="at", transform="weekday"),
            girih.Numeric(name="h", column="at", transform="hour"),
        ],
        "click",
    )
    (batch,) = girih.read_arrow(pa.table({"at": TIMES[form], "click": [0, 1, 0]}), schema)
    assert batch.ids.tolist() == [23, girih.data.NULL_ID, 1, 5, girih.data.NULL_ID, 2]
    assert batch.numeric[:, 0].tolist() == [23, 0, 1]


def test_times_of_a_zone_and_in_other_units():
    zoned = pa.array(
        [datetime.datetime(2024, 5, 4, 23, tzinfo=datetime.UTC)], pa.timestamp("us", "Europe/Amsterdam")
    )
    hour = girih.Schema([girih.Categorical(name="at", transform="hour")], "click")
    (batch,) = girih.read_arrow(pa.table({"at": zoned, "click": [0]}), hour)
    assert batch.ids.tolist() == [1]
    (batch,) = girih.read_arrow(
        pa.table({"at": zoned, "click": [0]}), hour, where="at > '2024-05-04 22:00:00'"
    )
    assert batch.num_examples == 1
    milli = girih.Schema([girih.Categorical(name="at", transform="weekday", time_unit="ms")], "click")
    (batch,) = girih.read_arrow(pa.table({"at": [1714867140123], "click": [0]}), milli)
    assert batch.ids.tolist() == [5]
    with pytest.raises(
        DataError, match=r"row 1: column 'at' = 1714867140123: expected a time before 2200.*time_unit = 'ms'"
    ):
        list(girih.read_arrow(pa.table({"at": [1714867140123], "click": [0]}), hour))
    for bad, message in (
        (["noon"], "column 'at' = 'noon': expected a time"),
        ([datetime.date(2024, 5, 4)], "a date has no hour; use weekday"),
        ([[1]], "hour expects timestamps"),
    ):
        with pytest.raises(DataError, match=message):
            list(girih.read_arrow(pa.table({"at": bad, "click": [0]}), hour))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: girih.Categorical(name="t", transform="minute"), "transform = 'minute': expected"),
        (
            lambda: girih.Categorical(name="t", transform="hour", separator="|"),
            "hour makes one id from one time; drop",
        ),
        (lambda: girih.Categorical(name="t", time_unit="ms"), "time_unit = 'ms': is only for times"),
        (lambda: girih.Numeric(name="t", time_unit="ms"), "time_unit = 'ms': is only for times"),
        (lambda: girih.Numeric(name="t", transform=("log1p", "hour")), "must be the first transform"),
        (lambda: girih.Numeric(name="t", transform=("hour", "weekday")), "the only one of a time"),
    ],
)
def test_transforms_of_times_that_cannot_be(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
