"""The layout of a shard: its arrays, their columns, and the rules of its tables.

Shapes: R reserved rows, C slots of the index (a power of two), T tables, S segments, W columns of a row that training
sees. V is the number of 32-bit words of a row: meta, embedding columns and optimizer state, rounded up to an even
number. All words of a row are adjacent, because a random access costs a page walk, not only a cache line.

Kernels import this module as ``at``: ``shard.meta[row, at.COUNT]``.
"""

from __future__ import annotations

from typing import NamedTuple

from girih.kernels.cpu.arrays import F64, I64, U8, U16, U64, F32x2, F64x3, I32x2, I64x2, U8x2, U16x2, U64x2

# Columns of ``meta``. Columns 0 and 1 are the two words of the id. In ``keys`` they are one word.
TABLE, LAST_USED, COUNT, VERSION, NEWER, OLDER = 2, 3, 4, 5, 6, 7
META_COLUMNS = 8
VALUES = META_COLUMNS  # the first word of a row after its meta
NO_ROW = -1

# Entries of ``state``.
NUM_ROWS, ROWS_EVER, FREE_ROW, LAST_STEP, INDEX_SIDE, INDEX_SLOTS, ROWS_COMMITTED = range(7)
INDEX_SHIFT, GROWING, GROW_START, GROW_MOVED, GROW_CLAIMED = range(7, 12)  # see ``index``
AMID = 12  # see ``note`` in ``rows``
CLOCK = 13  # shared memory: seconds of its clock minus the monotonic clock
STATE_WORDS = 16
TAG_BITS = 31

# Entries of ``saving`` (see the module ``saving``). Records below SAVED were copied. Rows from SAVE_ROWS on and pages
# from SAVE_PAGES on are not part of the save. All entries are 0 without a save. The entries from HEADS on are the log's
# last record of each chunk.
SAVED, SAVE_ROWS, SAVE_PAGES, FIRST_PAGE, CHUNK_BITS, NUM_KEPT, LOST, HEADS = range(8)

# The first entry of ``left``: the number of keys that follow, and 1 if there was no room for a key.
NUM_LEFT, LEFT_LOST = 0, 1

# Columns of ``tables``: the ends of the list, the number of rows, and counters.
NEWEST, OLDEST, TABLE_ROWS = 0, 1, 2
LOOKUPS, HITS, NEW, REFUSED, FULL, EVICTED, EXPIRED, UPDATES, DROPPED = range(3, 12)
TABLE_COLUMNS = 16
COUNTERS = {
    "lookups": LOOKUPS,
    "hits": HITS,
    "new": NEW,
    "refused": REFUSED,
    "full": FULL,
    "evicted": EVICTED,
    "expired": EXPIRED,
    "updates": UPDATES,
    "dropped": DROPPED,
}

# Columns of ``rules``.
ADMISSION, MIN_COUNT, EVICTION, MAX_ROWS, TTL, IN_SECONDS = range(6)
RULE_COLUMNS = 8
ADMIT_ALL, ADMIT_MIN_COUNT, ADMIT_PROBABILITY = 0, 1, 2
EVICT_NONE, EVICT_LRU, EVICT_LFU, EVICT_TTL = 0, 1, 2, 3
UNLIMITED = 1 << 62

# Columns of ``bloom``: a table's cells in this shard (see ``admission``).
CELLS_START, FIRST_BLOCK, NUM_BLOCKS, TOTAL_BLOCKS, BLOCK_CELLS = range(5)
BLOOM_COLUMNS = 5

# Columns of ``segments``.
FIRST_COLUMN, DIM, STATE_START, STATE_WIDTH, OPTIMIZER = range(5)
SEGMENT_COLUMNS = 5

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
INIT_ZEROS, INIT_CONSTANT, INIT_UNIFORM, INIT_NORMAL = 0, 1, 2, 3


class Shard(NamedTuple):
    """The arrays that kernels change. All are views of one arena.

    Attributes:
        slots: int64[C], the index: ``tag << 32 | row + 1``, or 0 in a free slot, so that new memory is an empty index.
        next_slots: int64[2C] while the index grows, else of length 0.
        meta: int32[R, V]: id (two words), table (-1 if the row is free), last use, count, version, and the row's
            neighbours in the table's list. A free row has the number of the next free row in ``OLDER``.
        keys: int64[R, V/2], a view of the same memory. Column 0 is the id.
        values: float32[R, V], a view of the same memory. The embedding columns begin at :data:`VALUES`. Then follows
            the state of each segment's optimizer.
        halves: uint16[R, 2V], a view of the same memory, for the embedding columns of 16-bit tables.
        state: int64[16], numbers of the whole shard.
        tables: int64[T, 16], list ends and counters of each table.
        cells: uint8[·], the counting Bloom filters of all tables.
        scratch: float32[2, W], for the columns of the current row, and for its gradient.
        scratch_halves: uint16[W].
        saving: int64[·], the progress of a save. kept: uint8[·], one bit for each record that the log has or had.
        log: int32[L, 2 + V], the records of the log. ``log_bytes`` is the same memory as uint8.
        changed: uint8[·], one bit for each row that changed since recording began (see ``changes``).
        left: int64[1 + N, 2]. The first row has the number of keys whose rows left since recording began. The following
            rows have their (id, table).
    """

    slots: I64
    next_slots: I64
    meta: I32x2
    keys: I64x2
    values: F32x2
    halves: U16x2
    state: I64
    tables: I64x2
    cells: U8
    scratch: F32x2
    scratch_halves: U16
    saving: I64
    kept: U8
    log: I32x2
    log_bytes: U8x2
    changed: U8
    left: I64x2


class Layout(NamedTuple):
    """The arrays that do not change during the life of a store.

    Attributes:
        dtype: FLOAT32, BFLOAT16 or FLOAT16: the dtype of embedding columns.
        segments: int64[S, 5]: first column, dim, first word and width of the state, optimizer.
        rules: int64[T, 8]: admission and eviction.
        chance: float64[T], the probability of admission.
        bloom: int64[T, 5], the position of each table's filter.
        table_seeds: uint64[T], for random rounding and random admission.
        seeds: uint64[T, S], for initial values.
        initializers, initializer_options: int64[T, S], float64[T, S, 2].
    """

    dtype: int
    segments: I64x2
    rules: I64x2
    chance: F64
    bloom: I64x2
    table_seeds: U64
    seeds: U64x2
    initializers: I64x2
    initializer_options: F64x3
