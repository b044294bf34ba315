"""A store that grows under watch: keys that are new or known, steps that are timed, memory that is counted.

Shapes: F tables, B ids of each in a step, U = F · B keys.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from girih.kernels.cpu import layout
from girih.store import Keys, RowUpdate, Store

FEATURES = 26
STEPS_BEFORE = 20  # usual steps before the index begins to grow
SLOTS_A_KEY = 8  # of a usual step; smaller indexes grow within a step or two
WATCHED = ("grow_index", "grow_rows", "give_back")

Arrays = tuple[NDArray[np.int64], NDArray[np.int32]]


class KeyStream:
    """Keys of F tables, equally many of each, those of one table side by side."""

    def __init__(self, seed: int = 0) -> None:
        self.known = 0  # ids of each table that were given so far: 0 to known - 1
        self._rng = np.random.default_rng(seed)

    def fresh(self, per_table: int) -> Arrays:
        """Keys that never were before."""
        ids = np.arange(self.known, self.known + per_table)
        self.known += per_table
        return np.tile(ids, FEATURES), tables_of(per_table)

    def uniform(self, per_table: int, num_new: int = 0) -> Arrays:
        """Keys that are known, any alike, each once, but for so many new ones of each table."""
        parts = []
        for _ in range(FEATURES):
            drawn = self._rng.integers(0, self.known, per_table + per_table // 4 + 16)
            drawn = self._rng.permutation(np.unique(drawn))[: per_table - num_new]
            parts.append(np.concatenate([drawn, np.arange(self.known, self.known + num_new)]))
        self.known += num_new
        tables = np.repeat(np.arange(FEATURES, dtype=np.int32), [len(part) for part in parts])
        return np.concatenate(parts), tables


def tables_of(per_table: int) -> NDArray[np.int32]:
    """int32[F · per_table]."""
    return np.repeat(np.arange(FEATURES, dtype=np.int32), per_table)


@dataclass(frozen=True)
class Step:
    """What one step took, and what memory was like after it."""

    usual: bool
    """False for large ones that only fill."""
    growing: bool
    """Whether the index grew in it."""
    seconds: float
    page_faults: int
    """Pages that were touched first, of 2 MB mostly: the system clears them."""
    within: dict[str, float]
    """Seconds within the methods of WATCHED."""
    rows: int
    resident_bytes: int
    """What the process has more than before the store was opened."""
    used_bytes: int


class Watch:
    """Runs steps on a store and keeps what they took.

    Args:
        before_bytes: what the process had resident before the store was opened.
        most_keys: of one step.
    """

    def __init__(self, store: Store, before_bytes: int, most_keys: int) -> None:
        self.store, self.number = store, 0
        self.steps: list[Step] = []
        self.before_bytes = before_bytes
        self._out = np.zeros((most_keys, store.spec.dim), np.float32)
        self._grads = np.random.default_rng(1).normal(0, 0.01, self._out.shape).astype(np.float32)
        self.before_bytes += 2 * self._out.nbytes
        self._within = dict.fromkeys(WATCHED, 0.0)
        for name in WATCHED:
            self._time(name)

    def run(self, keys: Arrays, *, usual: bool = True) -> float:
        """One step: lookup and, if it is a usual one, update. Returns its seconds."""
        ids, tables = keys
        growing = bool(self.store.state.memory.arrays.state[layout.GROWING])
        self.number += 1
        self._within = dict.fromkeys(WATCHED, 0.0)
        out, grads = self._out[: len(ids)], self._grads[: len(ids)]
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        start = time.perf_counter()
        rows = self.store.lookup(Keys(ids, tables), self.number, out)
        if usual:
            self.store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, self.number))
        seconds = time.perf_counter() - start
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        growing = growing or bool(self.store.state.memory.arrays.state[layout.GROWING])
        self.steps.append(
            Step(
                usual=usual,
                growing=growing,
                seconds=seconds,
                page_faults=faults,
                within=self._within,
                rows=self.store.num_rows,
                resident_bytes=resident_bytes() - self.before_bytes,
                used_bytes=used_bytes(self.store),
            )
        )
        return seconds

    def fill(self, stream: KeyStream, rows: int, per_table: int, num_new: int, fill_keys: int) -> None:
        """Brings the store to at least ``rows`` rows: usual steps where the index grows, large ones elsewhere.

        Args:
            per_table, num_new: ids of each table in a usual step, and new ones among them.
            fill_keys: of a large step, all new.
        """
        state, least_slots = self.store.state.memory.arrays.state, SLOTS_A_KEY * per_table * FEATURES
        while self.store.num_rows < rows:
            slots, growing = int(state[layout.INDEX_SLOTS]), bool(state[layout.GROWING])
            grows_at = 3 * slots // 4 - STEPS_BEFORE * num_new * FEATURES
            usual = slots >= least_slots and (growing or self.store.num_rows >= grows_at)
            if usual and stream.known > per_table:
                self.run(stream.uniform(per_table, num_new))
                continue
            room = rows if slots < least_slots else min(rows, grows_at)
            count = min(fill_keys, room - self.store.num_rows)
            self.run(stream.fresh(max(1, count // FEATURES)), usual=False)

    def usual(self, *, growing: bool) -> list[Step]:
        """Usual steps, in which the index grew or did not."""
        return [step for step in self.steps if step.usual and step.growing == growing]

    def most_per_row(self, *, growing: bool, least_rows: int) -> float | None:
        """The most bytes a row that were ever in use, once the store had so many rows."""
        found = [s.used_bytes / s.rows for s in self.steps if s.growing == growing and s.rows >= least_rows]
        return max(found, default=None)

    def _time(self, name: str) -> None:
        method = getattr(self.store.state.memory, name)

        def timed(*arguments: int) -> None:
            start = time.perf_counter()
            try:
                method(*arguments)
            finally:
                self._within[name] += time.perf_counter() - start

        setattr(self.store.state.memory, name, timed)


def used_bytes(store: Store) -> int:
    """What a store says that it uses."""
    return sum(part["used"] for part in store.memory().values())


def resident_bytes() -> int:
    """Memory of this process."""
    file = Path("/proc/self/statm")
    if file.is_file():
        return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
