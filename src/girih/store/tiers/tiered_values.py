"""The values of a shard's rows in two tiers: slots of memory, and a file below.

If a row's values are needed, they are read into a slot. The values of hot rows stay in their slots until the hot set is
chosen again. The values of other rows stay until another row needs the slot. Changed values are written to the file
before their slot is reused.

Shapes: U keys, K rows in transit, W columns of a row that training sees, V 32-bit words of a record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from girih.errors import CheckpointError
from girih.kernels.cpu import layout, tiers
from girih.kernels.cpu.layout import Shard
from girih.kernels.cpu.tiers import (
    CHANGED,
    FETCHED,
    LOADING,
    MISSING,
    NUM_FREED,
    NUM_LEFT,
    NUM_LOADS,
    PLACE,
    SlotEvictions,
)
from girih.store.keys import Keys, RowUpdate
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout
from girih.store.rows.row_table import MadeRows, RowTable
from girih.store.spec import Bytes, Floats, GroupSpec, Ints, Longs
from girih.store.tiers.cold_file import ColdFile
from girih.store.tiers.slot_memory import SlotMemory, shard_of_records
from girih.store.values import FrozenValues, LoadedColumn, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Memory as a tier above a file: HybridHash (PICASSO §III-D).

    Attributes:
        directory: the directory of the file. The file has no name and is deleted when the process ends.
        hot_rows: the number of rows of this store that stay in memory. They are the rows that were read most. There is
            additional room for the rows of a few batches, which grows with the batches.
        flush_every_steps: the number of steps after which the hot rows are chosen again.
        warm_up_steps: the number of steps before the first choice. They only count reads.
        direct: False uses the page cache, for file systems without direct I/O.
    """

    directory: str | os.PathLike[str]
    hot_rows: int
    flush_every_steps: int = 100
    warm_up_steps: int = 100
    direct: bool = True


_MOST_AT_ONCE = 1 << 12  # most keys that get slots together, and most rows that are copied together
_RECORDS_PER_KEY = 3  # the key's record, the record of the row that leaves its slot, and a spare record


class _Fetch(NamedTuple):
    loads: Ints
    records: Ints
    read: Future[None]


