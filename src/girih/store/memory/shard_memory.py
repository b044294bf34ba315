"""The arrays of one shard in their arena, and their growth. Rows grow in place. The index grows into new memory.

Growth does not stop other work. Memory is claimed and returned in pieces. The slots of the index are copied to the
larger index step by step, while keys are added (see ``kernels.cpu.index``).
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu import index, layout
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.saving import LINKS
from girih.store.memory.arena import CHANGING, SLOT_BYTES, Arena, index_slots
from girih.store.memory.pushes import Pushes
from girih.store.spec import LAST_STEP, Longs

READS = [layout.LOOKUPS, layout.HITS, layout.FULL]
"""Counters of reads for training. Setting rows does not change them."""
_FIRST_SLOTS = 1 << 10
_LEAST_GROWTH_ROWS = 1 << 12
_CLAIMED_BYTES = 32 << 20
_MOST_MOVED_BY_A_READ = 1 << 16  # slots: half a huge page of the next index
_RETURNED_BYTES = 4 << 20  # whole huge pages
_STRETCHES = 4  # slices of keys that fill a save's log; the log is emptied when the next slice might not fit
_SPILL_SLOTS = 1 << 16  # a cluster that begins in claimed memory ends in claimed memory


NO_SAVE: dict[str, Any] = {
    "saving": np.zeros(layout.HEADS, np.int64),
    "kept": np.zeros(0, np.uint8),
    "log": np.zeros((0, LINKS), np.int32),
    "log_bytes": np.zeros((0, 4 * LINKS), np.uint8),
}
NO_NOTES: dict[str, Any] = {"changed": np.zeros(0, np.uint8), "left": np.zeros((0, 2), np.int64)}
MOST_LEFT = (1 << 20) - 1
"""The maximum number of left keys in the records of changes: 16 MiB of address space, filled on demand."""


class Keeper(Protocol):
    """A running save. Verbs call it before they change rows."""

    most_records: int

    def make_room(self, num_records: int) -> None:
        """Makes room for the old values of ``num_records`` records, at most ``most_records``."""


class TableCounts(ABC):
    """The counts of a shard's memory."""

    @abstractmethod
    def table_counts(self) -> Longs:
        """Returns the counters of each table, int64[T, 16], on the host. See :mod:`girih.kernels.cpu.layout`."""

    def num_rows_of(self, table: int) -> int:
        """Returns the number of rows of one table."""
        return int(self.table_counts()[table, layout.TABLE_ROWS])

    def rows_of_tables(self) -> list[int]:
        """Returns the number of rows of each table."""
        rows: list[int] = self.table_counts()[:, layout.TABLE_ROWS].tolist()
        return rows

    def counters(self, table: int | None = None) -> dict[str, int]:
        """Returns counts of events so far, in one table or in all; see :meth:`Store.counters`."""
        return counters_of(
            self.table_counts()[slice(None) if table is None else table].reshape(-1, layout.TABLE_COLUMNS)
        )


def counters_of(counts: Longs) -> dict[str, int]:
    """Returns the sums of the counters of some tables, int64[·, 16]."""
    return {name: int(counts[:, column].sum()) for name, column in layout.COUNTERS.items()}


