"""Counts of rows and events, and the bytes that rows take in memory and on disk.

Columns have the same names as in a snapshot. Some parts of memory are not in snapshots, for example ``neighbours``
(the links of a table's list), ``padding`` and ``index``.
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
    """Bytes of one row in a snapshot's file, by column. ``description`` is the description in the file."""
    return {column.name: column.num_bytes for column in columns_of(description)}


def row_bytes(description: Description) -> dict[str, int]:
    """Bytes of one row in memory, by column. The index is the only other memory of a row.

    ``description`` comes from a store, a snapshot or a file.
    """
    columns = columns_of({**description, "linked": False})
    parts = {column.name: column.num_bytes for column in columns} | {"neighbours": _NEIGHBOURS}
    last = max(column.first_byte + column.num_bytes for column in columns)
    return {**parts, "padding": -(-last // _ROW_ALIGNMENT) * _ROW_ALIGNMENT - sum(parts.values())}


def tiered_row_bytes(description: Description) -> dict[str, int]:
    """Bytes of one row in the memory of a shard with tiers, by column, without its values."""
    return {**row_bytes({**description, "segments": []}), "padding": 0, "place": _PLACE}


def loaded_bytes(description: Description, num_rows: int) -> dict[str, int]:
    """Bytes of ``num_rows`` rows in a store that has just loaded them, by part, without Bloom filters."""
    rows = {name: size * num_rows for name, size in row_bytes(description).items()}
    return {"index": index_bytes(num_rows), **rows}


def held_bytes(values: Values) -> dict[str, dict[str, int]]:
    """Bytes ``used`` and ``reserved`` of each part of a shard's memory, without the memory of running calls.

    The parts are the columns of live rows, and:

    - ``free_rows``: rows that lost their key and wait for another key.
    - ``unfilled``: memory claimed for future rows.
    - ``next_index``: the part of the larger index that exists already, while the index grows.
    - ``header``: whole pages of the header, the description, and the ends and counters of tables.
    - ``saving``: old records that verbs keep during a save, without the memory of the save's reader.
    - ``scratch``: memory kept between calls.
    - With tiers: ``slots`` hold the values of hot rows and of rows in transit. ``ssd_buffers`` hold data that waits
      to be written. ``gpu_slots`` are in GPU memory.

    Private memory counts as used after its first access. All memory of Bloom filters counts as used.
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