class SlotExchange(Values):
    """Copies the values of rows between slots of memory and a file.

    This class decides which rows get slots, which rows leave their slots, and which records are read and written.

    Attributes:
        slots: the upper tier. cold: the file.
        num_reads: the number of existing rows that training has read. ``num_cold`` of them came from the file,
            including rows that were fetched ahead.
    """

    in_place = False

    def __init__(
        self, spec: GroupSpec, row_layout: RowLayout, memory: ShardMemory, rows: RowTable, options: Tiers
    ) -> None:
        super().__init__(spec, row_layout, memory, rows)
        self._options = options
        self.slots = SlotMemory(options.hot_rows, row_layout.num_words, spec.dim, memory.arrays.tables)
        self.cold = ColdFile(options.directory, self.slots.record_bytes, direct=options.direct)
        self.num_reads, self.num_cold, self._num_missed = 0, 0, 0
        self._fetches: list[_Fetch] = []
        self._next_choice = options.warm_up_steps
        self._error: Exception | None = None
        self._is_closed = False

    def parts(self, num_keys: int, first: int = 0) -> Iterator[slice]:
        """Splits keys into parts that can have slots at the same time; see :class:`Values`. Each part is a new call."""
        for start in range(first, num_keys, _MOST_AT_ONCE):
            for part in self.memory.stretches(min(start + _MOST_AT_ONCE, num_keys), _RECORDS_PER_KEY, start):
                self.slots.begin_call()
                yield part

    def bring(self, keys: Keys, rows: Ints) -> tuple[Ints, int]:
        """Gives slots to the rows of keys. Reads the values of all rows that are only in the file together.

        Returns:
            The slot of each row, int32[U], or -1 if the key has no row. And the number of rows that came from the file,
            including rows that were fetched ahead.
        """
        row_slots = np.empty(len(rows), np.int32)
        num_missing, num_fetched, num_loading = self._find_slots(rows, row_slots)
        if num_loading:
            self._finish_reads(row_slots[row_slots >= 0])
        missing = int(np.count_nonzero(row_slots == MISSING))
        if missing:
            fresh = np.zeros(len(rows), np.uint8)
            loads = self._take_slots(rows, row_slots, fresh, missing)
            new = np.flatnonzero(fresh)
            if len(new):
                out = np.empty((len(new), self.spec.dim), np.float32)
                self.read_slots(Keys(keys.ids[new], keys.tables[new]), row_slots[new], fresh[new], out)
            if len(loads):
                self._store_fetched(self._begin_fetch(loads))
        return row_slots, num_missing + num_fetched

    def _forget(self, known: Ints, rows: Ints) -> None:
        new = rows[(known < 0) & (rows >= 0)]
        if not len(new):
            return
        places = self.memory.arrays.keys[new, PLACE]
        self._finish_reads(-1 - places[places < 0])
        freed = np.empty(len(rows), np.int64)
        count = tiers.forget(self.memory.arrays, self.slots.slots, known, rows, freed)
        self.cold.free(freed[:count])

    def forget(self, known: Ints, rows: Ints) -> None:
        """See :class:`Values`."""
        for part in self.memory.stretches(len(rows), 1):
            self._forget(known[part], rows[part])

    def choose(self, step: int) -> None:
        """Chooses the hot rows, if the interval between two choices has passed (PICASSO Alg. 1, lines 23 to 26)."""
        if step >= self._next_choice and self.memory.num_rows:
            self._next_choice = step + self._options.flush_every_steps
            arrays = self.memory.arrays
            self.slots.choose(arrays.meta[: arrays.state[layout.ROWS_EVER]], self.memory.num_rows)

    def collect(self) -> None:
        """Makes room in the file, if too many of its records are dead."""
        self.cold.collect(self)

    def _put(self, rows: Ints, values: Ints) -> None:
        slots, arrays = self.slots.slots, self.memory.arrays
        places = arrays.keys[rows, PLACE]
        in_memory = np.flatnonzero(places < 0)
        row_slots = -1 - places[in_memory]
        self._finish_reads(row_slots)
        slots.records[row_slots, layout.META_COLUMNS :] = values[in_memory]
        slots.flags[row_slots] |= CHANGED
        in_file = np.flatnonzero(places >= 0)
        if len(in_file):
            records = np.empty((len(in_file), self.layout.num_words), np.int32)
            records[:, : layout.META_COLUMNS] = arrays.meta[rows[in_file], : layout.META_COLUMNS]
            records[:, layout.META_COLUMNS :] = values[in_file]
            self._load_records(rows[in_file], records)

    def _load_records(self, rows: Ints, records: Ints) -> None:
        """Writes the records of rows to the file. None of the rows may be in a slot."""
        before = self.memory.arrays.keys[rows, PLACE]
        self.cold.free(before[before > 0] - 1)
        self._write(rows, records)

    def clear(self) -> None:
        """Forgets all rows."""
        self._finish_reads()
        arrays, slots = self.memory.arrays, self.slots.slots
        of_rows = arrays.keys[: arrays.state[layout.ROWS_EVER], PLACE]
        for places in (of_rows, slots.places[: self.slots.num_slots]):
            self.cold.free(places[places > 0] - 1)
        of_rows[:] = 0
        self.slots.clear()
        super().clear()
        self._next_choice = self._options.warm_up_steps

    def alive(self, owners: Ints, places: Longs) -> Bytes:
        """Returns whether the file's record at each place, int64[K], still belongs to its row, uint8[K]."""
        flags = np.empty(len(owners), np.uint8)
        tiers.alive(self.memory.arrays, self.slots.slots, owners, places, flags)
        return flags

    def moved(self, owners: Ints, places: Longs) -> None:
        """Stores the new places in the file of rows' values."""
        tiers.move_places(self.memory.arrays, self.slots.slots, owners, places)

    def close(self) -> None:
        """Releases memory and file."""
        if not self._is_closed:
            self._is_closed = True
            self.cold.close()
        super().close()

    def _finish_reads(self, wanted: Longs | Ints | None = None) -> None:
        """Waits until fetched rows are in the ``wanted`` slots, or in all slots if None."""
        flags = self.slots.slots.flags
        while self._fetches and (wanted is None or (flags[wanted] & LOADING).any()):
            self._store_fetched(self._fetches.pop(0))

    def _find_slots(self, rows: Ints, row_slots: Ints) -> tuple[int, int, int]:
        if self._error is not None:
            raise self._error
        return tiers.find_slots(self.memory.arrays, self.slots.slots, rows, row_slots)  # type: ignore[no-any-return]

    def _take_slots(self, rows: Ints, row_slots: Ints, fresh: Bytes, most: int) -> Ints:
        """Gives a slot to each row that has none. Returns the slots whose values must be read from the file."""
        leaving, start = _no_evictions(most, self.layout.num_words), 0
        while True:
            arrays, slots = self.memory.arrays, self.slots.slots
            start = tiers.take_slots(arrays, slots, rows, start, row_slots, fresh, leaving)
            if start == len(rows):
                break
            self.slots.make_room(most)
        num_left, num_freed, num_loads = (int(leaving.ends[n]) for n in (NUM_LEFT, NUM_FREED, NUM_LOADS))
        self.cold.free(leaving.freed[:num_freed])
        if num_left:
            self._write(leaving.rows[:num_left], leaving.records[:num_left])
        return leaving.loads[:num_loads]

    def _write(self, rows: Ints, records: Ints) -> None:
        tiers.set_places(self.memory.arrays, rows, self._append(rows, records))

    def _append(self, rows: Ints, records: Ints) -> Longs:
        """Writes records to the file. If a write fails, rows are lost. Then all later calls fail too."""
        try:
            return self.cold.append(_bytes(records), rows)
        except Exception as error:
            self._error = error
            raise

    def _begin_fetch(self, loads: Ints) -> _Fetch:
        records = np.empty((len(loads), self.layout.num_words), np.int32)
        places = self.slots.slots.places[loads] - 1
        return _Fetch(loads, records, self.cold.begin_read(places, _bytes(records)))

    def _store_fetched(self, fetch: _Fetch) -> None:
        try:
            fetch.read.result()
        except Exception as error:
            self._error = error
            raise
        wrong = tiers.put_records(self.slots.slots, fetch.loads, fetch.records)
        if wrong >= 0:
            self._error = _wrong_key(self._options.directory, fetch.records[wrong : wrong + 1])
            raise self._error

    def _records_at(self, places: Longs, keys: Ints) -> Ints:
        """Returns the records of keys, int32[K, 3], at places of the file, int32[K, V]."""
        records = np.empty((len(places), self.layout.num_words), np.int32)
        self.cold.begin_read(places, _bytes(records)).result()
        self.check(records, keys)
        return records

    def check(self, records: Ints, keys: Ints) -> None:
        """Refuses records of other keys."""
        if not np.array_equal(records[:, :3], keys):
            raise _wrong_key(self._options.directory, records)

    def read_slots(
        self, keys: Keys, row_slots: Ints, fresh: Bytes, out: Floats, records: Ints | None = None
    ) -> None:
        """Copies the columns of rows to ``out``, from slots of memory, or from ``records``.

        If ``records`` is given, its indices are used instead of slot numbers.
        """
        shard = self.slots.shard
        if records is not None:
            shard = shard_of_records(records.view(np.float32), self.memory.arrays.tables, self.spec.dim)
        tiers.read_slots(
            shard, self.layout.kernel, keys.ids, keys.tables, row_slots, fresh, self.layout.first_hyper, out
        )


