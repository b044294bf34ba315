"""Tensors of requests and answers of the Open Inference Protocol: in JSON, or as bytes after the JSON.

Shapes: M values of a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.errors import DataError, nearest
from girih.kernels.cpu import strings
from girih.kernels.cpu.arrays import sealed

BYTES = "BYTES"
JsonValue = str | float | None
NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"), "UINT16": np.dtype("<u2"), "UINT32": np.dtype("<u4"), "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"), "INT16": np.dtype("<i2"), "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"), "FP32": np.dtype("<f4"), "FP64": np.dtype("<f8"),
}  # fmt: skip
_ARROW = {name: pa.from_numpy_dtype(dtype) for name, dtype in NUMPY.items()} | {BYTES: pa.large_string()}
_OF_JSON: dict[str, tuple[type, ...]] = {
    name: {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,)) for name, dtype in NUMPY.items()
} | {BYTES: (str,)}
"""The types of JSON values that a datatype accepts."""
INTEGERS = tuple(name for name, dtype in NUMPY.items() if dtype.kind in "iu")
_MOST_DIMS = 2
_MOST_SHOWN = 40
"""The number of characters of a value that an error shows."""


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """One tensor of a request.

    Attributes:
        shape: [n], or [n, L].
        values: M values, row by row, in a NumPy array. An Arrow array if there are strings or missing values.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | pa.Array

    @property
    def num_values(self) -> int:
        """The number of values, M."""
        return len(self.values)


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> RequestTensor:
    """Returns a tensor whose values are bytes: little-endian, or strings, each after its length.

    Raises:
        DataError: the number of bytes does not fit the tensor.
    """
    count = _num_values(name, shape)
    if datatype == BYTES:
        return RequestTensor(name, datatype, shape, _strings(name, count, data))
    dtype = _known(name, datatype)
    if len(data) != count * dtype.itemsize:
        raise DataError(
            f"input {name!r}: {len(data):,} bytes for {datatype}{list(shape)}; expected {count * dtype.itemsize:,}"
        )
    return RequestTensor(name, datatype, shape, np.frombuffer(data, dtype))


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: object) -> RequestTensor:
    """Returns a tensor whose values are a nested or flat list in JSON. A null is a missing value.

    Raises:
        DataError: the number of values does not fit the shape, or a value has another type.
    """
    count = _num_values(name, shape)
    if not isinstance(data, list):
        raise DataError(f"input {name!r}: data is not a list; expected {count:,} values")
    if len(shape) > 1 and data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            raise DataError(f"input {name!r}: data mixes values and lists; expected only one kind")
        if len(data) != shape[0] or any(len(row) != shape[1] for row in data):
            raise DataError(
                f"input {name!r}: data has lists of other lengths than a shape of {list(shape)}; expected {shape[0]:,} lists of {shape[1]:,}"
            )
        data = list(chain.from_iterable(data))
    if len(data) != count:
        raise DataError(
            f"input {name!r}: {len(data):,} values for a shape of {list(shape)}; expected {count:,}"
        )
    if datatype != BYTES:
        _known(name, datatype)
        if not {*map(type, data)} <= {*_OF_JSON[datatype], type(None)}:  # Arrow makes 1 of true, and 0 of 0.5
            raise _refused(name, datatype, data)
    floats = datatype.startswith("FP")
    try:
        values = pa.array(data, _ARROW[datatype])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        if not floats or not all(map(partial(_fits, datatype), data)):
            raise _refused(name, datatype, data) from None
        values = _floats(datatype, data)
    if floats and not all(map(partial(_fits, datatype), _infinite(values, data))):
        raise _refused(name, datatype, data)
    plain = datatype != BYTES and values.null_count == 0 and datatype != "BOOL"
    return RequestTensor(name, datatype, shape, values.to_numpy() if plain else values)


def _infinite(values: pa.Array, data: Sequence[JsonValue]) -> list[JsonValue]:
    """Returns the values in JSON that became infinite, because some numbers are too large."""
    numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)  # null becomes NaN
    return [data[place] for place in np.flatnonzero(np.isinf(numbers)).tolist()]


