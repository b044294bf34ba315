"""Times in columns: Arrow times, numbers since 1970, and ISO 8601 text.

A time without a zone is taken unchanged. A time of an Arrow type with a zone is in this zone. Text with an offset is
converted to UTC.

Shapes: R rows.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.data.decode import columns
from girih.errors import DataError
from girih.kernels.cpu.arrays import F64, I64, Bools

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
LATEST_S = 7_258_118_400  # 2200: later times were counted in another unit
_EARLIEST_S, _LAST_S = 631_152_000, 4_102_444_800  # 1990 and 2100
YEAR_S = 31_557_600
_DAY_S = 86_400
_THURSDAY = 3  # 1970-01-01 was a Thursday; Monday is 0
_US = pa.timestamp("us")
Part = Literal["hour", "weekday"]
Order = Literal["number", "time"]


def part_of_time(array: pa.Array, part: Part, unit: str) -> tuple[I64, Bools | None, Bools]:
    """Returns the hour, 0 to 23, or the weekday, 0 (Monday) to 6, of times.

    Args:
        unit: the unit of numbers, which count from 1970.

    Returns:
        int64[R]; bool[R] that marks missing values, or None if there are none; bool[R] that marks valid times and missing
        values.
    """
    array = columns.plain(array)
    if is_time(array.type):
        found = pc.hour(array) if part == "hour" else pc.day_of_week(array)
        null = columns.null_mask(array)
        return found.fill_null(0).to_numpy(zero_copy_only=False), null, np.ones(len(array), np.bool_)
    values, null = columns.numbers(array)
    seconds = values / PER_SECOND[unit]
    if (
        columns.is_string(array.type)
        and (rest := np.isnan(values) if null is None else np.isnan(values) & ~null).any()
    ):
        found, read = text_times(array.filter(pa.array(rest)))
        seconds[rest] = np.where(read, found / PER_SECOND["us"], np.nan)
    good = np.abs(seconds) < LATEST_S
    whole = np.floor(np.where(good, seconds, 0.0)).astype(np.int64)
    out = whole // 3600 % 24 if part == "hour" else (whole // _DAY_S + _THURSDAY) % 7
    return out, null, good if null is None else good | null


def ordinals(array: pa.Array, column: str, order: Order | None = None) -> tuple[NDArray[Any], Order]:
    """Returns numbers that sort the rows: int64[R] or float64[R] for numbers, int64[R] microseconds for times.

    Args:
        order: how to read text. None: as numbers if all texts are numbers, else as times.

    Raises:
        DataError: a value is missing, or is neither a number nor a time.
    """
    array = columns.plain(array)
    if is_time(array.type):
        values = array.cast(_US, safe=False).fill_null(0).cast(pa.int64()).to_numpy()
        return _whole(values, columns.null_mask(array), column), "time"
    if columns.kind_of(array.type) == "integers":
        null = columns.null_mask(array)
        return _whole(array.fill_null(0).cast(pa.int64()).to_numpy(), null, column), "number"
    if order != "time":
        values, null = columns.numbers(array)
        missing = np.isnan(values)
        others = missing if null is None else missing & ~null
        if not others.any() or order == "number" or not columns.is_string(array.type):
            return _whole(values, missing, column), "number"
    found, read = text_times(array)
    null = columns.null_mask(array)
    return _whole(found, ~read if null is None else ~read | null, column), "time"


def order_of(kind: pa.DataType) -> Order | None:
    """Returns the order of an Arrow type's values. Returns None for text, which may have either order."""
    if columns.is_string(kind):
        return None
    return "time" if is_time(kind) else "number"


def is_time(kind: pa.DataType) -> bool:
    """Returns whether a type is a timestamp or a date."""
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def moment(text: str, kind: pa.DataType) -> pa.Scalar | None:
    """Parses a time in text as a scalar of an Arrow type. Returns None if the text is not a time.

    If the type has a zone, text without an offset is UTC.
    """
    try:
        if getattr(kind, "tz", None) is None:
            return pa.scalar(text).cast(kind)
        found = datetime.datetime.fromisoformat(text)
        found = found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
        return pa.scalar(found, pa.timestamp("us", "UTC")).cast(kind)
    except (pa.ArrowException, ValueError):
        return None


def doubt(array: pa.Array, unit: str | None = None) -> str | None:
    """Returns the reason why the times of a column are implausible, or None.

    Args:
        unit: the unit of numbers. None stands for any unit in which one of the numbers is a time from 1990 to 2100.
    """
    array = columns.plain(array)
    if is_time(array.type):
        seconds = array.cast(_US, safe=False).drop_null().cast(pa.int64()).to_numpy() / PER_SECOND["us"]
    else:
        numbers, _ = columns.numbers(array)
        numbers = numbers[np.isfinite(numbers)]
        fit = {each: _plausible(numbers / per) for each, per in PER_SECOND.items()}
        units = [each for each, good in fit.items() if good.any()]
        if len(units) > 1:
            return f"times seem to count in {' and in '.join(units)}: mixed units"
        if unit is None and not units:
            return None
        seconds = numbers / PER_SECOND[unit or units[0]]
    if not len(seconds):
        return None
    if seconds.min() == seconds.max():
        return "all times are equal"
    if _plausible(seconds).all():
        return None
    low, high = (1970 + second / YEAR_S for second in (seconds.min(), seconds.max()))
    return f"years go from {low:.0f} to {high:.0f}, expected 1990 to 2099"


def _plausible(seconds: F64) -> Bools:
    return (seconds >= _EARLIEST_S) & (seconds < _LAST_S)


def text_times(words: pa.Array) -> tuple[I64, Bools]:
    """Parses ISO 8601 text. Returns microseconds since 1970, int64[R], and bool[R], True for valid or null text."""
    text = words.cast(pa.string(), safe=False)
    try:
        return text.cast(_US).fill_null(0).cast(pa.int64()).to_numpy(), np.ones(len(text), np.bool_)
    except pa.ArrowInvalid:  # some text has an offset, or is not a time
        found = [0 if word is None else _microseconds(word) for word in text.cast(pa.binary()).to_pylist()]
    read = np.array([each is not None for each in found], np.bool_)
    return np.array([each or 0 for each in found], np.int64), read


def _microseconds(word: bytes) -> int | None:
    try:
        time = datetime.datetime.fromisoformat(word.decode("ascii").strip().removesuffix(" UTC"))
    except ValueError:
        return None
    time = time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
    return (time - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(microseconds=1)


def _whole(values: NDArray[Any], missing: Bools | None, column: str) -> NDArray[Any]:
    if missing is not None and missing.any():
        number = int(np.count_nonzero(missing))
        raise DataError(
            f"column {column!r}: {number:,} of {len(values):,} rows read together have no number or time, but data.split needs one in"
            f' each; add where = "{column} is not null", or fix them'
        )
    return values
