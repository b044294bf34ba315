"""Counts of rows and events, and the bytes that rows cost: in memory, on disk, and in memory once a file was loaded.

Columns have the names that they have in a snapshot; what has none there: ``neighbours`` (in the list of the
table), ``padding``, ``index`` and the like.
"""

from __future__ import annotations

from girih.kernels.cpu import layout
from girih.store.memory.arena import PAGE_BYTES, SLOT_BYTES
from girih.store.memory.shard_memory import index_bytes
from girih.store.snapshot.columns import columns_of
from girih.store.spec import Description
from girih.store.values import Values

_ROW_ALIGNMENT, _NEIGHBOURS, _PLACE = 8, 8, 8


def disk_bytes(description: Description) -> dict[str, int]:
    """Bytes of one row in a snapshot's file, by column; ``description`` is the file's."""
    return {column.name: column.num_bytes for column in columns_of(description)}


def row_bytes(description: Description) -> dict[str, int]:
    """Bytes of one row in memory, by column; with the index, all that a row takes.

    ``description`` is that of a store, a snapshot or its file.
    """
    columns = columns_of({**description, "linked": False})
    parts = {column.name: column.num_bytes for column in columns} | {"neighbours": _NEIGHBOURS}
    last = max(column.first_byte + column.num_bytes for column in columns)
    return {**parts, "padding": -(-last // _ROW_ALIGNMENT) * _ROW_ALIGNMENT - sum(parts.values())}


def tiered_row_bytes(description: Description) -> dict[str, int]:
    """Bytes of one row in the memory of a shard with tiers, by column, its values left out."""
    return {**row_bytes({**description, "segments": []}), "padding": 0, "place": _PLACE}


def loaded_bytes(description: Description, num_rows: int) -> dict[str, int]:
    """Bytes of ``num_rows`` rows in a store that has just loaded them, by part, Bloom filters left out."""
    rows = {name: size * num_rows for name, size in row_bytes(description).items()}
    return {"index": index_bytes(num_rows), **rows}


def held_bytes(values: Values) -> dict[str, dict[str, int]]:
    """Bytes ``used`` and ``reserved`` by part: all memory of a shard, but for what a call holds.

    Beside the columns of live rows: ``free_rows`` had a key and wait for another one; ``unfilled`` was claimed
    ahead of rows to come; ``next_index`` is what an index that grows has of its successor; ``header`` is whole
    pages of the header, the description and the tables' ends and counters; ``saving`` is what verbs keep while
    a save is under way (its reader has more); ``scratch`` is kept from call to call. Private memory is used
    once it was touched; that of Bloom filters counts as a whole. Where there are tiers, ``slots`` hold the values of
    hot rows and of those on their way, ``ssd_buffers`` what is written behind, and ``gpu_slots`` are in GPU memory.
    """
    memory, tiers = values.memory, values.tier_bytes()
    arena, arrays = memory.arena, memory.arrays
    row_size = 4 * arrays.meta.shape[1]
    of_row = (row_bytes if values.in_place else tiered_row_bytes)(values.layout.description)
    num_rows, rows_ever = memory.num_rows, int(arrays.state[layout.ROWS_EVER])
    committed = int(arrays.state[layout.ROWS_COMMITTED]) if arena.is_claimed_ahead else rows_ever
    most_rows = arena.reserve_rows - committed + num_rows
    pages = sum(-(-arena.size_bytes(r) // PAGE_BYTES) for r in ("header", "description", "tables"))
    saving = arrays.saving.nbytes + arrays.kept.nbytes + arrays.log.nbytes
    same = {
        "free_rows": row_size * (rows_ever - num_rows),
        "unfilled": row_size * (committed - rows_ever),
        "bloom": arena.size_bytes("cells"),
        "header": PAGE_BYTES * pages,
        "saving": 0 if memory.saving is None else saving,
        "scratch": values.rows.scratch_bytes,
    }
    used_slots = len(arrays.slots) - memory.num_returned_slots
    parts = {
        "index": (SLOT_BYTES * used_slots, arena.size_bytes("index 0")),
        "next_index": (SLOT_BYTES * memory.num_next_slots, arena.size_bytes("index 1")),
        **{part: (size, size) for part, size in same.items()},
        **{name: (size * num_rows, size * most_rows) for name, size in of_row.items()},
        **tiers,
    }
    return {part: {"used": used, "reserved": reserved} for part, (used, reserved) in parts.items()}
