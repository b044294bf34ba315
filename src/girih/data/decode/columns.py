"""Arrow columns to ids and numbers: one rule for all formats.

An integer is its own id. A string that is the canonical decimal spelling of an int64 is that integer;
any other string is the XXH64 of its bytes. So CSV, Parquet integers and Parquet strings agree.

Shapes: R rows of a column, M values in its lists.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.errors import DataError
from girih.kernels.cpu import strings, take

NULL_ID: Final = 3308892442114646408
"""The id of a missing value: XXH64 of ``girih.null``."""


class Numbers(NamedTuple):
    """A column of numbers: float[R] (0 where null), and bool[R] masks, None where nothing is set."""

    values: NDArray[Any]
    null: NDArray[np.bool_] | None
    unreadable: NDArray[np.bool_] | None


def kind_of(kind: Any) -> str:
    """The kind of a column's values, a word by which two files can be compared: ``integers``, ``lists of strings``…"""
    types = pa.types
    if types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        return f"lists of {kind_of(kind.value_type)}"
    if types.is_boolean(kind):
        return "booleans"
    if types.is_integer(kind):
        return "integers"
    if types.is_floating(kind):
        return "floats"
    if is_string(kind):
        return "strings"
    return "nulls" if types.is_null(kind) else str(kind)


def is_list(kind: Any) -> bool:
    """True for columns whose rows are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_string(kind: Any) -> bool:
    """True for columns of text or bytes."""
    types = pa.types
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_binary,
        types.is_large_binary,
        types.is_fixed_size_binary,
        types.is_string_view,
        types.is_binary_view,
    )
    return any(test(kind) for test in tests)


def flat(column: Any) -> Any:
    """The one array that a table's column consists of."""
    if isinstance(column, pa.ChunkedArray) and column.num_chunks == 1:
        return column.chunk(0)  # combine_chunks would copy it
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too large for 32-bit offsets: stays in chunks
        large = pa.large_list(array.type.value_type) if is_list(array.type) else pa.large_binary()
        array = array.cast(large).combine_chunks()
    return array


def null_mask(array: Any) -> NDArray[np.bool_] | None:
    """bool[R], or None where nothing is null."""
    if array.null_count == 0:
        return None
    mask: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def scalar_ids(array: Any, *, empty_is_null: bool) -> NDArray[np.int64]:
    """One id a row: int64[R]; null, and where told so the empty string, is :data:`NULL_ID`.

    Raises:
        DataError: a type that ids cannot be read from.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        words = np.append(scalar_ids(array.dictionary, empty_is_null=empty_is_null), np.int64(NULL_ID))
        indices = array.indices.fill_null(len(words) - 1) if array.indices.null_count else array.indices
        ids: NDArray[np.int64] = words[indices.to_numpy(zero_copy_only=False)]
        return ids
    if pa.types.is_null(kind):
        return np.full(len(array), NULL_ID, dtype=np.int64)
    null = null_mask(array)
    if is_string(kind):
        data, starts, ends = spans(array)
        ids = strings.ids_of_strings(data, starts, ends)
        if empty_is_null:
            ids[starts == ends] = NULL_ID
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        filled = array.fill_null(False if pa.types.is_boolean(kind) else 0) if null is not None else array
        ids = filled.to_numpy(zero_copy_only=False)
        ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)
        ids = ids.copy() if null is not None else ids
    else:
        raise DataError(f"column of type {kind} cannot hold ids")
    if null is not None:
        ids[null] = NULL_ID
    return ids


def list_ids(array: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A list column as int64[M] and offsets int64[R+1]; a null list is empty, a null element NULL_ID."""
    return scalar_ids(array.flatten(), empty_is_null=False), list_offsets(array)


def split(array: Any, separator: str) -> tuple[Any, NDArray[np.int64]]:
    """Splits R strings at a separator, leaving out empty pieces.

    Returns:
        M strings, and offsets int64[R+1] into them.
    """
    lists = pc.split_pattern(string_values(array), separator)
    pieces, offsets = lists.flatten(), list_offsets(lists)
    kept = pc.binary_length(pieces).to_numpy() > 0
    if not kept.all():
        pieces = pieces.filter(pa.array(kept))
        offsets = np.concatenate([[0], np.cumsum(kept)])[offsets]
    return pieces, offsets


