"""String views, as Polars has them, as plain strings: Arrow chooses no rows of views, and resolves no dictionaries of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def table_without_views(table: Any) -> Any:
    """A table without views in its columns; those that have none stay as they are."""
    for place, column in enumerate(table.columns):
        found = without_views(column)
        if found is not column:
            table = table.set_column(place, table.column_names[place], found)
    return table


def without_views(array: Any) -> Any:
    """An array, or one in chunks, without views in it, or in the lists, structs and dictionaries that it holds."""
    kind = _plain(array.type)
    if kind == array.type:
        return array
    if not pa.types.is_dictionary(kind):
        return array.cast(kind)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([_dictionary(chunk, kind) for chunk in array.chunks], kind)
    return _dictionary(array, kind)


def _dictionary(array: Any, kind: Any) -> Any:
    values = array.dictionary.cast(kind.value_type)
    return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)


def _plain(kind: Any) -> Any:
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
