"""A store that is a dictionary: slow, obviously right, one key at a time, in the order of :class:`Store`'s words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from girih.errors import CheckpointError, ConfigError
from girih.store import GroupSpec, Keys, RowUpdate, Segment
from support.fake_snapshot import FakeSnapshot, Row
from support.twins import (
    Floats,
    ftrl_settle,
    initial_value,
    key_hash,
    mix,
    nearest_16,
    optimizer_state,
    optimizer_step,
    shard_of_key,
    stochastic_16,
    stream,
    uniform01,
)

COUNTERS = ("lookups", "hits", "new", "refused", "full", "evicted", "expired", "updates", "dropped")
Ids = NDArray[np.int64]
Tables = NDArray[np.int32]


class FakeStore:
    """Answers the verbs of :class:`girih.store.Store`, for one shard; arguments and results are the same.

    Attributes:
        tables: a dictionary of rows by id for each table; the oldest in use first, where the policy asks.
        seen: how often keys without a row were seen, by cell, for each table.
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        shard: int = 0,
        num_shards: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spec, self.shard, self.num_shards, self.clock = spec, shard, num_shards, clock
        self.last_step = 0
        self._clear()

    def lookup(self, keys: Keys, step: int, out: Floats) -> NDArray[np.int32]:
        """Reads rows for training; the row numbers that it returns say only whether there is a row."""
        self.last_step = max(self.last_step, step)
        for table, spec in enumerate(self.spec.tables):
            age = getattr(spec.eviction, "steps", None) or getattr(spec.eviction, "seconds", None) or math.inf
            for key_id, row in list(self.tables[table].items()):
                if self._now(table, step) - row.last_used <= age:
                    break
                del self.tables[table][key_id]
                self._counts[table]["expired"] += 1
        return self._read(keys, step, out)

    def peek(self, keys: Keys, out: Floats) -> NDArray[np.int32]:
        """Reads rows for evaluation."""
        for position, (key_id, table) in enumerate(_pairs(keys)):
            row = self.tables[table].get(key_id)
            out[position] = self._initial(table, key_id) if row is None else row.value
        return self._found(keys)

    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Moves rows by gradients; hints are ignored."""
        grads, step, lr_scale = change.grads, change.step, change.lr_scale
        self.last_step = max(self.last_step, step)
        dropped = 0
        for (key_id, table), grad in zip(_pairs(keys), grads, strict=True):
            row = self.tables[table].get(key_id)
            self._counts[table]["dropped" if row is None else "updates"] += 1
            if row is None:
                dropped += 1
                continue
            for number, segment, columns in self.segments():
                optimizer_step(
                    segment.optimizer, row.value[columns], row.state[number], grad[columns], step, lr_scale
                )
            if self.spec.dtype != "float32":
                seed = self.spec.table_seed(table)
                row.value[:] = stochastic_16(row.value, self.spec.dtype, seed, key_id, step)
            row.version = max(row.version, step)
        return dropped

    def assign(self, keys: Keys, values: Floats) -> None:
        """Sets rows, making them without asking admission."""
        step = self.last_step + 1
        self._read(Keys(keys.ids, keys.tables), step, np.empty_like(values), forced=True)
        for (key_id, table), value in zip(_pairs(keys), values, strict=True):
            if key_id in self.tables[table]:
                row = self.tables[table][key_id]
                row.value[:] = nearest_16(value, self.spec.dtype)
                row.version = max(row.version, step)
                for number, segment, columns in self.segments():
                    if segment.optimizer.name == "ftrl":
                        ftrl_settle(segment.optimizer, value[columns], row.state[number])
        missing = self._found(keys) < 0
        if missing.any():
            table = int(keys.tables[np.argmax(missing)])
            raise ConfigError(
                f"table {self.spec.tables[table].name!r}: full at {self._max_rows(table):,} rows in this shard;"
                f" {missing.sum():,} of {len(missing):,} keys not assigned; raise max_rows"
            )

    def evict(self, ids: Ids, tables: Tables) -> int:
        """Removes keys; returns how many had a row."""
        found = [t for i, t in _pairs(Keys(ids, tables)) if self.tables[t].pop(i, None) is not None]
        for table in found:
            self._counts[table]["evicted"] += 1
        return len(found)

    def snapshot(self, directory: object = None) -> FakeSnapshot:
        """A copy of everything."""
        tables = [{i: row.copy() for i, row in rows.items()} for rows in self.tables]
        seen, counts = [dict(cells) for cells in self.seen], [dict(counts) for counts in self._counts]
        return FakeSnapshot(self.spec, self.shard, self.num_shards, self.last_step, tables, seen, counts)

    def restore(self, sources: Sequence[FakeSnapshot], *, elsewhere: Collection[str] = ()) -> None:
        """Replaces everything by what snapshots hold for this shard."""
        names = [table.name for table in self.spec.tables]
        theirs = {table.name for source in sources for table in source.spec.tables}
        for name in theirs - set(names) - set(elsewhere):
            raise CheckpointError(f"table {name!r} is not in this model's group")
        for name in set(names) - theirs:
            raise CheckpointError(f"{'snapshots' if sources else 'no snapshot'}: table {name!r} is missing")
        self._clear()
        self.last_step = max((source.last_step for source in sources), default=0)
        for table, name in enumerate(names):
            parts = [(s, [t.name for t in s.spec.tables]) for s in sources]
            own = [(source, found.index(name)) for source, found in parts if name in found]
            self._restore_table(table, own)

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return sum(map(len, self.tables))

    def num_rows_of(self, table: int) -> int:
        """Rows of one table."""
        return len(self.tables[table])

    def counters(self, table: int | None = None) -> dict[str, int]:
        """Counts of what happened so far, in one table or in all."""
        chosen = self._counts if table is None else self._counts[table : table + 1]
        return {name: sum(counts[name] for counts in chosen) for name in COUNTERS}

    def segments(self) -> Iterator[tuple[int, Segment, slice]]:
        """(number, segment, its columns)."""
        start = 0
        for number, segment in enumerate(self.spec.segments):
            yield number, segment, slice(start, start + segment.dim)
            start += segment.dim

    def close(self) -> None:
        """No-op."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _clear(self) -> None:
        self.tables: list[dict[int, Row]] = [{} for _ in self.spec.tables]
        self.seen: list[dict[int, int]] = [{} for _ in self.spec.tables]
        self._counts = [dict.fromkeys(COUNTERS, 0) for _ in self.spec.tables]
        self.last_step = 0

    def _max_rows(self, table: int) -> float:
        bound = getattr(self.spec.tables[table].eviction, "max_rows", None)
        return math.inf if bound is None else -(-bound // self.num_shards)

    def _now(self, table: int, step: int) -> int:
        in_seconds = getattr(self.spec.tables[table].eviction, "seconds", None) is not None
        return int(self.clock()) - 1577836800 if in_seconds else step

    def _initial(self, table: int, key_id: int) -> Floats:
        return nearest_16(initial_value(self.spec, table, key_id), self.spec.dtype)

    def _found(self, keys: Keys) -> NDArray[np.int32]:
        return np.array([0 if i in self.tables[t] else -1 for i, t in _pairs(keys)], np.int32)

    def _read(self, asked: Keys, step: int, out: Floats, forced: bool = False) -> NDArray[np.int32]:
        counts = asked.counts.tolist() or [1] * len(asked.ids)
        keys = list(zip(_pairs(asked), counts, strict=True))
        used: set[tuple[int, int]] = set()
        for position, ((key_id, table), count) in enumerate(keys):
            rows, policy = self.tables[table], self.spec.tables[table].eviction
            self._counts[table]["lookups"] += not forced
            if key_id in rows:
                self._counts[table]["hits"] += not forced
                row = rows[key_id]
                row.last_used = max(row.last_used, self._now(table, step))
                row.count += count
                if policy is not None and policy.name in ("lru", "ttl"):
                    rows[key_id] = rows.pop(key_id)
                used.add((key_id, table))
                out[position] = row.value
        for position, ((key_id, table), count) in enumerate(keys):
            if (key_id, table) in used:
                out[position] = self.tables[table][key_id].value
                continue
            value = out[position] = self._initial(table, key_id)
            if not forced and not self._admits(key_id, table, count, step):
                self._counts[table]["refused"] += 1
            elif not self._has_room(table, step, used):
                self._counts[table]["full"] += not forced
            else:
                state = [optimizer_state(s.optimizer, value[columns]) for _, s, columns in self.segments()]
                self.tables[table][key_id] = Row(value.copy(), state, self._now(table, step), count, step)
                self._counts[table]["new"] += 1
                used.add((key_id, table))
        return self._found(asked)

    def _admits(self, key_id: int, table: int, count: int, step: int) -> bool:
        rule: Any = self.spec.tables[table].admission
        if rule is None:
            return True
        if rule.name == "probability":
            draw = uniform01(mix(mix(stream(self.spec.table_seed(table), key_id)) ^ mix(step)))
            return bool(draw < 1 - (1 - rule.p) ** count)
        blocks = -(-rule.cells // 4096)
        size = -(-rule.cells // blocks)
        hashed = key_hash(key_id, table)
        block = ((hashed >> 32) * blocks) >> 32
        cells = [block * size + ((((mix(hashed) >> (16 * i)) & 0xFFFF) * size) >> 16) for i in range(4)]
        seen = self.seen[table]
        admitted = min(seen.get(cell, 0) for cell in cells) + count >= rule.count
        for cell in cells if not admitted else ():
            seen[cell] = min(255, seen.get(cell, 0) + count)
        return bool(admitted)

    def _has_room(self, table: int, step: int, used: set[tuple[int, int]]) -> bool:
        rows, policy = self.tables[table], self.spec.tables[table].eviction
        if len(rows) < self._max_rows(table):
            return True
        if policy is None or policy.name == "none":
            return False
        if policy.name == "lfu":
            leaving = self._least_used(table, step)[: max(1, int(self._max_rows(table)) // 16)]
        else:
            oldest = next(iter(rows))
            in_use = (oldest, table) in used
            if getattr(policy, "seconds", None) is None:
                in_use |= rows[oldest].last_used >= step
            leaving = [] if in_use else [oldest]
        self._drop(table, leaving)
        return bool(leaving)

    def _least_used(self, table: int, step: int) -> list[int]:
        rows = self.tables[table]
        free = [key_id for key_id, row in rows.items() if row.last_used < step]
        return sorted(free, key=lambda key_id: (rows[key_id].count, rows[key_id].last_used))

    def _drop(self, table: int, leaving: Sequence[int]) -> None:
        for key_id in leaving:
            del self.tables[table][key_id]
        self._counts[table]["evicted"] += len(leaving)

    def _restore_table(self, table: int, sources: Sequence[tuple[FakeSnapshot, int]]) -> None:
        policy, rows = self.spec.tables[table].eviction, self.tables[table]
        listed = policy is not None and policy.name != "none"
        givers = set[int]()
        for number, (source, theirs) in enumerate(sources):
            for key_id, row in source.tables[theirs].items():
                if shard_of_key(key_id, table, self.num_shards) == self.shard:
                    rows.pop(key_id, None)
                    rows[key_id] = row.copy()
                    givers.add(number)
        if listed and len(givers) > 1:
            self.tables[table] = rows = dict(sorted(rows.items(), key=lambda item: item[1].last_used))
        latest = {(source.num_shards, source.shard): (source, theirs) for source, theirs in sources}
        for source, theirs in latest.values() if latest else ():
            for cell, count in source.seen[theirs].items() if theirs == table else ():
                self.seen[table][cell] = min(255, self.seen[table].get(cell, 0) + count)
        mine = [latest[place] for place in latest if place == (self.num_shards, self.shard)]
        for source, theirs in mine or (latest.values() if self.shard == 0 else ()):
            for name in COUNTERS:
                self._counts[table][name] += source.counts[theirs][name]
        surplus = len(rows) - self._max_rows(table)
        if listed and surplus > 0:
            leaving = (
                list(rows) if policy is None or policy.name != "lfu" else self._least_used(table, 1 << 31)
            )
            self._drop(table, leaving[: int(surplus)])


def _pairs(keys: Keys) -> list[tuple[int, int]]:
    return list(zip(keys.ids.tolist(), keys.tables.tolist(), strict=True))