def _floats(datatype: str, data: Sequence[float | None]) -> pa.Array:
    """Converts numbers that Arrow does not take: integers beyond int64, and half floats in its earlier versions."""
    missing = np.array([value is None for value in data], np.bool_)
    numbers = [0.0 if value is None else float(value) for value in data]
    return pa.array(np.array(numbers, NUMPY[datatype]), mask=missing)


def _fits(datatype: str, value: JsonValue) -> bool:
    """Returns whether a JSON value fits a datatype. Null fits all."""
    if value is None:
        return True
    if type(value) not in _OF_JSON[datatype]:
        return False
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    if datatype == "BOOL":
        return True
    if NUMPY[datatype].kind in "iu":
        bounds = np.iinfo(NUMPY[datatype])
        return bool(bounds.min <= value <= bounds.max)
    is_finite = isinstance(value, int) or math.isfinite(value)
    return bool(not is_finite or abs(value) <= float(np.finfo(NUMPY[datatype]).max))


def _refused(name: str, datatype: str, data: Sequence[JsonValue]) -> DataError:
    """Returns an error for the first value of another type or out of range. The error shows the value as JSON."""
    expected = f"expected values of {datatype}, {_described(datatype)}"
    for place, value in enumerate(data):
        if not _fits(datatype, value):
            return DataError(f"input {name!r}: value {place} is {preview(value)}; {expected}")
    return DataError(f"input {name!r}: data of several types; {expected}")


def preview(value: object) -> str:
    """Returns the beginning of a JSON value as text, for errors. The rest is never written, however long it is."""
    beginning = value[:_MOST_SHOWN] if isinstance(value, str) else value
    pieces = islice(json.JSONEncoder().iterencode(beginning), _MOST_SHOWN)  # produced one by one, on demand
    return "".join(pieces)[:_MOST_SHOWN]


def datatype_of(kind: pa.DataType) -> str:
    """Returns the datatype for the Arrow type of a request's column, with its lists if it has any."""
    if pa.types.is_large_list(kind):
        return f"lists of {datatype_of(kind.value_type)}"
    return next((name for name, arrow in _ARROW.items() if arrow == kind), BYTES)


def _described(datatype: str) -> str:
    if datatype in (BYTES, "BOOL"):
        return "Unicode strings" if datatype == BYTES else "true and false"
    if NUMPY[datatype].kind in "iu":
        bounds = np.iinfo(NUMPY[datatype])
        return f"integers from {bounds.min} to {bounds.max}"
    return f"numbers up to {float(np.finfo(NUMPY[datatype]).max):.3g}"


def shape_of(name: str, sizes: object) -> tuple[int, ...]:
    """Returns the shape of a tensor from JSON.

    Raises:
        DataError: there is no shape, or it has more than two dims.
    """
    dims = sizes if isinstance(sizes, list) else []
    if not 1 <= len(dims) <= _MOST_DIMS or not all(type(size) is int and size >= 0 for size in dims):
        raise DataError(f"input {name!r}: shape = {preview(sizes)}; expected [n], or [n, length]")
    return tuple(dims)


def _known(name: str, datatype: str) -> np.dtype[np.generic]:
    if not isinstance(datatype, str):
        raise DataError(f"input {name!r}: datatype = {preview(datatype)}; expected a string, as 'INT64'")
    if datatype not in NUMPY:
        told = datatype[:_MOST_SHOWN]
        raise DataError(f"input {name!r}: datatype = {told!r}{nearest(told, _ARROW)}")
    return NUMPY[datatype]


def _num_values(name: str, shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    if max(count, *shape) > np.iinfo(np.int32).max:
        raise DataError(f"input {name!r}: a shape of {list(shape)} has too many values; send fewer")
    return count


def _strings(name: str, count: int, data: memoryview) -> pa.Array:
    """Returns strings, each after its length as uint32, as an Arrow array."""
    offsets = np.zeros(count + 1, np.int64)
    text = np.empty(max(0, len(data) - 4 * count), np.uint8)
    taken = strings.unpack(sealed(np.frombuffer(data, np.uint8)), offsets, text)
    if taken != len(data):
        raise DataError(
            f"input {name!r}: {len(data):,} bytes are not {count:,} strings, each after its length of 4 bytes"
        )
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def to_bytes(values: NDArray[np.float32]) -> bytes:
    """Returns the values of an output as bytes."""
    return np.ascontiguousarray(values, "<f4").tobytes()
