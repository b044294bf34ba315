"""The values of a shard's rows in two tiers: slots of memory above, a file below.

A row whose values are wanted is brought into a slot. Rows that are in nobody's way stay: the hot ones until the hot set
is chosen anew, others until their slot is needed. What changed meanwhile is written before its slot is given away.

Shapes: U keys, K rows on their way, W columns of a row that training sees, V 32-bit words of a record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from girih.errors import CheckpointError
from girih.kernels.cpu import layout, tiers
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
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import RowLayout
from girih.store.spec import Bytes, Floats, Ints, Longs
from girih.store.tiers.cold_file import ColdFile, PendingRead
from girih.store.tiers.slot_memory import SlotMemory, shard_of_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Memory above a file: HybridHash (PICASSO §III-D).

    Attributes:
        directory: for the file, which has no name and ends with the process.
        hot_rows: rows of this store that stay in memory: those that were read most. Beside them there is room for the
            rows of a few batches, which grows with these.
        flush_every_steps: how often the hot rows are chosen anew.
        warm_up_steps: steps that only count, before they are chosen first.
        direct: False lets the page cache keep what was read from the file; for file systems that have no better way.
    """

    directory: str | os.PathLike[str]
    hot_rows: int
    flush_every_steps: int = 100
    warm_up_steps: int = 100
    direct: bool = True


_MOST_AT_ONCE = 1 << 12  # keys that need slots together, and rows that are copied together
_RECORDS_PER_KEY = 3  # its own, that of the row which leaves for it, and one to spare


class _Fetch(NamedTuple):
    loads: Ints
    records: Ints
    read: PendingRead


class _RowOwners:
    """The rows that the file has records of; see :class:`girih.store.tiers.cold_file.Owners`."""

    def __init__(self, memory: ShardMemory, slots: SlotMemory) -> None:
        self._memory, self._slots = memory, slots

    def alive(self, owners: Ints, places: Longs) -> Bytes:
        """Whether the file's record at each place, int64[K], is still that of its row: uint8[K]."""
        flags = np.empty(len(owners), np.uint8)
        tiers.alive(self._memory.arrays, self._slots.slots, owners, places, flags)
        return flags

    def moved(self, owners: Ints, places: Longs) -> None:
        """Remembers where the file has rows from now on."""
        tiers.move_places(self._memory.arrays, self._slots.slots, owners, places)