def list_offsets(array: Any) -> NDArray[np.int64]:
    """Offsets int64[R+1] into ``array.flatten()``, which leaves out what lies under a null list."""
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def keep_last(
    values: NDArray[Any], offsets: NDArray[np.int64], max_length: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Shortens bags to their last ``max_length`` values: T[M], int64[R+1] to the same, shorter."""
    lengths = np.diff(offsets)
    if not lengths.size or lengths.max() <= max_length:
        return values, offsets
    short = np.zeros_like(offsets)
    np.cumsum(np.minimum(lengths, max_length), out=short[1:])
    kept = np.empty(short[-1], dtype=values.dtype)
    take.copy_tails(values, offsets, short, kept)
    return kept, short


def numbers(array: Any, *, from_strings: bool = False, keep_float32: bool = False) -> Numbers:
    """One number a row, as float64 (or float32 where the column is and may stay so).

    Strings are read as numbers only where told so, empty ones being null.

    Raises:
        DataError: a type that numbers cannot be read from.
    """
    array = _plain(array)
    kind = array.type
    if pa.types.is_null(kind):
        return Numbers(np.zeros(len(array)), np.ones(len(array), dtype=np.bool_), None)
    null = null_mask(array)
    if is_string(kind) and from_strings:
        values, empty, unreadable = string_numbers(array)
        null = empty if null is None else null | empty
        return Numbers(values, null if null.any() else None, unreadable)
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif kind_of(kind) not in ("integers", "floats", "booleans"):
        raise DataError(f"column of type {kind} cannot hold numbers")
    if null is not None:
        array = array.fill_null(False if pa.types.is_boolean(kind) else 0)
    values = array.to_numpy(zero_copy_only=False)
    if not (keep_float32 and values.dtype == np.float32):
        values = values.astype(np.float64, copy=False)
    return Numbers(values, null, None)


def string_numbers(
    words: Any,
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_] | None]:
    """Decimal numbers, correctly rounded; spaces around them do not count.

    Args:
        words: R strings, none of them null.

    Returns:
        float64[R], 0 where there is no number; bool[R] where a string is empty; bool[R] where it is anything
        else than a number, None if that is nowhere.
    """
    text = words.cast(pa.large_string(), safe=False)  # whatever is no UTF-8 is no number either
    for trim in (False, True):
        text = pc.ascii_trim(text, " \t\r") if trim else text
        empty = pc.binary_length(text).to_numpy() == 0
        filled = pc.if_else(pa.array(empty), "0", text) if empty.any() else text
        try:
            return filled.cast(pa.float64()).to_numpy(), empty, None
        except pa.ArrowInvalid:
            continue
    read = [_number(word) for word in filled.cast(pa.large_binary()).to_pylist()]
    return np.array([number or 0.0 for number in read]), empty, np.array([number is None for number in read])


def spans(array: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of a string column, and where each row starts and ends: uint8[·], int64[R], int64[R]."""
    types = pa.types
    if (
        types.is_fixed_size_binary(array.type)
        or types.is_string_view(array.type)
        or types.is_binary_view(array.type)
    ):
        array = array.cast(pa.large_binary())
    wide = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offset_bytes, data_bytes = array.buffers()
    if len(array) == 0 or offset_bytes is None:
        nothing = np.zeros(len(array), dtype=np.int64)
        return _read_only(np.zeros(0, dtype=np.uint8)), _read_only(nothing), _read_only(nothing)
    offsets = np.frombuffer(offset_bytes, dtype=np.int64 if wide else np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)
    data = np.zeros(0, np.uint8) if data_bytes is None else np.frombuffer(data_bytes, dtype=np.uint8)
    return _read_only(data), _read_only(offsets[:-1]), _read_only(offsets[1:])


def string_values(array: Any) -> Any:
    """A string column, dictionaries and views resolved, as an array of bytes."""
    return _plain(array).cast(pa.large_binary())


def _plain(array: Any) -> Any:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array = array.view()
    array.flags.writeable = False  # so that kernels are compiled once, not for either kind
    return array


def _number(word: bytes) -> float | None:
    try:
        return None if b"_" in word else float(word.decode("ascii"))
    except ValueError:
        return None
