"""The arrays of one shard on their arena, and how they grow: rows in place, the index into fresh memory.

Neither stops the world: memory is claimed and given back in pieces, and the slots of the index move little by
little, as keys are added (see ``kernels.cpu.index``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu import index
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.saving import LINKS
from girih.store.memory.arena import SLOT_BYTES, Arena, index_slots

_FIRST_SLOTS = 1 << 10
_LEAST_GROWTH_ROWS = 1 << 12
_CLAIMED_BYTES = 32 << 20
_MOST_MOVED_BY_A_READ = 1 << 16  # slots: half a huge page of the next index
_RETURNED_BYTES = 4 << 20  # whole huge pages
_PAGE_BYTES = 4096
_STRETCHES = 4  # that fill a save's log, at least: it is emptied when the next one might not fit
_SPILL_SLOTS = 1 << 16  # a cluster that begins in claimed memory ends in claimed memory


_NO_SAVE: dict[str, Any] = {
    "saving": np.zeros(at.HEADS, np.int64),
    "kept": np.zeros(0, np.uint8),
    "log": np.zeros((0, LINKS), np.int32),
    "log_bytes": np.zeros((0, 4 * LINKS), np.uint8),
}


class Keeper(Protocol):
    """A save that is under way, as verbs see it."""

    most_records: int

    def make_room(self, num_records: int) -> None:
        """Makes sure that so many records, ``most_records`` at most, can be kept."""


class ShardMemory:
    """Owns a shard's memory.

    Attributes:
        arrays: what kernels work on; replaced when the index begins and ends to grow.
        num_changes: grows with every change, so that a reader can tell that it was disturbed.
        lock: held while arrays change, and while a save copies some of them.
        saving: what keeps records as a save needs them; None while there is no save.
    """

    def __init__(self, arena: Arena, num_columns: int, num_words: int) -> None:
        self.arena = arena
        self.num_changes = 0
        self.lock = threading.Lock()
        self.saving: Keeper | None = None
        self._row_bytes = 4 * num_words
        self._slots_given_back = 0
        self._closed = False
        state = arena.state
        values = arena.array("rows", np.float32, num_words)
        if not arena.attached:
            with arena.writing():
                state[at.ROWS_COMMITTED] = 0 if arena.is_claimed_ahead else arena.reserve_rows
                first_slots = min(_FIRST_SLOTS, index_slots(arena.reserve_rows))
                arena.claim("index 0", 0, SLOT_BYTES * first_slots)
                _set_index(state, 0, first_slots)
                _empty(state, arena.array("tables", np.int64, at.TABLE_COLUMNS))
        scratch = np.zeros((1, num_columns), np.float32)
        self.arrays = Shard(
            slots=np.empty(0, np.int64),
            next_slots=np.empty(0, np.int64),
            meta=values.view(np.int32),
            keys=values.view(np.int64),
            values=values,
            halves=values.view(np.uint16),
            state=state,
            tables=arena.array("tables", np.int64, at.TABLE_COLUMNS),
            cells=arena.array("cells", np.uint8),
            scratch=scratch,
            scratch_bits=scratch.view(np.uint32),
            scratch_halves=np.zeros(num_columns, np.uint16),
            **_NO_SAVE,
        )
        self._see_index()

    def check_open(self) -> None:
        """Refuses use after :meth:`close`."""
        if self._closed:
            raise ConfigError(f"{self.arena.where}: the store was closed; open it anew")

    @contextlib.contextmanager
    def changing(self, step: int = 0) -> Iterator[None]:
        """Marks the arena while its arrays change; remembers the step."""
        self.num_changes += 1
        if step > self.arrays.state[at.LAST_STEP]:
            self.arrays.state[at.LAST_STEP] = step
        with self.lock, self.arena.writing():
            yield

    def stretches(self, num_keys: int, records_a_key: int) -> Iterator[slice]:
        """All keys at once; while a save is under way, as many at a time as it has room to keep records of.

        To be asked for amid a change only.
        """
        keeper = self.saving
        size = max(1, num_keys if keeper is None else keeper.most_records // _STRETCHES // records_a_key)
        for start in range(0, num_keys, size):
            stop = min(start + size, num_keys)
            self.make_room(records_a_key * (stop - start))
            yield slice(start, stop)

    def make_room(self, num_records: int) -> None:
        """Has the save that is under way, if any, make room to keep so many records."""
        if self.saving is not None:
            self.saving.make_room(num_records)

    def begin_saving(self, keeper: Keeper, num_chunks: int, num_records: int, num_logged: int) -> None:
        """From now on records are kept before they change; ``saving`` is still to be filled in.

        Raises:
            ConfigError: another save is under way.
        """
        self.check_open()
        if self.saving is not None:
            raise ConfigError(f"{self.arena.where}: is being saved already; wait for that save to end")
        log = np.empty((num_logged, LINKS + self.arrays.meta.shape[1]), np.int32)
        self.arrays = self.arrays._replace(
            saving=np.zeros(at.HEADS + num_chunks, np.int64),
            kept=np.zeros(num_records // 8 + 1, np.uint8),
            log=log,
            log_bytes=log.view(np.uint8),
        )
        self.saving = keeper

    def end_saving(self) -> None:
        """Nothing is kept any more, and the memory for it given back; to be called with the lock held."""
        self.saving = None
        self.arrays = self.arrays._replace(**_NO_SAVE)

    def grow_rows(self, more: int = 1) -> None:
        """Makes sure that ``more`` rows can be made.

        Raises:
            StorageFullError: there is no more memory.
        """
        state = self.arrays.state
        committed, needed = int(state[at.ROWS_COMMITTED]), int(state[at.ROWS_EVER]) + more
        if needed <= committed:
            return
        piece = max(_LEAST_GROWTH_ROWS, _CLAIMED_BYTES // self._row_bytes)
        growth = min(piece, max(_LEAST_GROWTH_ROWS, committed // 16))
        wanted = max(needed, min(committed + growth, self.arena.reserve_rows))
        self.arena.claim("rows", self._row_bytes * committed, self._row_bytes * wanted)
        state[at.ROWS_COMMITTED] = wanted

    def grow_index(self) -> None:
        """Does what a full index waits for: begins to grow it, claims more memory, or ends its growth.

        Raises:
            StorageFullError: there is no more memory; the index holds what it held.
        """
        state = self.arrays.state
        num_slots = int(state[at.INDEX_SLOTS])
        if not state[at.GROWING]:
            if 2 * num_slots > index_slots(self.arena.reserve_rows):
                raise self.arena.full()
            state[at.GROW_START] = index.after_free_slot(self.arrays.slots)
            state[at.GROW_MOVED] = state[at.GROW_CLAIMED] = 0
            self._claim_slots(num_slots)
            state[at.GROWING] = 1
            self._see_index()
        elif state[at.GROW_MOVED] < num_slots:
            self._claim_slots(num_slots)
        else:
            side = int(state[at.INDEX_SIDE])
            _set_index(state, 1 - side, 2 * num_slots)
            self._see_index()
            self.arena.clear(_side(side), 0, SLOT_BYTES * num_slots)
            self._slots_given_back = 0

    def grow_on(self, num_keys: int) -> None:
        """Moves some slots of an index that grows, so that it comes to an end where no key is new.

        To look into both of its sizes takes twice as long as to look into one.
        """
        state = self.arrays.state
        if state[at.GROWING] and state[at.GROW_MOVED] >= state[at.GROW_CLAIMED]:
            try:
                self.grow_index()
            except StorageFullError:
                return  # a new key will say so
        if state[at.GROWING]:
            index.move(self.arrays, min(2 * num_keys, _MOST_MOVED_BY_A_READ))

    def reserve_index(self, more: int) -> None:
        """Makes sure that ``more`` keys can be added without growing, at once.

        Raises:
            StorageFullError: there is no more memory.
        """
        state = self.arrays.state
        wanted = index_slots(min(int(state[at.NUM_ROWS]) + more, self.arena.reserve_rows))
        if state[at.NUM_ROWS] == 0 and wanted > state[at.INDEX_SLOTS]:
            side = int(state[at.INDEX_SIDE])
            self.arena.claim(_side(side), 0, SLOT_BYTES * wanted)
            _set_index(state, side, wanted)
            self._see_index()
        while state[at.INDEX_SLOTS] < wanted or state[at.GROWING]:
            index.move(self.arrays, int(state[at.INDEX_SLOTS]))
            self.grow_index()

    def give_back(self) -> None:
        """Returns memory of slots that have moved to the system, piece by piece."""
        state = self.arrays.state
        start, piece = int(state[at.GROW_START]), _RETURNED_BYTES // SLOT_BYTES
        moved, num_slots = start + int(state[at.GROW_MOVED]), int(state[at.INDEX_SLOTS])
        # What spills around the end lies behind the start, up to a piece; it goes last.
        first = -(-(start + _SPILL_SLOTS) // piece) * piece + self._slots_given_back
        while first + piece + _SPILL_SLOTS < moved and first + piece <= num_slots:
            side = _side(int(state[at.INDEX_SIDE]))
            self.arena.clear(side, SLOT_BYTES * first, SLOT_BYTES * (first + piece))
            self._slots_given_back += piece
            first += piece

    def _claim_slots(self, num_slots: int) -> None:
        """Claims memory for twice the next piece of slots that will move."""
        state = self.arrays.state
        start, claimed = int(state[at.GROW_START]), int(state[at.GROW_CLAIMED])
        wanted = num_slots
        if self.arena.is_claimed_ahead:
            wanted = min(num_slots, claimed + _CLAIMED_BYTES // SLOT_BYTES // 2)
            # The stretch begins at twice the start, goes around the end, and is rounded up by a spill.
            first = 0 if claimed == 0 else 2 * (start + claimed)
            last = min(2 * (start + wanted) + _SPILL_SLOTS, 2 * num_slots)
            side = _side(1 - int(state[at.INDEX_SIDE]))
            self.arena.claim(side, SLOT_BYTES * min(first, last), SLOT_BYTES * last)
        state[at.GROW_CLAIMED] = wanted

    def _see_index(self) -> None:
        state = self.arrays.state
        side, num_slots = int(state[at.INDEX_SIDE]), int(state[at.INDEX_SLOTS])
        num_next = 2 * num_slots if state[at.GROWING] else 0
        self.arrays = self.arrays._replace(
            slots=self.arena.array(_side(side), np.int64)[:num_slots],
            next_slots=self.arena.array(_side(1 - side), np.int64)[:num_next],
        )

    def clear(self) -> None:
        """Forgets all rows, counters and Bloom filters; memory of rows stays."""
        state = self.arrays.state
        side, num_slots = int(state[at.INDEX_SIDE]), int(state[at.INDEX_SLOTS])
        self.arena.clear(_side(side), 0, SLOT_BYTES * num_slots)
        if state[at.GROWING]:
            self.arena.clear(_side(1 - side), 0, 2 * SLOT_BYTES * num_slots)
        self._slots_given_back = 0
        _set_index(state, side, num_slots)
        self._see_index()
        self.arrays.cells[:] = 0
        _empty(self.arrays.state, self.arrays.tables)

    def used_bytes(self) -> dict[str, int]:
        """Bytes of memory that are in use, by part.

        ``rows`` are those that live; ``free_rows`` had a key and wait for another one; ``unfilled`` was claimed
        ahead of rows to come. ``next_index`` is what an index that grows has of its successor; what has moved
        there and was returned to the system is in neither. ``saving`` is what verbs keep while a save is under
        way; its reader has more.
        """
        state = self.arrays.state
        rows, rows_ever = int(state[at.NUM_ROWS]), int(state[at.ROWS_EVER])
        unfilled = int(state[at.ROWS_COMMITTED]) - rows_ever if self.arena.is_claimed_ahead else 0
        return {
            "index": SLOT_BYTES * (len(self.arrays.slots) - self._slots_given_back),
            "next_index": SLOT_BYTES * self._next_slots(),
            "rows": self._row_bytes * rows,
            "free_rows": self._row_bytes * (rows_ever - rows),
            "unfilled": self._row_bytes * unfilled,
            "bloom": self.arena.size_bytes("cells"),
            "header": self._header_bytes(),
            "saving": self._saving_bytes(),
        }

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes of address space by part."""
        used = self.used_bytes()
        kept = {part: used[part] for part in ("free_rows", "unfilled")}
        same = {part: used[part] for part in ("bloom", "header", "saving")}
        return {
            "index": self.arena.size_bytes("index 0"),
            "next_index": self.arena.size_bytes("index 1"),
            "rows": self._row_bytes * self.arena.reserve_rows - sum(kept.values()),
            **kept,
            **same,
        }

    def _next_slots(self) -> int:
        """Slots of the next index that have memory."""
        state = self.arrays.state
        if not self.arena.is_claimed_ahead:
            return 2 * int(state[at.GROW_MOVED])
        claimed = int(state[at.GROW_CLAIMED])
        last = 2 * (int(state[at.GROW_START]) + claimed) + _SPILL_SLOTS
        return min(last, len(self.arrays.next_slots)) if claimed else 0

    def _saving_bytes(self) -> int:
        arrays = self.arrays
        return 0 if self.saving is None else arrays.saving.nbytes + arrays.kept.nbytes + arrays.log.nbytes

    def _header_bytes(self) -> int:
        """Whole pages of the header, the description and the tables' ends and counters."""
        sizes = (self.arena.size_bytes(region) for region in ("header", "description", "tables"))
        return sum(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in sizes)

    def close(self) -> None:
        """Lets go of the arena."""
        if not self._closed:
            self._closed = True
            self.arena.close()


def index_bytes(num_rows: int) -> int:
    """What the index of so many rows takes once it does not grow, if none ever left."""
    return SLOT_BYTES * max(_FIRST_SLOTS, index_slots(num_rows))


def _side(number: int) -> str:
    return f"index {number}"


def _set_index(state: np.ndarray[tuple[int], np.dtype[np.int64]], side: int, num_slots: int) -> None:
    """An index of so many slots that does not grow."""
    state[at.INDEX_SIDE], state[at.INDEX_SLOTS] = side, num_slots
    state[at.INDEX_SHIFT] = at.TAG_BITS - num_slots.bit_length() + 1
    state[[at.GROWING, at.GROW_START, at.GROW_MOVED, at.GROW_CLAIMED]] = 0


def _empty(
    state: np.ndarray[tuple[int], np.dtype[np.int64]], tables: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> None:
    state[[at.NUM_ROWS, at.ROWS_EVER, at.LAST_STEP]] = 0
    state[at.FREE_ROW] = at.NO_ROW
    tables[:] = 0
    tables[:, [at.NEWEST, at.OLDEST]] = at.NO_ROW
