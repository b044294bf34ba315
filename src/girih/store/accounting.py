"""What rows cost, byte by byte: in memory, on disk, and in memory once a file was loaded.

Sizes are bytes. Columns have the names that they have in a snapshot; what has none there: ``neighbours`` (in
the list of the table), ``padding``, ``index`` and the like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.store.memory.shard_memory import index_bytes
from girih.store.snapshot.columns import link_tensors, row_tensors

_WORD, _ROW_ALIGNMENT = 4, 8
_NEIGHBOURS = 8


def disk_bytes(description: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one row in a snapshot's file, by column; ``description`` is the file's."""
    tensors = row_tensors(description, 1) + link_tensors(description, 1)
    return {tensor.name: tensor.num_bytes for tensor in tensors}


def row_bytes(description: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one row in memory, by column; with the index, all that a row takes.

    ``description`` is that of a store, a snapshot or its file.
    """
    columns = {tensor.name: tensor.num_bytes for tensor in row_tensors(description, 1)}
    parts = {**columns, "neighbours": _NEIGHBOURS}
    weights = sum(columns[segment["name"]] for segment in description["segments"])
    padding = -weights % _WORD
    return {**parts, "padding": padding + -(sum(parts.values()) + padding) % _ROW_ALIGNMENT}


def loaded_bytes(description: Mapping[str, Any], num_rows: int) -> dict[str, int]:
    """Bytes of so many rows in a store that has just loaded them, by part, Bloom filters left out."""
    rows = {name: size * num_rows for name, size in row_bytes(description).items()}
    return {"index": index_bytes(num_rows), **rows}
