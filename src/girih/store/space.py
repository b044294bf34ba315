"""The arrays of one shard on their arena, and how they grow: rows in place, the index into fresh memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from girih.errors import ConfigError
from girih.kernels.cpu import index
from girih.kernels.cpu import layout as at
from girih.kernels.cpu.layout import Shard
from girih.store.arena import Arena, index_slots

_FIRST_SLOTS = 1 << 10
_LEAST_GROWTH_ROWS = 1 << 12
_META_BYTES = 4 * at.META_COLUMNS


class Space:
    """Owns a shard's memory.

    Attributes:
        arrays: what kernels work on; replaced when the index grows.
        num_changes: grows with every change, so that a reader can tell that it was disturbed.
    """

    def __init__(self, arena: Arena, num_columns: int, num_words: int) -> None:
        self.arena = arena
        self.num_changes = 0
        self._row_bytes = 4 * num_words
        self._closed = False
        state = arena.state
        values = arena.array("values", np.float32, num_words)
        meta = arena.array("meta", np.int32, at.META_COLUMNS)
        if not arena.attached:
            with arena.writing():
                state[at.ROWS_COMMITTED] = 0 if arena.is_claimed_ahead else arena.reserve_rows
                state[at.INDEX_SLOTS] = min(_FIRST_SLOTS, index_slots(arena.reserve_rows))
                arena.claim("index 0", 0, 16 * int(state[at.INDEX_SLOTS]))
                _empty(state, arena.array("tables", np.int64, at.TABLE_COLUMNS))
        scratch = np.zeros(num_columns, np.float32)
        self.arrays = Shard(
            slots=arena.array(_side(int(state[at.INDEX_SIDE])), np.int64, 2)[: state[at.INDEX_SLOTS]],
            meta=meta,
            keys=meta.view(np.int64),
            values=values,
            halves=values.view(np.uint16),
            state=state,
            tables=arena.array("tables", np.int64, at.TABLE_COLUMNS),
            cells=arena.array("cells", np.uint8),
            scratch=scratch,
            scratch_bits=scratch.view(np.uint32),
            scratch_halves=np.zeros(num_columns, np.uint16),
        )

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
        with self.arena.writing():
            yield

    def grow_rows(self, more: int = 1) -> None:
        """Makes sure that ``more`` rows can be made.

        Raises:
            StorageFullError: there is no more memory.
        """
        state = self.arrays.state
        committed, needed = int(state[at.ROWS_COMMITTED]), int(state[at.ROWS_EVER]) + more
        if needed <= committed:
            return
        growth = max(_LEAST_GROWTH_ROWS, committed // 8)
        wanted = max(needed, min(committed + growth, self.arena.reserve_rows))
        self.arena.claim("meta", _META_BYTES * committed, _META_BYTES * wanted)
        self.arena.claim("values", self._row_bytes * committed, self._row_bytes * wanted)
        state[at.ROWS_COMMITTED] = wanted

    def grow_index(self, more: int = 1) -> None:
        """Makes sure that ``more`` keys can be added, by rehashing into a larger index where they cannot.

        Raises:
            StorageFullError: there is no more memory; the index is as before.
        """
        state, old = self.arrays.state, self.arrays.slots
        num_slots = index_slots(min(int(state[at.NUM_ROWS]) + more, self.arena.reserve_rows))
        if num_slots <= len(old):
            return
        before, after = _side(int(state[at.INDEX_SIDE])), _side(1 - int(state[at.INDEX_SIDE]))
        self.arena.claim(after, 0, 16 * num_slots)
        new = self.arena.array(after, np.int64, 2)[:num_slots]
        index.rehash(old, new)
        state[at.INDEX_SIDE], state[at.INDEX_SLOTS] = 1 - state[at.INDEX_SIDE], num_slots
        self.arrays = self.arrays._replace(slots=new)
        self.arena.clear(before, old.nbytes)

    def clear(self) -> None:
        """Forgets all rows, counters and Bloom filters; memory stays."""
        self.arrays.slots[:] = 0
        self.arrays.cells[:] = 0
        _empty(self.arrays.state, self.arrays.tables)

    def used_bytes(self) -> dict[str, int]:
        """Bytes in use by part."""
        rows_ever = int(self.arrays.state[at.ROWS_EVER])
        return {
            "index": self.arrays.slots.nbytes,
            "meta": _META_BYTES * rows_ever,
            "rows": self._row_bytes * rows_ever,
            "bloom": self.arrays.cells.nbytes,
        }

    def reserved_bytes(self) -> dict[str, int]:
        """Bytes of address space by part."""
        size = self.arena.size_bytes
        return {
            "index": size("index 0") + size("index 1"),
            "meta": size("meta"),
            "rows": size("values"),
            "bloom": size("cells"),
        }

    def close(self) -> None:
        """Lets go of the arena."""
        if not self._closed:
            self._closed = True
            self.arena.close()


def _side(number: int) -> str:
    return f"index {number}"


def _empty(
    state: np.ndarray[tuple[int], np.dtype[np.int64]], tables: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
) -> None:
    state[[at.NUM_ROWS, at.ROWS_EVER, at.LAST_STEP]] = 0
    state[at.FREE_ROW] = at.NO_ROW
    tables[:] = 0
    tables[:, [at.NEWEST, at.OLDEST]] = at.NO_ROW
