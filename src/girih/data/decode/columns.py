"""Turns Arrow columns into ids and numbers, by one rule for all formats.

An integer is its own id. If a string is the canonical decimal spelling of an int64, this integer is its id. The id of
any other string is the XXH64 of its bytes. So CSV, Parquet integers and Parquet strings give equal ids.

Shapes: R rows of a column, M values in its lists.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from girih.config.options import Options
from girih.data.batch import NULL_ID, offsets_of
from girih.errors import ConfigError
from girih.kernels.cpu import strings, take
from girih.kernels.cpu.arrays import F64, I64, U8, Bools, sealed


def table_without_views(table: pa.Table) -> pa.Table:
    """Returns a table without view types. Columns without views stay unchanged."""
    for place, column in enumerate(table.columns):
        found = without_views(column)
        if found is not column:
            table = table.set_column(place, table.column_names[place], found)
    return table


def without_views(array: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Casts view types to plain types in an array or chunked array, also inside lists, structs and dictionaries."""
    kind = _plain(array.type)
    if kind == array.type:
        return array
    if not pa.types.is_dictionary(kind):
        return array.cast(kind)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([_dictionary(chunk, kind) for chunk in array.chunks], kind)
    return _dictionary(array, kind)


def _dictionary(array: pa.DictionaryArray, kind: pa.DataType) -> pa.DictionaryArray:
    values = array.dictionary.cast(kind.value_type)
    return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)


def _plain(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _plain(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct([each.with_type(_plain(each.type)) for each in fields])
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)), kind.list_size)
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain(kind.value_type)))
    if types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain(kind.value_type)))
    return kind


_NEGATIVE = r"^\s*(?:([^\d()]*)\(([^()]*)\)|−([^−]*)|([^-]*)-)\s*$"
_SPELLED = r"^[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$"
_BLANKS = r"[\s\x{a0}\x{202f}]*"


class Notation(Options):
    """The spelling of numbers in text files.

    Attributes:
        decimal: the mark before the fraction. thousands: the mark between groups of digits.
        units: texts before or after a number that are ignored, such as ``%``, ``$`` and ``€``; 50 % is the number 50.
    """

    decimal: str = "."
    thousands: str | None = None
    units: tuple[str, ...] = ()

    def _check(self) -> None:
        for name, mark in (
            ("decimal", self.decimal),
            ("thousands", " " if self.thousands is None else self.thousands),
        ):
            if len(mark) != 1 or mark.isalnum() or mark in "+-\n":
                raise ConfigError(f"{name} = {mark!r}: expected one character, such as '.' or ','")
        if self.decimal == self.thousands:
            raise ConfigError(f"decimal and thousands are both {self.decimal!r}; expected different ones")
        for unit in self.units:
            if not unit.strip() or any(mark.isdigit() for mark in unit):
                raise ConfigError(f"units: {unit!r}: expected texts without digits, as '%', '$' or 'EUR'")

    def plain(self, words: pa.Array) -> pa.Array:
        """Rewrites numbers in text as ``1234.56``. Other text becomes ``?``, and null or blank text becomes null."""
        mark = re.escape(self.thousands or "")
        groups = rf"|[1-9]\d{{0,2}}(?:{mark}\d{{2,3}})*{mark}\d{{3}}" if mark else ""
        units = f"(?:{'|'.join(map(re.escape, self.units))})?{_BLANKS}" if self.units else ""
        read = pc.extract_regex(
            pc.replace_substring_regex(words, _NEGATIVE, r"-\1\2\3\4"),
            rf"^{_BLANKS}(?P<a>[-+]?){_BLANKS}{units}(?P<b>[-+]?)(?P<whole>\d+{groups}|)"
            rf"(?P<part>(?:{re.escape(self.decimal)}\d*)?)(?P<power>(?:[eE][-+]?\d+)?){_BLANKS}{units}$",
        )
        fields = {name: pc.struct_field(read, name) for name in ("a", "b", "whole", "part", "power")}
        if self.thousands:
            fields["whole"] = pc.replace_substring(fields["whole"], self.thousands, "")
        fields["part"] = pc.replace_substring(fields["part"], self.decimal, ".")
        text = pc.binary_join_element_wise(*fields.values(), pa.scalar("", words.type))
        text = pc.if_else(pc.fill_null(pc.match_substring_regex(text, _SPELLED), False), text, "?")
        return pc.if_else(pc.fill_null(pc.match_substring_regex(words, rf"^{_BLANKS}$"), True), None, text)