class TieredValues(SlotExchange):
    """Values in two tiers: HybridHash (PICASSO §III-D, Algorithm 1).

    The hash map and the meta of every row are in the shard's memory, as in any shard. So tiers do not affect which keys
    have rows, which rows are evicted, and which events are counted. Only values are copied between slots of memory (the
    paper's Hot-storage) and a file (its Cold-storage). The counts in the rows' meta serve as the paper's frequencies.

    ``layout`` describes whole rows. The rows in ``memory`` have only their meta and a place in the file.
    """

    def read(self, keys: Keys, now: Longs, step: int, out: Floats, addresses: Longs | None) -> Ints:
        """See :class:`Values`."""
        made = self._made(self.rows.make(keys, now, step))
        self.num_reads += int(np.count_nonzero(made.known >= 0))
        self.choose(step)
        for part in self.parts(len(out)):
            some = keys.cut(part)
            row_slots, num_cold = self.bring(some, made.rows[part])
            self.num_cold += num_cold
            self.read_slots(some, row_slots, np.zeros(len(row_slots), np.uint8), out[part])
        self.collect()
        _write_addresses(out, addresses)
        return made.rows

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None) -> Ints:
        """Reads rows for evaluation; see :class:`Values`. Rows from the file are not kept in memory."""
        with self.memory.changing():
            rows = self.find(keys)
            self.slots.begin_call()
            row_slots = np.empty(len(rows), np.int32)
            *_, num_loading = self._find_slots(rows, row_slots)
            if num_loading:
                self._finish_reads(row_slots[row_slots >= 0])
            self.read_slots(keys, row_slots, np.zeros(len(row_slots), np.uint8), out)
            places = self.memory.arrays.keys[np.maximum(rows, 0), PLACE]
            missing = np.flatnonzero((row_slots == MISSING) & (places > 0))
            for start in range(0, len(missing), _MOST_AT_ONCE):
                part = missing[start : start + _MOST_AT_ONCE]
                records = self._records_at(places[part] - 1, self.memory.arrays.meta[rows[part], :3])
                numbers, none = np.arange(len(part), dtype=np.int32), np.zeros(len(part), np.uint8)
                values = np.empty((len(part), self.spec.dim), np.float32)
                some = Keys(keys.ids[part], keys.tables[part])
                self.read_slots(some, numbers, none, values, records)
                out[part] = values
        _write_addresses(out, addresses)
        return rows

    def move(self, keys: Keys, change: RowUpdate, done: int = 0) -> int:
        """See :class:`Values`."""
        self._num_missed = 0
        dropped = super().move(keys, change, done)
        if self._num_missed:
            self.slots.keep_longer()
        return dropped

    def assign(self, keys: Keys, values: Floats, now: Longs, step: int) -> Ints:
        """See :class:`Values`."""
        rows = super().assign(keys, values, now, step)
        self.collect()
        return rows

    def make(self, keys: Keys, now: Longs, step: int) -> Ints:
        """See :class:`Values`."""
        return self._made(self.rows.make(keys, now, step, forced=True)).rows

    def _made(self, made: MadeRows) -> MadeRows:
        """Drops the values that earlier rows left under the numbers of new rows. Returns ``made``."""
        self.forget(made.known, made.rows)
        if made.full is not None:
            raise made.full
        return made

    def reach(self, keys: Keys, rows: Ints, step: int) -> tuple[Shard, Ints]:
        """Gives rows slots with their values, and marks them as changed; see :class:`Values`."""
        arrays, checked = self.memory.arrays, np.empty(len(rows), np.int32)
        tiers.check_rows(arrays, keys.ids, keys.tables, rows, checked)
        row_slots, num_cold = self.bring(keys, checked)
        self._num_missed += num_cold
        tiers.mark_changed(arrays, self.slots.slots, checked, row_slots, step)
        return self.slots.shard, row_slots

    def copy(self, rows: Ints, out: Ints, *, reads: bool) -> None:
        """See :class:`Values`."""
        arrays = self.memory.arrays
        keys = Keys(arrays.keys[rows, 0], arrays.meta[rows, layout.TABLE])
        for part in self.parts(len(rows)):
            row_slots, num_cold = self.bring(keys.cut(part), rows[part])
            out[part] = self.slots.slots.records[row_slots, layout.META_COLUMNS :]
            if reads:
                self.num_reads, self.num_cold = self.num_reads + len(row_slots), self.num_cold + num_cold
        self.collect()

    def put(self, rows: Ints, values: Ints) -> None:
        """Writes rows in their slots, or else in the file; see :class:`Values`."""
        for part in self.memory.stretches(len(rows), 1):
            self._put(rows[part], values[part])
        self.collect()

    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows whose values are only in the file; see :class:`Values`."""
        with self.memory.changing():
            rows = self.find(keys)
            rows = rows[rows >= 0]
            rows = rows[self.memory.arrays.keys[rows, PLACE] > 0]
            for part in self.parts(len(rows)):
                chosen, fresh = rows[part], np.zeros(part.stop - part.start, np.uint8)
                loads = self._take_slots(chosen, np.full(len(chosen), MISSING, np.int32), fresh, len(chosen))
                if len(loads):
                    self.slots.slots.flags[loads] |= FETCHED | LOADING
                    self._fetches.append(self._begin_fetch(loads))

    def load(
        self,
        rows: Ints,
        columns: Sequence[LoadedColumn],
        *,
        begins: bool,
        states: Sequence[LoadedColumn] = (),
    ) -> None:
        """Writes rows to the file; see :class:`Values`."""
        arrays, records = self.memory.arrays, np.zeros((len(rows), self.layout.num_words), np.float32)
        words = records.view(np.int32)
        words[:, : layout.META_COLUMNS] = arrays.meta[rows, : layout.META_COLUMNS]
        shard = shard_of_records(records, arrays.tables, self.spec.dim)
        self._fill(shard, np.arange(len(rows), dtype=np.int32), columns, states, begins=begins)
        self._load_records(rows, words)

    def freeze(self) -> FrozenValues:
        """Writes values that are only in memory to the file; see :class:`Values`."""
        self._finish_reads()
        slots, arrays, count = self.slots.slots, self.memory.arrays, self.slots.num_slots
        changed = np.flatnonzero(slots.flags[:count] & CHANGED)
        changed = changed[arrays.meta[slots.rows[changed], layout.TABLE] >= 0]
        for start in range(0, len(changed), _MOST_AT_ONCE):
            part = changed[start : start + _MOST_AT_ONCE]
            before = slots.places[part]
            slots.places[part] = 0
            self.cold.free(before[before > 0] - 1)
            slots.places[part] = self._append(slots.rows[part], slots.records[part]) + 1
            slots.flags[part] &= ~CHANGED & 0xFF
        return _FrozenPlaces(self, slots.places[:count].copy())

    def counters(self) -> dict[str, int]:
        """Returns the number of rows that training read from each tier, and the bytes that the disk read and wrote."""
        counted = self.cold.counters
        return {
            "dram_reads": self.num_reads - self.num_cold,
            "ssd_reads": self.num_cold,
            "ssd_bytes_read": counted.bytes_read,
            "ssd_bytes_written": counted.bytes_written,
        }

    def tier_bytes(self) -> dict[str, tuple[int, int]]:
        """Returns the bytes of the slots, and of the buffers for the file."""
        buffers = self.cold.memory_bytes
        return {"slots": (self.slots.used_bytes, self.slots.num_bytes), "ssd_buffers": (buffers, buffers)}


class _FrozenPlaces(FrozenValues):
    """The places of all values at the moment when a snapshot began.

    Args:
        places: int64[N], the place in the file of the values of each slot.
    """

    def __init__(self, values: TieredValues, places: Longs) -> None:
        self._values, self._ticket = values, values.cold.hold()
        self._places: Longs | None = places

    def whole(self, records: Ints, live: Ints) -> tuple[Ints, Ints]:
        """Adds values to records; see :class:`FrozenValues`. Any thread may call it."""
        return self._whole(records[live]), np.arange(len(live), dtype=np.int32)

    def thaw(self) -> None:
        """See :class:`FrozenValues`."""
        if self._places is not None:
            self._places = None
            self._values.cold.let_go(self._ticket)

    def _whole(self, records: Ints) -> Ints:
        values, num_words = self._values, self._values.layout.num_words
        places = records.view(np.int64)[:, PLACE].copy()
        with values.memory.lock:
            if self._places is None:
                raise CheckpointError(
                    "a snapshot of a store with tiers: was closed before it was read to the end"
                )
            in_slots = np.flatnonzero(places < 0)
            places[in_slots] = self._places[-1 - places[in_slots]]
            stored = np.flatnonzero(places > 0)
            stored_records = np.empty((len(stored), num_words), np.int32)
            read = values.cold.begin_read(places[stored] - 1, _bytes(stored_records))
        read.result()
        values.check(stored_records, records[stored, :3])
        made = np.flatnonzero(places <= 0).astype(np.int32)
        whole = stored_records
        if len(made):
            whole = np.zeros((len(records), num_words), np.int32)
            whole[stored] = stored_records
            keys = Keys(records.view(np.int64)[made, 0], records[made, layout.TABLE])
            out, fresh = np.empty((len(made), values.spec.dim), np.float32), np.ones(len(made), np.uint8)
            values.read_slots(keys, made, fresh, out, whole)
        whole[:, : layout.META_COLUMNS] = records[:, : layout.META_COLUMNS]
        return whole


def _write_addresses(out: Floats, addresses: Longs | None) -> None:
    """Sets each key's address to its row in ``out``, because all rows were copied to ``out``."""
    if addresses is not None:
        addresses[:] = out.ctypes.data + out.strides[0] * np.arange(len(out), dtype=np.int64)


def _no_evictions(most: int, num_words: int) -> SlotEvictions:
    """Returns buffers for ``most`` rows that leave their slots."""
    return SlotEvictions(
        rows=np.empty(most, np.int32),
        records=np.empty((most, num_words), np.int32),
        freed=np.empty(most, np.int64),
        loads=np.empty(most, np.int32),
        ends=np.zeros(3, np.int64),
    )


def _wrong_key(directory: str | os.PathLike[str], records: Ints) -> CheckpointError:
    return CheckpointError(
        f"{directory}: the SSD tier returned a row of another key ({records[0, :3].tolist()});"
        " the disk is damaged; use another disk, and --resume from the last checkpoint"
    )


def _bytes(records: Ints) -> Bytes:
    """Returns records as uint8[K, 4 V]."""
    return records.view(np.uint8)
