"""One shard of one group of tables, in one process.

A store knows no rank, no network and no loss: keys come in, rows go out, gradients come in. It may be used by
one thread at a time; its kernels release the GIL, so that several shards run on several threads.

Shapes: U unique keys, W columns of a row that training sees, T tables, S segments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import ConfigError
from girih.kernels.cpu import index, update
from girih.kernels.cpu import layout as at
from girih.store.accounting import row_bytes
from girih.store.memory.arena import ArenaOptions, ArenaShape, Heap, open_arena
from girih.store.memory.shard_memory import ShardMemory
from girih.store.rows.record import bare, describe, fingerprint, hyper_rows, row_layout
from girih.store.rows.row_table import RowTable
from girih.store.snapshot.restore import Keep, Source, restore
from girih.store.snapshot.snapshot import Snapshot
from girih.store.snapshot.still import StillSnapshot
from girih.store.spec import GroupSpec

_LAST_STEP = (1 << 31) - 1
_EPOCH_S = 1_577_836_800  # seconds are counted from 2020, so that they fit int32 until 2088
_NO_COUNTS: NDArray[np.int32] = np.zeros(0, np.int32)


class Store:
    """The rows of one shard.

    A key that has no row reads its initial value, a pure function of the key, and its gradient is dropped. At
    ``max_rows`` (divided by the number of shards, rounded up) a table refuses or evicts as its eviction says,
    but never a row that the same call, or for policies that count steps the same step, uses.

    Args:
        spec: the tables and their rows.
        shard, num_shards: which part of all keys this is; the caller routes keys by :func:`shard_of`.
        arena: where the arrays live; :class:`Heap` by default.
        clock: seconds since 1970, for tables whose rows live for so many seconds.

    Raises:
        ConfigError: a spec that cannot be held, or an arena of another layout.
        StorageFullError: no memory to begin with.
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        shard: int = 0,
        num_shards: int = 1,
        arena: ArenaOptions | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spec = spec
        self.shard = shard
        self.num_shards = num_shards
        self.layout = row_layout(spec, shard, num_shards)
        self.description = describe(spec, self.layout, shard, num_shards)
        bound_to = bare(self.description)
        shape = ArenaShape(
            description=bound_to,
            fingerprint=fingerprint(bound_to),
            num_words=self.layout.num_words,
            tables_bytes=8 * at.TABLE_COLUMNS * len(spec.tables),
            cells_bytes=self.layout.num_cells,
        )
        self.space = ShardMemory(open_arena(arena or Heap(), shape), spec.dim, self.layout.num_words)
        self._clock = clock
        self._rules = self.layout.kernel.rules
        self._in_seconds = self._rules[:, at.IN_SECONDS] != 0
        self.first_hyper = hyper_rows(spec, 1.0, 1)
        self.residents = RowTable(self.space, self.layout, self.first_hyper)

    # Verbs.

    def lookup(
        self,
        ids: NDArray[np.int64],
        tables: NDArray[np.int32],
        counts: NDArray[np.int32] | None,
        step: int,
        out: NDArray[np.float32],
    ) -> NDArray[np.int32]:
        """Reads rows for training: marks them used, and makes rows for new keys that are admitted.

        Args:
            ids: int64[U]; with ``tables``, int32[U], the keys, each once.
            counts: int32[U], how often each key occurs in the batch; None where all occur once.
            step: from 1.
            out: float32[U, W], contiguous, written.

        Returns:
            int32[U]: where the rows are, -1 for none; a hint for :meth:`apply_gradients`.

        Raises:
            ConfigError: arrays of other shapes or types, a table or step out of range.
            StorageFullError: no memory for more rows; the keys before were served.
        """
        ids, tables = self._keys(ids, tables)
        counts = _NO_COUNTS if counts is None else _checked("counts", counts, np.int32, (len(ids),))
        _check_step(step)
        self._check_out(out, len(ids))
        now = self._now(step)
        with self.space.changing(step):
            self.residents.expire(now)
            return self.residents.read(ids, tables, counts, now, step, out, forced=False)

    def peek(
        self, ids: NDArray[np.int64], tables: NDArray[np.int32], out: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """Reads rows for evaluation and changes nothing; arguments and result as in :meth:`lookup`."""
        ids, tables = self._keys(ids, tables)
        self._check_out(out, len(ids))
        return self.residents.peek(ids, tables, out)

    def apply_gradients(
        self,
        ids: NDArray[np.int64],
        tables: NDArray[np.int32],
        rows: NDArray[np.int32] | None,
        grads: NDArray[np.float32],
        step: int,
        lr_scale: float = 1.0,
    ) -> int:
        """One optimizer step on the row of each key, by its gradient; sets the row's version to ``step``.

        ``rows``, int32[U] from :meth:`lookup`, saves the search. Each is checked against its key: where
        another key lives now, the key is searched, and one without a row drops its gradient.

        Args:
            ids, tables: the keys, as in :meth:`lookup`.
            grads: float32[U, W], those of equal keys summed, all finite.
            lr_scale: multiplies every learning rate.

        Returns:
            How many gradients were dropped.
        """
        ids, tables = self._keys(ids, tables)
        grads = _checked("grads", grads, np.float32, (len(ids), self.layout.num_columns))
        _check_step(step)
        if rows is None:
            rows = self._find(ids, tables)
        else:
            rows = _checked("rows", rows, np.int32, (len(ids),))
        hyper = hyper_rows(self.spec, lr_scale, step)
        with self.space.changing(step):
            dropped, kernel = 0, self.layout.kernel
            for part in self.space.stretches(len(ids), 1):
                dropped += update.apply_gradients(
                    self.space.arrays, kernel, ids[part], tables[part], rows[part], grads[part], hyper, step
                )
            return dropped

    def assign(self, ids: NDArray[np.int64], tables: NDArray[np.int32], values: NDArray[np.float32]) -> None:
        """Sets the rows of keys to ``values``, float32[U, W], making rows without asking admission.

        Optimizer state stays (FTRL's z is made to agree). It counts as a use, and as a change, in the step
        after the last one seen.

        Raises:
            ConfigError: a table is full and none of its rows may leave; all other keys are assigned.
        """
        ids, tables = self._keys(ids, tables)
        values = _checked("values", values, np.float32, (len(ids), self.layout.num_columns))
        step = min(self.last_step + 1, _LAST_STEP)
        counters = self.space.arrays.tables
        with self.space.changing():
            reads = counters[:, [at.LOOKUPS, at.HITS, at.FULL]]
            rows = self.residents.read(
                ids, tables, _NO_COUNTS, self._now(step), step, np.empty_like(values), forced=True
            )
            counters[:, [at.LOOKUPS, at.HITS, at.FULL]] = reads
            for part in self.space.stretches(len(ids), 1):
                update.assign(
                    self.space.arrays,
                    self.layout.kernel,
                    rows[part],
                    values[part],
                    values[part].view(np.uint32),
                    self.first_hyper,
                    step,
                )
        if (rows < 0).any():
            table = int(tables[np.argmin(rows)])
            raise ConfigError(
                f"table {self.spec.tables[table].name!r}: full at {self._rules[table, at.MAX_ROWS]:,} rows"
                f" in this shard; {(rows < 0).sum():,} of {len(ids):,} keys not assigned; raise max_rows"
            )

    def evict(self, ids: NDArray[np.int64], tables: NDArray[np.int32]) -> int:
        """Removes keys; returns how many had a row."""
        ids, tables = self._keys(ids, tables)
        with self.space.changing():
            rows = np.unique(self._find(ids, tables))
            return self.residents.drop(rows)

    def snapshot(self, directory: str | os.PathLike[str]) -> Snapshot:
        """The whole state as it is now, to be read by another thread while verbs go on; to be closed.

        Taking it costs no time that grows with the rows. Until it was read, rows are copied before they change,
        in bounded memory; what does not fit goes to a file without a name in ``directory``.

        Raises:
            ConfigError: one was taken and not closed.
        """
        counters = [self.counters(table) for table in range(len(self.spec.tables))]
        return Snapshot(self.space, self.layout, self.description, counters, directory)

    def still_snapshot(self) -> StillSnapshot:
        """The whole state as columns, read chunk by chunk; no verb may change rows until it was read."""
        return self.delta_since(None)

    def delta_since(self, version: int | None) -> StillSnapshot:
        """As :meth:`snapshot`, but only rows that were made or updated in a step after ``version``.

        It does not tell which rows have left since.
        """
        self.space.check_open()
        counters = [self.counters(table) for table in range(len(self.spec.tables))]
        return StillSnapshot(self.space, self.layout, self.description, counters, version)

    def restore(
        self,
        sources: Sequence[Source],
        keep: Keep | None = None,
        *,
        optimizer_state: bool = True,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Replaces everything by what snapshots hold for this shard.

        Args:
            sources: snapshots or their files, of any number of shards; where a key is in several (a delta
                after its base), the last one counts.
            keep: given int64[K] ids and int32[K] table numbers of this store, the bool[K] mask of keys to
                take; by default those that :func:`shard_of` gives to this shard.
            optimizer_state: False takes the embeddings alone and begins the optimizer anew.
            elsewhere: tables of the sources that other stores hold, to be left out; any other table is refused.

        Raises:
            CheckpointError: a damaged file, or tables, dims, dtypes or optimizers that do not match. The
                store is as before.
            StorageFullError: no memory; the store holds a part.
        """
        self.space.check_open()
        if self.space.saving is not None:
            raise ConfigError(f"group {self.spec.name!r}: is being saved; restore when that has ended")
        with self.space.changing():
            restore(self, sources, keep, optimizer_state, frozenset(elsewhere))

    # What it holds.

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return int(self.space.arrays.state[at.NUM_ROWS])

    def num_rows_of(self, table: int) -> int:
        """Rows of one table."""
        return int(self.space.arrays.tables[table, at.TABLE_ROWS])

    @property
    def last_step(self) -> int:
        """The largest step seen; 0 before the first."""
        return int(self.space.arrays.state[at.LAST_STEP])

    def counters(self, table: int | None = None) -> dict[str, int]:
        """What happened so far, in one table or in all.

        ``lookups`` keys read for training, of which ``hits`` had a row, ``new`` got one, ``refused`` were not
        admitted and ``full`` found their table full; rows ``evicted`` and ``expired``; gradients applied
        (``updates``) and ``dropped``.
        """
        tables = self.space.arrays.tables
        chosen = tables if table is None else tables[table : table + 1]
        return {name: int(chosen[:, column].sum()) for name, column in at.COUNTERS.items()}

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes ``used`` and ``reserved`` by part: all memory of this store, but for what a call holds.

        Columns of rows have the names of a snapshot's (``ids``, ``embedding``, ``embedding.sum``, …), beside
        ``neighbours`` and ``padding``; for the other parts see :meth:`ShardMemory.used_bytes`. Private memory is
        used once it was touched, memory of Bloom filters too, though it counts as a whole.
        """
        used, reserved = self.space.used_bytes(), self.space.reserved_bytes()
        used["scratch"] = reserved["scratch"] = self.residents.scratch_bytes
        columns = row_bytes(self.description)
        for bytes_of in (used, reserved):
            num_rows = bytes_of.pop("rows") // sum(columns.values())
            bytes_of.update({name: size * num_rows for name, size in columns.items()})
        return {part: {"used": used[part], "reserved": reserved[part]} for part in used}

    def close(self) -> None:
        """Lets go of the arena: shared memory and files can be attached to again; a heap store is gone."""
        self.space.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside.

    def _find(self, ids: NDArray[np.int64], tables: NDArray[np.int32]) -> NDArray[np.int32]:
        rows = np.empty(len(ids), np.int32)
        index.find_all(self.space.arrays, ids, tables, rows)
        return rows

    def _now(self, step: int) -> NDArray[np.int64]:
        now = np.full(len(self._rules), step, np.int64)
        if self._in_seconds.any():
            now[self._in_seconds] = int(self._clock()) - _EPOCH_S
        return now

    def _keys(
        self, ids: NDArray[np.int64], tables: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        self.space.check_open()
        ids = _checked("ids", ids, np.int64, (len(ids),))
        tables = _checked("tables", tables, np.int32, (len(ids),))
        # Kernels do not check bounds; as unsigned numbers, negative ones are large too.
        if len(tables) and int(tables.view(np.uint32).max()) >= len(self.spec.tables):
            raise ConfigError(
                f"group {self.spec.name!r}: table numbers from {tables.min()} to {tables.max()};"
                f" expected 0 to {len(self.spec.tables) - 1}"
            )
        return ids, tables

    def _check_out(self, out: NDArray[np.float32], num_keys: int) -> None:
        shape = (num_keys, self.layout.num_columns)
        if (
            out.dtype != np.float32
            or out.shape != shape
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise ConfigError(
                f"out: received {out.dtype}{list(out.shape)}; expected writable float32{list(shape)}"
            )


def _checked(name: str, array: NDArray[Any], dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    if array.dtype != dtype or array.shape != shape:
        raise ConfigError(
            f"{name}: received {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}{list(shape)}"
        )
    return np.ascontiguousarray(array)


def _check_step(step: int) -> None:
    if not 1 <= step <= _LAST_STEP:
        raise ConfigError(f"step = {step}: expected 1 to 2³¹ - 1")