NULL_WORDS: Final = (
    "\\N", "NULL", "null", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "None", "<NA>", "(null)", "nil", "?", "-", "--",
)  # fmt: skip
"""Texts that often mean a missing value. Guesses and hints in errors use them; reading does not."""
_TEXT: Final = {pa.string().id, pa.large_string().id, pa.string_view().id}
_BLANK = ord(" ")
_BYTES: Final = {pa.binary().id, pa.large_binary().id, pa.binary_view().id, pa.binary(1).id}


def kind_of(kind: pa.DataType) -> str:
    """Names the kind of a column's values, for comparing two files: ``integers``, ``lists of strings``…"""
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


def is_number(word: str) -> bool:
    """Returns whether a result of :func:`kind_of` names a kind of numbers."""
    return word in ("integers", "floats", "booleans", "nulls") or word.startswith("decimal")


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the Arrow type of a column's values, with or without a dictionary."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def is_list(kind: pa.DataType) -> bool:
    """Returns whether the rows of a column are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_string(kind: pa.DataType) -> bool:
    """Returns whether a column holds text or bytes."""
    return kind.id in _TEXT | _BYTES


def is_bytes(kind: pa.DataType) -> bool:
    """Returns whether a column holds bytes, which are not necessarily text."""
    return kind.id in _BYTES


def flat(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column as a single array."""
    if column.num_chunks == 1:
        return column.chunk(0)  # combine_chunks would copy it
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # too large for 32-bit offsets, so it stays in chunks
        large = pa.large_list(array.type.value_type) if is_list(array.type) else pa.large_binary()
        array = array.cast(large).combine_chunks()
    return array


def null_mask(array: pa.Array) -> Bools | None:
    """Returns bool[R], or None if no value is null."""
    if array.null_count == 0:
        return None
    mask: Bools = array.is_null().to_numpy(zero_copy_only=False)
    return mask


def without_texts(array: pa.Array, texts: tuple[str, ...]) -> pa.Array:
    """Replaces the given texts in a column of strings by null. Returns any other column unchanged."""
    if pa.types.is_dictionary(array.type):
        words = without_texts(array.dictionary, texts)
        return array if words is array.dictionary else pa.DictionaryArray.from_arrays(array.indices, words)
    if not is_string(array.type):
        return array
    array = without_views(array)
    among = pc.is_in(
        array, value_set=pa.array([text.encode() for text in texts], pa.binary()).cast(array.type)
    )
    return pc.if_else(among, pa.scalar(None, array.type), array) if pc.any(among).as_py() else array


def scalar_ids(array: pa.Array) -> tuple[I64, Bools | None]:
    """Returns one id per row of strings, integers or booleans. Null becomes :data:`NULL_ID`.

    Returns:
        int64[R], and bool[R] that marks strings that spell a whole number as a float; None unless the column is plain
        strings.
    """
    kind, floats = array.type, None
    if pa.types.is_dictionary(kind):
        words = np.append(scalar_ids(array.dictionary)[0], np.int64(NULL_ID))
        indices = array.indices.fill_null(len(words) - 1) if array.indices.null_count else array.indices
        return words[indices.to_numpy(zero_copy_only=False)], None
    if pa.types.is_null(kind):
        return np.full(len(array), NULL_ID, dtype=np.int64), None
    null = null_mask(array)
    if is_string(kind):
        ids, floats = strings.ids_of_strings(*spans(array))
    else:
        array = array.cast(pa.int8()) if pa.types.is_boolean(kind) else array
        array = array if null is None else array.fill_null(0)
        ids = array.to_numpy()
        ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)
    return ids if null is None else np.where(null, NULL_ID, ids), floats


def pieces(array: pa.Array, separator: str | None) -> tuple[pa.Array, I64 | None]:
    """Returns the values of R bags.

    The column holds lists, or strings that are split at a separator. Pieces of strings are trimmed, and empty pieces
    are dropped.

    Returns:
        M values, and offsets int64[R+1] into them, or None if each row is one value. A null row is an empty bag.
    """
    if not separator:
        return (array.flatten(), list_offsets(array)) if is_list(array.type) else (array, None)
    lists = pc.split_pattern(string_values(array), separator)
    words, offsets = lists.flatten(), list_offsets(lists)
    data, starts, ends = spans(words)
    if separator.strip() and len(starts) and (data[starts[0] : ends[-1]] == _BLANK).any():
        words = trimmed(words)
    kept = pc.binary_length(words).to_numpy() > 0
    if not kept.all():
        words = words.filter(pa.array(kept))
        offsets = offsets_of(kept)[offsets]
    return words, offsets