class ShardMemory(TableCounts):
    """The memory of a shard.

    Attributes:
        arrays: the arrays for kernels. They are replaced when growth of the index begins or ends.
        lock: held while arrays change, and while a save copies some of them.
        pushes: the pushes that were applied or cut short.
        saving: keeps records for a running save, or None without a save.
        num_returned_slots: slots of a growing index whose memory was returned to the system.
        noted_since: the name of the moment since which changes are recorded, or None if changes are not recorded.
    """

    def __init__(self, arena: Arena, num_columns: int, num_words: int) -> None:
        self.arena = arena
        self.lock = threading.Lock()
        self.saving: Keeper | None = None
        self.noted_since: int | None = None
        self._row_bytes = 4 * num_words
        self.num_returned_slots = 0
        self._closed = False
        state = arena.state
        self.pushes = Pushes(arena.pushes, state)
        values = arena.array("rows", np.float32, num_words)
        if not arena.attached:
            with arena.replacing():
                state[layout.ROWS_COMMITTED] = 0 if arena.is_claimed_ahead else arena.reserve_rows
                first_slots = min(_FIRST_SLOTS, index_slots(arena.reserve_rows))
                arena.claim("index 0", 0, SLOT_BYTES * first_slots)
                _set_index(state, 0, first_slots)
                _empty(state, arena.array("tables", np.int64, layout.TABLE_COLUMNS))
        self.arrays = Shard(
            slots=np.empty(0, np.int64),
            next_slots=np.empty(0, np.int64),
            meta=values.view(np.int32),
            keys=values.view(np.int64),
            values=values,
            halves=values.view(np.uint16),
            state=state,
            tables=arena.array("tables", np.int64, layout.TABLE_COLUMNS),
            cells=arena.array("cells", np.uint8),
            scratch=np.zeros((2, num_columns), np.float32),
            scratch_halves=np.zeros(num_columns, np.uint16),
            **NO_SAVE,
            **NO_NOTES,
        )
        self._see_index()

    @property
    def num_rows(self) -> int:
        """The number of rows of all tables."""
        return int(self.arrays.state[layout.NUM_ROWS])

    def table_counts(self) -> Longs:
        """See :class:`TableCounts`."""
        return self.arrays.tables

    @property
    def last_step(self) -> int:
        """The largest step seen, or 0 before the first step."""
        return int(self.arrays.state[layout.LAST_STEP])

    def check_open(self) -> None:
        """Refuses use after :meth:`close`."""
        if self._closed:
            raise ConfigError(f"{self.arena.where}: the store was closed; open it again")

    @contextlib.contextmanager
    def changing(self, step: int = 0) -> Iterator[None]:
        """Marks the arena while its arrays change, and stores the step."""
        state, marks = self.arrays.state, self.arena.marks
        if step > state[layout.LAST_STEP]:
            state[layout.LAST_STEP] = step
        with self.lock:
            state[layout.AMID] = 0
            marks[0] = CHANGING
            try:
                yield
            finally:
                marks[0] = 0

    @contextlib.contextmanager
    def setting(self) -> Iterator[int]:
        """Marks the arena like :meth:`changing` while rows are set.

        Yields the step of this change. Counters of reads stay unchanged.
        """
        step = min(self.last_step + 1, LAST_STEP)
        with self.changing():
            before = self.arrays.tables[:, READS]
            yield step
            self.arrays.tables[:, READS] = before

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Marks the arena while its whole content is replaced. A repair cannot complete a replacement."""
        with self.lock, self.arena.replacing():
            yield

    def stretches(self, num_keys: int, records_per_key: int, first: int = 0) -> Iterable[slice]:
        """Splits the keys from ``first`` on into slices for whose old records a running save has room.

        Without a save, yields all keys in one slice. Call this method only during a change.
        """
        if self.saving is None:
            return (slice(first, num_keys),) if first < num_keys else ()
        return self._stretches(
            num_keys,
            max(1, self.saving.most_records // _STRETCHES // records_per_key),
            records_per_key,
            first,
        )

    def _stretches(self, num_keys: int, size: int, records_per_key: int, first: int) -> Iterator[slice]:
        for start in range(first, num_keys, size):
            stop = min(start + size, num_keys)
            self.make_room(records_per_key * (stop - start))
            yield slice(start, stop)

    def make_room(self, num_records: int) -> None:
        """Asks a running save to make room for the old values of ``num_records`` records."""
        if self.saving is not None:
            self.saving.make_room(num_records)

    def begin_saving(self, keeper: Keeper, num_chunks: int, num_records: int, num_logged: int) -> None:
        """Starts to keep the old values of records before they change. The caller must still fill the array ``saving``.

        Raises:
            ConfigError: another save is running.
        """
        self.check_open()
        if self.saving is not None:
            raise ConfigError(f"{self.arena.where}: is being saved already; wait for that save to end")
        log = np.empty((num_logged, LINKS + self.arrays.meta.shape[1]), np.int32)
        self.arrays = self.arrays._replace(
            saving=np.zeros(layout.HEADS + num_chunks, np.int64),
            kept=np.zeros(num_records // 8 + 1, np.uint8),
            log=log,
            log_bytes=log.view(np.uint8),
        )
        self.saving = keeper

    def end_saving(self) -> None:
        """Stops keeping records, and frees their memory. The caller holds the lock."""
        self.saving = None
        self.arrays = self.arrays._replace(**NO_SAVE)

    def note_changes(self, since: int) -> None:
        """Starts to record the rows that change and the keys whose rows leave. Forgets earlier records."""
        arrays = self.arrays
        if not len(arrays.left):  # only address space until rows change
            num_bytes = -(-self.arena.reserve_rows // 8)
            changed, left = np.zeros(num_bytes, np.uint8), np.zeros((1 + MOST_LEFT, 2), np.int64)
            self.arrays = arrays._replace(changed=changed, left=left)
        else:
            arrays.changed[: -(-int(arrays.state[layout.ROWS_EVER]) // 8)] = 0
            arrays.left[0] = 0
        self.noted_since = since

    def forget_changes(self) -> None:
        """Ends the recording of changes. Called when all rows were replaced, so that changes cannot describe them."""
        self.noted_since = None
        self.arrays = self.arrays._replace(**NO_NOTES)

    def grow_rows(self, more: int = 1) -> None:
        """Makes sure that ``more`` rows can be made.

        Raises:
            StorageFullError: there is no more memory.
        """
        state = self.arrays.state
        committed, needed = int(state[layout.ROWS_COMMITTED]), int(state[layout.ROWS_EVER]) + more
        if needed <= committed:
            return
        piece = max(_LEAST_GROWTH_ROWS, _CLAIMED_BYTES // self._row_bytes)
        growth = min(piece, max(_LEAST_GROWTH_ROWS, committed // 16))
        wanted = max(needed, min(committed + growth, self.arena.reserve_rows))
        self.arena.claim("rows", self._row_bytes * committed, self._row_bytes * wanted)
        state[layout.ROWS_COMMITTED] = wanted

    def grow_index(self) -> None:
        """Makes room in a full index: starts its growth, claims more memory, or ends its growth.

        Raises:
            StorageFullError: there is no more memory. The index is unchanged.
        """
        state = self.arrays.state
        num_slots = int(state[layout.INDEX_SLOTS])
        if not state[layout.GROWING]:
            if 2 * num_slots > index_slots(self.arena.reserve_rows):
                raise self.arena.full()
            state[layout.GROW_START] = index.after_free_slot(self.arrays.slots)
            state[layout.GROW_MOVED] = state[layout.GROW_CLAIMED] = 0
            _claim_slots(self, num_slots)
            state[layout.GROWING] = 1
            self._see_index()
        elif state[layout.GROW_MOVED] < num_slots:
            _claim_slots(self, num_slots)
        else:
            side = int(state[layout.INDEX_SIDE])
            _set_index(state, 1 - side, 2 * num_slots)
            self._see_index()
            self.arena.clear(_side(side), 0, SLOT_BYTES * num_slots)
            self.num_returned_slots = 0

    def grow_on(self, num_keys: int) -> None:
        """Copies some slots of a growing index to the larger index, so that growth also ends without new keys.

        During growth, a search in both indexes takes twice as long as a search in one index.
        """
        state = self.arrays.state
        if state[layout.GROWING] and state[layout.GROW_MOVED] >= state[layout.GROW_CLAIMED]:
            try:
                self.grow_index()
            except StorageFullError:
                return  # the next new key raises this error
        if state[layout.GROWING]:
            index.move_slots(self.arrays, min(2 * num_keys, _MOST_MOVED_BY_A_READ))

    def reserve_index(self, more: int) -> None:
        """Makes sure that ``more`` keys can be added without growth. If necessary, grows the index in this call.

        Raises:
            StorageFullError: there is no more memory.
        """
        state = self.arrays.state
        wanted = index_slots(min(int(state[layout.NUM_ROWS]) + more, self.arena.reserve_rows))
        if state[layout.NUM_ROWS] == 0 and wanted > state[layout.INDEX_SLOTS]:
            side = int(state[layout.INDEX_SIDE])
            self.arena.claim(_side(side), 0, SLOT_BYTES * wanted)
            _set_index(state, side, wanted)
            self._see_index()
        while state[layout.INDEX_SLOTS] < wanted or state[layout.GROWING]:
            index.move_slots(self.arrays, int(state[layout.INDEX_SLOTS]))
            self.grow_index()

    def renew_index(self, num_rows: int) -> None:
        """Creates an empty index with room for more than ``num_rows`` keys. Discards a growth that was interrupted.

        Raises:
            StorageFullError: there is no more memory.
        """
        # A process that was killed while one index replaced the other may have left up to four times the slots.
        used = 4 * SLOT_BYTES * int(self.arrays.state[layout.INDEX_SLOTS])
        for side in map(_side, range(2)):
            self.arena.clear(side, 0, min(used, self.arena.size_bytes(side)))
        num_slots = index_slots(min(max(num_rows + 1, 3 * _FIRST_SLOTS // 4), self.arena.reserve_rows))
        self.arena.claim(_side(0), 0, SLOT_BYTES * num_slots)
        self.num_returned_slots = 0
        _set_index(self.arrays.state, 0, num_slots)
        self._see_index()

    def give_back(self) -> None:
        """Returns the memory of slots that were copied to the larger index to the system, piece by piece."""
        state = self.arrays.state
        start, piece = int(state[layout.GROW_START]), _RETURNED_BYTES // SLOT_BYTES
        moved, num_slots = start + int(state[layout.GROW_MOVED]), int(state[layout.INDEX_SLOTS])
        # Entries that spill around the end are up to one piece after the start. That piece is returned last.
        first = -(-(start + _SPILL_SLOTS) // piece) * piece + self.num_returned_slots
        while first + piece + _SPILL_SLOTS < moved and first + piece <= num_slots:
            side = _side(int(state[layout.INDEX_SIDE]))
            self.arena.clear(side, SLOT_BYTES * first, SLOT_BYTES * (first + piece))
            self.num_returned_slots += piece
            first += piece

    def _see_index(self) -> None:
        state = self.arrays.state
        side, num_slots = int(state[layout.INDEX_SIDE]), int(state[layout.INDEX_SLOTS])
        num_next = 2 * num_slots if state[layout.GROWING] else 0
        self.arrays = self.arrays._replace(
            slots=self.arena.array(_side(side), np.int64)[:num_slots],
            next_slots=self.arena.array(_side(1 - side), np.int64)[:num_next],
        )

    def clear(self) -> None:
        """Forgets all rows, counters, Bloom filters and recorded changes. Keeps the memory of rows."""
        self.forget_changes()
        state = self.arrays.state
        side, num_slots = int(state[layout.INDEX_SIDE]), int(state[layout.INDEX_SLOTS])
        self.arena.clear(_side(side), 0, SLOT_BYTES * num_slots)
        if state[layout.GROWING]:
            self.arena.clear(_side(1 - side), 0, 2 * SLOT_BYTES * num_slots)
        self.num_returned_slots = 0
        _set_index(state, side, num_slots)
        self._see_index()
        self.arrays.cells[:] = 0
        self.pushes.clear()
        _empty(self.arrays.state, self.arrays.tables)

    @property
    def num_next_slots(self) -> int:
        """The number of slots of the larger index that have memory, without memory that was returned to the system."""
        state = self.arrays.state
        if not self.arena.is_claimed_ahead:
            return 2 * int(state[layout.GROW_MOVED])
        claimed = int(state[layout.GROW_CLAIMED])
        last = 2 * (int(state[layout.GROW_START]) + claimed) + _SPILL_SLOTS
        return min(last, len(self.arrays.next_slots)) if claimed else 0

    def close(self) -> None:
        """Releases the arena."""
        if not self._closed:
            self._closed = True
            self.arena.close()


def index_bytes(num_rows: int) -> int:
    """Returns the bytes of an index for ``num_rows`` rows while it does not grow, if no row ever left."""
    return SLOT_BYTES * max(_FIRST_SLOTS, index_slots(num_rows))


def _claim_slots(memory: ShardMemory, num_slots: int) -> None:
    """Claims memory in the larger index for the next piece of slots: twice the size of the piece."""
    state = memory.arrays.state
    start, claimed = int(state[layout.GROW_START]), int(state[layout.GROW_CLAIMED])
    wanted = num_slots
    if memory.arena.is_claimed_ahead:
        wanted = min(num_slots, claimed + _CLAIMED_BYTES // SLOT_BYTES // 2)
        # The range begins at twice the start, wraps around the end, and is rounded up by a spill.
        first = 0 if claimed == 0 else 2 * (start + claimed)
        last = min(2 * (start + wanted) + _SPILL_SLOTS, 2 * num_slots)
        side = _side(1 - int(state[layout.INDEX_SIDE]))
        memory.arena.claim(side, SLOT_BYTES * min(first, last), SLOT_BYTES * last)
    state[layout.GROW_CLAIMED] = wanted


def _side(number: int) -> str:
    return f"index {number}"


def _set_index(state: Longs, side: int, num_slots: int) -> None:
    """Sets the state to an empty index of ``num_slots`` that does not grow."""
    state[layout.INDEX_SIDE], state[layout.INDEX_SLOTS] = side, num_slots
    state[layout.INDEX_SHIFT] = layout.TAG_BITS - num_slots.bit_length() + 1
    state[[layout.GROWING, layout.GROW_START, layout.GROW_MOVED, layout.GROW_CLAIMED]] = 0


def _empty(state: Longs, tables: Longs) -> None:
    state[[layout.NUM_ROWS, layout.ROWS_EVER, layout.LAST_STEP]] = 0
    state[layout.FREE_ROW] = layout.NO_ROW
    tables[:] = 0
    tables[:, [layout.NEWEST, layout.OLDEST]] = layout.NO_ROW
