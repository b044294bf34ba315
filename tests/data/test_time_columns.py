"""Columns of times given to features that read ids or numbers: which transform or kind is meant."""

import datetime

import pyarrow as pa
import pytest

import girih
from girih.errors import DataError

NOON = datetime.datetime(2024, 5, 1, 12)
TABLE = pa.table({"at": [NOON], "day": [NOON.date()], "clock": [NOON.time()], "click": [1]})
PART = "for a part of these times, or cast the column to integers"
SECONDS = "cast the column to integers, as seconds, for kind = 'numeric'"


@pytest.mark.parametrize(
    ("feature", "told"),
    [
        (girih.Categorical(name="at"), f"set transform = 'hour' or 'weekday' {PART}"),
        (girih.Numeric(name="at"), f"set transform = 'hour' or 'weekday' {PART}"),
        (girih.Categorical(name="day"), f"set transform = 'weekday' {PART}"),
        (girih.Numeric(name="day"), f"set transform = 'weekday' {PART}"),
        (girih.Sequence(name="at"), f"set transform = 'hour' or 'weekday' and kind = 'categorical' or 'numeric' {PART}"),
        (girih.Categorical(name="clock"), SECONDS),
        (girih.Numeric(name="clock"), SECONDS),
    ],
)  # fmt: skip
def test_the_error_says_what_is_meant(feature, told):
    with pytest.raises(DataError) as caught:
        girih.read_arrow(TABLE, girih.Schema([feature], "click"))
    kind = (
        "expected numbers; "
        if isinstance(feature, girih.Numeric)
        else "ids are integers or strings, or lists of them; "
    )
    assert str(caught.value) == (
        f"the Arrow table: column {feature.name!r} ({TABLE.schema.field(feature.name).type}) of feature {feature.name!r}: {kind}{told}"
    )


@pytest.mark.parametrize("transform", ["hour", "weekday"])
def test_what_it_says_is_read(transform):
    for kind in (girih.Categorical, girih.Numeric):
        schema = girih.Schema([kind(name="at", transform=transform)], "click")
        assert girih.read_arrow(TABLE, schema).num_examples == 1