def trimmed(words: pa.Array) -> pa.Array:
    """Returns strings as bytes, without surrounding blanks."""
    return pc.ascii_trim_whitespace(words.cast(pa.large_string(), safe=False)).cast(pa.large_binary())


def list_offsets(array: pa.Array) -> I64:
    """Returns offsets int64[R+1] into ``array.flatten()``, which skips the values under a null list."""
    return offsets_of(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False))


def keep_last(values: NDArray[Any], offsets: I64, max_length: int) -> tuple[NDArray[Any], I64]:
    """Shortens bags to their last ``max_length`` values. Returns T[M] and int64[R+1], both shortened."""
    lengths = np.diff(offsets)
    if not lengths.size or lengths.max() <= max_length:
        return values, offsets
    short = offsets_of(np.minimum(lengths, max_length))
    kept = np.empty(short[-1], dtype=values.dtype)
    take.copy_tails(sealed(values), sealed(offsets), sealed(short), kept)
    return kept, short


def numbers(
    array: pa.Array, notation: Notation | None = None, *, keep_float32: bool = False
) -> tuple[NDArray[Any], Bools | None]:
    """Returns one number per row, as float64, or as float32 if the column is float32 and ``keep_float32`` is set.

    Strings are parsed, with the notation if there is one.

    Returns:
        float[R], NaN if there is no number, and bool[R] that marks missing values, or None if no value is missing.
    """
    array = plain(array)
    kind = array.type
    if is_string(kind):
        return string_numbers(array, notation)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):  # booleans, decimals, nulls
        array = array.cast(pa.float64())
    values = array.to_numpy(zero_copy_only=False)
    if not (keep_float32 and values.dtype == np.float32):
        values = values.astype(np.float64, copy=False)
    return values, null_mask(array)


def string_numbers(words: pa.Array, notation: Notation | None = None) -> tuple[F64, Bools | None]:
    """Parses R strings as decimal numbers, correctly rounded. Spaces around a number are ignored.

    Returns:
        float64[R], NaN if there is no number, and bool[R] that marks null or blank strings, or None if there are none.
    """
    text = words.cast(pa.large_string(), safe=False)  # text that is not valid UTF-8 is not a number either
    text = text if notation is None else notation.plain(text)
    for trim in (False, True):
        if trim:
            text = pc.ascii_trim(text, " \t\r")
            text = pc.if_else(pc.equal(text, ""), None, text)
        try:
            return text.cast(pa.float64()).to_numpy(zero_copy_only=False), null_mask(text)
        except pa.ArrowInvalid:
            continue
    read = [number_of(word) for word in text.cast(pa.large_binary()).to_pylist()]
    return np.array(read, dtype=np.float64), null_mask(text)


def spans(array: pa.Array) -> tuple[U8, I64, I64]:
    """Returns the bytes of a string column, and the start and end of each row: uint8[·], int64[R], int64[R]."""
    array = array.cast(pa.large_binary())
    _, offset_bytes, data_bytes = array.buffers()
    offsets = np.zeros(1, dtype=np.int64)
    if len(array):
        offsets = np.frombuffer(offset_bytes, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    data = np.frombuffer(data_bytes or b"", dtype=np.uint8)
    return sealed(data), sealed(offsets[:-1]), sealed(offsets[1:])


def string_values(array: pa.Array) -> pa.Array:
    """Returns a string column as an array of bytes, with dictionaries and views resolved."""
    return plain(array).cast(pa.large_binary())


def plain(array: pa.Array) -> pa.Array:
    """Returns a column with its dictionary resolved."""
    return without_views(array).dictionary_decode() if pa.types.is_dictionary(array.type) else array


def number_of(word: bytes | None) -> float | None:
    """Parses a word without spaces as a number. Returns None if the word is not a number."""
    try:
        return None if word is None or b"_" in word else float(word.decode("ascii"))
    except ValueError:
        return None