class TieredValues:
    """The values of a shard's rows: where each lies, and its way from one tier to the other.

    Methods are called while the shard's arrays may change (``ShardMemory.changing``), but for :meth:`whole`.

    Attributes:
        num_reads: rows that training has read and that were there; ``num_cold`` of them came from the file, those that
            were fetched ahead included.
    """

    def __init__(self, memory: ShardMemory, row_layout: RowLayout, num_columns: int, options: Tiers) -> None:
        self._memory, self._layout, self._options = memory, row_layout, options
        self._num_columns = num_columns
        self.memory = SlotMemory(options.hot_rows, row_layout.num_words, num_columns, memory.arrays.tables)
        self.cold = ColdFile(options.directory, self.memory.record_bytes, direct=options.direct)
        self._owners = _RowOwners(memory, self.memory)
        self.num_reads, self.num_cold, self._ticket = 0, 0, 0
        self._fetches: list[_Fetch] = []
        self._frozen: Longs | None = None
        self._next_choice = options.warm_up_steps
        self._error: Exception | None = None
        self._is_closed = False

    def parts(self, num_keys: int) -> Iterator[slice]:
        """The keys of a verb, as many at a time as are to have slots together; each part is a call of its own."""
        for start in range(0, num_keys, _MOST_AT_ONCE):
            for part in self._memory.stretches(min(_MOST_AT_ONCE, num_keys - start), _RECORDS_PER_KEY):
                self.memory.begin_call()
                yield slice(start + part.start, start + part.stop)

    def bring(self, ids: Longs, tables: Ints, rows: Ints) -> tuple[Ints, int]:
        """Has rows in slots; what is not there is read from the file, all at once.

        Returns:
            int32[U], the slot of each, -1 where there is no row; and how many came from the file, fetched ones included.
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
                out = np.empty((len(new), self._num_columns), np.float32)
                self._read_slots(ids[new], tables[new], row_slots[new], fresh[new], out)
            if len(loads):
                self._store_fetched(self._begin_fetch(loads))
        return row_slots, num_missing + num_fetched

    def read(self, ids: Longs, tables: Ints, rows: Ints, out: Floats) -> None:
        """Copies the columns of rows to ``out``, float32[U, W]; initial ones where there is no row."""
        row_slots, num_cold = self.bring(ids, tables, rows)
        self.num_cold += num_cold
        self._read_slots(ids, tables, row_slots, np.zeros(len(row_slots), np.uint8), out)

    def peek(self, ids: Longs, tables: Ints, rows: Ints, out: Floats) -> None:
        """As :meth:`read`, but rows of the file are not kept in memory."""
        self.memory.begin_call()
        row_slots = np.empty(len(rows), np.int32)
        *_, num_loading = self._find_slots(rows, row_slots)
        if num_loading:
            self._finish_reads(row_slots[row_slots >= 0])
        self._read_slots(ids, tables, row_slots, np.zeros(len(row_slots), np.uint8), out)
        places = self._memory.arrays.keys[np.maximum(rows, 0), PLACE]
        missing = np.flatnonzero((row_slots == MISSING) & (places > 0))
        for start in range(0, len(missing), _MOST_AT_ONCE):
            part = missing[start : start + _MOST_AT_ONCE]
            records = np.empty((len(part), self._layout.num_words), np.int32)
            self.cold.begin_read(places[part] - 1, _bytes(records)).wait()
            self._check(records, self._memory.arrays.meta[rows[part], :3])
            numbers, none = np.arange(len(part), dtype=np.int32), np.zeros(len(part), np.uint8)
            values = np.empty((len(part), self._num_columns), np.float32)
            self._read_slots(ids[part], tables[part], numbers, none, values, records)
            out[part] = values

    def copy(self, rows: Ints, out: Ints, *, reads: bool) -> None:
        """Copies all of rows, int32[K], but their meta to ``out``, int32[K, V - 8]; ``reads`` counts them as read."""
        meta, keys = self._memory.arrays.meta, self._memory.arrays.keys
        ids, tables = keys[rows, 0], meta[rows, layout.TABLE]
        for part in self.parts(len(rows)):
            row_slots, num_cold = self.bring(ids[part], tables[part], rows[part])
            out[part] = self.memory.slots.records[row_slots, layout.META_COLUMNS :]
            if reads:
                self.num_reads, self.num_cold = self.num_reads + len(row_slots), self.num_cold + num_cold

    def put(self, rows: Ints, values: Ints) -> None:
        """Writes all of rows, int32[K], but their meta: in their slots, or else in the file; at most as many as a save has room for."""
        slots, arrays = self.memory.slots, self._memory.arrays
        places = arrays.keys[rows, PLACE]
        in_memory = np.flatnonzero(places < 0)
        row_slots = -1 - places[in_memory]
        self._finish_reads(row_slots)
        slots.records[row_slots, layout.META_COLUMNS :] = values[in_memory]
        slots.flags[row_slots] |= CHANGED
        in_file = np.flatnonzero(places >= 0)
        if len(in_file):
            records = np.empty((len(in_file), self._layout.num_words), np.int32)
            records[:, : layout.META_COLUMNS] = arrays.meta[rows[in_file], : layout.META_COLUMNS]
            records[:, layout.META_COLUMNS :] = values[in_file]
            self.load(rows[in_file], records)

    def fetch(self, rows: Ints) -> None:
        """Begins to read those of some rows that only the file has."""
        rows = rows[rows >= 0]
        rows = rows[self._memory.arrays.keys[rows, PLACE] > 0]
        for part in self.parts(len(rows)):
            chosen, fresh = rows[part], np.zeros(part.stop - part.start, np.uint8)
            loads = self._take_slots(chosen, np.full(len(chosen), MISSING, np.int32), fresh, len(chosen))
            if len(loads):
                self.memory.slots.flags[loads] |= FETCHED | LOADING
                self._fetches.append(self._begin_fetch(loads))

    def mark_changed(self, rows: Ints, row_slots: Ints, version: int) -> None:
        """Before rows change in the slots that :meth:`bring` found."""
        tiers.mark_changed(self._memory.arrays, self.memory.slots, rows, row_slots, version)

    def forget(self, known: Ints, rows: Ints) -> None:
        """Rows that keys have got, where ``known`` is -1, begin anew: what their numbers had before is given up."""
        new = rows[(known < 0) & (rows >= 0)]
        if not len(new):
            return
        places = self._memory.arrays.keys[new, PLACE]
        self._finish_reads(-1 - places[places < 0])
        freed = np.empty(len(rows), np.int64)
        count = tiers.forget(self._memory.arrays, self.memory.slots, known, rows, freed)
        self.cold.free(freed[:count])

    def choose(self, step: int) -> None:
        """Chooses the hot rows where it is time (PICASSO Alg. 1, lines 23 to 26)."""
        if step >= self._next_choice and self._memory.num_rows:
            self._next_choice = step + self._options.flush_every_steps
            arrays = self._memory.arrays
            self.memory.choose(arrays.meta[: arrays.state[layout.ROWS_EVER]], self._memory.num_rows)

    def collect(self) -> None:
        """Makes room in the file, where too much of it is of nobody."""
        self.cold.collect(self._owners)

    def load(self, rows: Ints, records: Ints) -> None:
        """Gives rows, none of which is in a slot, their records."""
        before = self._memory.arrays.keys[rows, PLACE]
        self.cold.free(before[before > 0] - 1)
        self._write(rows, records)

    def clear(self) -> None:
        """Forgets everything."""
        self._finish_reads()
        arrays, slots = self._memory.arrays, self.memory.slots
        of_rows = arrays.keys[: arrays.state[layout.ROWS_EVER], PLACE]
        for places in (of_rows, slots.places[: self.memory.num_slots]):
            self.cold.free(places[places > 0] - 1)
        of_rows[:] = 0
        self.memory.clear()
        self._next_choice = self._options.warm_up_steps

    def freeze(self) -> None:
        """Writes what only memory has, and from now on keeps what :meth:`whole` may be asked for."""
        self._finish_reads()
        slots, arrays = self.memory.slots, self._memory.arrays
        changed = np.flatnonzero(slots.flags[: self.memory.num_slots] & CHANGED)
        changed = changed[arrays.meta[slots.rows[changed], layout.TABLE] >= 0]
        for start in range(0, len(changed), _MOST_AT_ONCE):
            part = changed[start : start + _MOST_AT_ONCE]
            before = slots.places[part]
            slots.places[part] = 0
            self.cold.free(before[before > 0] - 1)
            slots.places[part] = self._append(slots.rows[part], slots.records[part]) + 1
            slots.flags[part] &= ~CHANGED & 0xFF
        self._frozen = slots.places[: self.memory.num_slots].copy()
        self._ticket = self.cold.hold()

    def thaw(self) -> None:
        """Ends what :meth:`freeze` began."""
        if self._frozen is not None:
            self._frozen = None
            self.cold.let_go(self._ticket)

    def whole(self, records: Ints) -> Ints:
        """Records of rows as they were when frozen, with their values as they were then; from any thread.

        Args:
            records: int32[K, ·], the rows in the shard's memory as they were.

        Returns:
            int32[K, V].
        """
        places = records.view(np.int64)[:, PLACE].copy()
        with self._memory.lock:
            if self._frozen is None:
                raise CheckpointError(
                    "a snapshot of a store with tiers: was closed before it was read to the end"
                )
            in_slots = np.flatnonzero(places < 0)
            places[in_slots] = self._frozen[-1 - places[in_slots]]
            stored = np.flatnonzero(places > 0)
            stored_records = np.empty((len(stored), self._layout.num_words), np.int32)
            read = self.cold.begin_read(places[stored] - 1, _bytes(stored_records))
        read.wait()
        self._check(stored_records, records[stored, :3])
        made = np.flatnonzero(places <= 0).astype(np.int32)
        whole = stored_records
        if len(made):
            whole = np.zeros((len(records), self._layout.num_words), np.int32)
            whole[stored] = stored_records
            ids, tables = records.view(np.int64)[made, 0], records[made, layout.TABLE]
            out, fresh = np.empty((len(made), self._num_columns), np.float32), np.ones(len(made), np.uint8)
            self._read_slots(ids, tables, made, fresh, out, whole)
        whole[:, : layout.META_COLUMNS] = records[:, : layout.META_COLUMNS]
        return whole

    def counters(self) -> dict[str, int]:
        """Rows that training read from each tier, and bytes that the file's disk read and wrote."""
        counted = self.cold.counters
        return {
            "dram_reads": self.num_reads - self.num_cold,
            "ssd_reads": self.num_cold,
            "ssd_bytes_read": counted.bytes_read,
            "ssd_bytes_written": counted.bytes_written,
        }

    def close(self) -> None:
        """Lets go of the file."""
        if not self._is_closed:
            self._is_closed = True
            self.cold.close()

    def _finish_reads(self, wanted: Longs | Ints | None = None) -> None:
        """Returns when what was fetched is in the slots that are ``wanted``; in all of them where None."""
        flags = self.memory.slots.flags
        while self._fetches and (wanted is None or (flags[wanted] & LOADING).any()):
            self._store_fetched(self._fetches.pop(0))

    def _find_slots(self, rows: Ints, row_slots: Ints) -> tuple[int, int, int]:
        if self._error is not None:
            raise self._error
        return tiers.find_slots(self._memory.arrays, self.memory.slots, rows, row_slots)  # type: ignore[no-any-return]

    def _take_slots(self, rows: Ints, row_slots: Ints, fresh: Bytes, most: int) -> Ints:
        """Gives slots to rows that miss one; returns those that are to be loaded."""
        leaving, start = _no_evictions(most, self._layout.num_words), 0
        while True:
            arrays, slots = self._memory.arrays, self.memory.slots
            start = tiers.take_slots(arrays, slots, rows, start, row_slots, fresh, leaving)
            if start == len(rows):
                break
            self.memory.make_room(most)
        num_left, num_freed, num_loads = (int(leaving.ends[n]) for n in (NUM_LEFT, NUM_FREED, NUM_LOADS))
        self.cold.free(leaving.freed[:num_freed])
        if num_left:
            self._write(leaving.rows[:num_left], leaving.records[:num_left])
        return leaving.loads[:num_loads]

    def _write(self, rows: Ints, records: Ints) -> None:
        tiers.set_places(self._memory.arrays, rows, self._append(rows, records))

    def _append(self, rows: Ints, records: Ints) -> Longs:
        """Writes records to the file; where that fails, rows are lost, so that nothing goes on."""
        try:
            return self.cold.append(_bytes(records), rows)
        except Exception as error:
            self._error = error
            raise

    def _begin_fetch(self, loads: Ints) -> _Fetch:
        records = np.empty((len(loads), self._layout.num_words), np.int32)
        places = self.memory.slots.places[loads] - 1
        return _Fetch(loads, records, self.cold.begin_read(places, _bytes(records)))

    def _store_fetched(self, fetch: _Fetch) -> None:
        try:
            fetch.read.wait()
        except Exception as error:
            self._error = error
            raise
        wrong = tiers.put_records(self.memory.slots, fetch.loads, fetch.records)
        if wrong >= 0:
            self._error = _wrong_key(self._options.directory, fetch.records[wrong : wrong + 1])
            raise self._error

    def _check(self, records: Ints, keys: Ints) -> None:
        """Refuses records of other keys."""
        if not np.array_equal(records[:, :3], keys):
            raise _wrong_key(self._options.directory, records)

    def _read_slots(
        self,
        ids: Longs,
        tables: Ints,
        row_slots: Ints,
        fresh: Bytes,
        out: Floats,
        records: Ints | None = None,
    ) -> None:
        """Copies the columns of rows to ``out``, from slots of memory, or from ``records``, which are numbered as slots are."""
        shard, kernel, first_hyper = self.memory.shard, self._layout.kernel, self._layout.first_hyper
        if records is not None:
            shard = shard_of_records(records.view(np.float32), self._memory.arrays.tables, self._num_columns)
        tiers.read_slots(shard, kernel, ids, tables, row_slots, fresh, first_hyper, out)


def _no_evictions(most: int, num_words: int) -> SlotEvictions:
    """Room for ``most`` rows that leave their slots."""
    return SlotEvictions(
        rows=np.empty(most, np.int32),
        records=np.empty((most, num_words), np.int32),
        freed=np.empty(most, np.int64),
        loads=np.empty(most, np.int32),
        ends=np.zeros(3, np.int64),
    )


def _wrong_key(directory: str | os.PathLike[str], records: Ints) -> CheckpointError:
    return CheckpointError(
        f"{directory}: the SSD tier gave back a row of another key ({records[0, :3].tolist()});"
        " the disk is damaged: --resume from the last checkpoint, on another one"
    )


def _bytes(records: Ints) -> Bytes:
    """Records as uint8[K, 4 V]."""
    return records.view(np.uint8)
