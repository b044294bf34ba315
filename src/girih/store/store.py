"""One shard of one group of tables, in one process.

A store returns the rows of keys, and updates rows by gradients. It does not depend on ranks, the network or the loss.
Only one thread may use a store at a time. Its kernels release the GIL, so several shards can run on several threads.

Shapes: U unique keys, W columns of a row that training sees, T tables, S segments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.errors import ConfigError
from girih.kernels.cpu import layout
from girih.kernels.cpu.update import Terms
from girih.store.changes import Changes, changes_of, too_many
from girih.store.clock import Clock, steady_clock
from girih.store.gpu.options import Gpu, GpuTier
from girih.store.keys import Keys, RowUpdate
from girih.store.memory.mapping import ArenaOptions, Heap
from girih.store.memory.pushes import Push, Pushes
from girih.store.snapshot.inherit import inherit
from girih.store.snapshot.restore import RowSource, check_sources, restore
from girih.store.snapshot.snapshot import LiveSnapshot
from girih.store.spec import LAST_STEP, Floats, GroupSpec, Ints, Longs
from girih.store.state import State, StoreCounts, open_state
from girih.store.tiers.tiered_values import Tiers
from girih.store.values import Values

# Comparing two dtypes is ten times faster than comparing a dtype with a type.
_INT32, _INT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


class Store(StoreCounts):
    """The rows of one shard.

    A key without a row reads its initial value, which is a pure function of the key. The key's gradient is dropped. A
    full table with ``max_rows`` refuses keys or evicts rows, depending on its eviction policy. The limit is divided by
    the number of shards and rounded up. No table evicts a row that the same call uses. Policies that count steps never
    evict a row that the same step uses.

    Args:
        spec: the tables and their rows.
        shard, num_shards: the part of all keys that this store holds. The caller routes keys by :func:`shard_of`.
        arena: the memory for the arrays, :class:`Heap` by default.
        tiers: puts the values of most rows into a file. Needs a heap arena. None keeps all values in the arena.
        gpu_tier: puts the values of some rows into GPU memory. Needs a heap arena.
        clock: returns seconds since 1970, for tables whose rows expire after some seconds. None takes the clock of the
            process, or of the attached shared memory.

    Attributes:
        num_peeks, num_absent: the number of keys that this process read with :meth:`peek`, and of those without a row.

    Raises:
        ConfigError: the spec is not supported, or the arena has another layout.
        StorageFullError: there is not enough memory to start.
    """

    def __init__(
        self,
        spec: GroupSpec,
        *,
        shard: int = 0,
        num_shards: int = 1,
        arena: ArenaOptions | Gpu | None = None,
        clock: Clock | None = None,
        tiers: Tiers | None = None,
        gpu_tier: GpuTier | None = None,
    ) -> None:
        self.spec, self.shard, self.num_shards, self._dim = spec, shard, num_shards, spec.dim
        self.num_peeks, self.num_absent = 0, 0
        self.state = _open_state(spec, shard, num_shards, arena, clock, tiers, gpu_tier)

    def lookup(self, keys: Keys, step: int, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for training. Marks the rows as used, and makes rows for new keys that are admitted.

        Args:
            step: the number of the training step, from 1.
            out: float32[U, W], contiguous, output.
            addresses: int64[U], output: the address of each key's float32[W], valid until the next verb. With this
                argument, float32 rows are not copied, and ``out`` has only the remaining rows.

        Returns:
            int32[U]: the row number of each key, or -1 if the key has no row. The numbers are hints for
                :meth:`apply_gradients`.

        Raises:
            ConfigError: an array has a wrong shape or type, or a table number or the step is out of range.
            StorageFullError: there is no memory for more rows. All keys before this point were served.
        """
        keys = self._checked(keys, step)
        _check_out(out, addresses, len(keys.ids), self._dim)
        return self.state.lookup(keys, step, out, addresses)

    def peek(self, keys: Keys, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation and changes nothing. Arguments and result are the same as in :meth:`lookup`."""
        keys = self._checked(keys)
        _check_out(out, addresses, len(keys.ids), self._dim)
        rows = self.state.peek(keys, out, addresses)
        self.num_peeks += len(rows)
        self.num_absent += int(np.count_nonzero(rows < 0))
        return rows

    def fetch(self, keys: Keys) -> None:
        """Starts to read the rows of keys from tiers below memory, for the next :meth:`lookup`.

        This call changes no result. It may run in another thread than the verbs.
        """
        self.state.fetch(self._checked(keys))

    def apply_gradients(self, keys: Keys, change: RowUpdate) -> int:
        """Makes one optimizer step on the row of each key, by its gradient, and sets the row's version to the step.

        If a hint of ``keys`` names a row that now has another key, the store searches for the key. A key without a
        row drops its gradient.

        Returns:
            The number of gradients that this call dropped.

        Raises:
            ConfigError: a push has a number, but the rows are in several tiers or on a GPU. See also
                :meth:`girih.store.memory.pushes.Pushes.taking`.
        """
        keys = self._checked(keys, change.step)
        if change.terms is not None:
            change = _checked_terms(change, change.terms, len(keys.ids), self._dim)
        else:
            grads = _matrix("grads", change.grads, len(keys.ids), self._dim)
            if grads is not change.grads:
                change = change._replace(grads=grads)
        if change.push is not None:
            self._pushes(change.push)
        return self.state.apply_gradients(keys, change)

    def note_push(self, push: Push) -> None:
        """Records a push without keys in this shard as applied. Raises the same errors as :meth:`apply_gradients`."""
        with self.state.memory.changing(), self._pushes(push).taking(push, 0):
            return

    def has_applied(self, push: Push) -> bool:
        """Returns whether a push, or a later push of its lane, was applied completely."""
        return self._pushes(push).last(push.lane) >= push.number

    def forget_pushes(self) -> None:
        """Forgets all pushes, because their sender starts to number them again."""
        if self.state.pushes is not None:
            with self.state.memory.changing():
                self.state.pushes.clear()

    def assign(self, keys: Keys, values: Floats) -> None:
        """Sets the rows of keys to ``values``, float32[U, W]. Makes missing rows without an admission check.

        The optimizer state stays, but FTRL's z is adapted to the new weight. The call counts as a use and a change of
        the rows in the step after the last step seen.

        Raises:
            ConfigError: a table is full and none of its rows may leave. All other keys are assigned.
        """
        keys = self._checked(keys)
        rows = self.state.assign(keys, _matrix("values", values, len(keys.ids), self._dim))
        if (rows < 0).any():
            table = int(keys.tables[np.argmin(rows)])
            most = self.state.layout.kernel.rules[table, layout.MAX_ROWS]
            raise ConfigError(
                f"table {self.spec.tables[table].name!r}: full at {most:,} rows"
                f" in this shard; {(rows < 0).sum():,} of {len(rows):,} keys not assigned; raise max_rows"
            )

    def snapshot(self, directory: str | os.PathLike[str] | None = None) -> LiveSnapshot:
        """Returns a snapshot of the current state, which another thread can read while verbs run. The caller closes it.

        The time to take a snapshot does not grow with the number of rows. Until the snapshot is read, verbs copy rows
        before they change them. The memory for these copies is limited. Copies that do not fit are written to a file
        without a name in ``directory``.

        Raises:
            ConfigError: an earlier snapshot is not closed.
        """
        return self.state.snapshot(directory)

    def note_changes(self, since: int) -> None:
        """Records changes from now on, for :meth:`changes_since`. Forgets earlier records.

        Args:
            since: a name for this moment.

        Raises:
            ConfigError: the rows are in GPU memory. Changes are recorded only for rows in host memory.
        """
        memory = self._noted().memory
        with memory.lock:
            memory.note_changes(since)

    def knows_changes(self, since: int) -> bool:
        """Returns whether :meth:`changes_since` knows the changes since that moment.

        The result is False if

        - recording began at another moment,
        - all rows were replaced since,
        - more than :data:`~girih.store.memory.shard_memory.MOST_LEFT` rows left, or
        - the changes take more than :data:`girih.store.changes.MOST_BYTES`.
        """
        values = self._noted()
        return values.memory.noted_since == since and not too_many(values)

    def changes_since(self, since: int) -> Changes:
        """Copies the changes since that moment. The time grows with the size of the changes.

        Raises:
            ConfigError: the changes are not known; see :meth:`knows_changes`.
        """
        if not self.knows_changes(since):
            raise ConfigError(
                f"group {self.spec.name!r}: changes since {since} are not known; take a snapshot"
            )
        values = self._noted()
        with values.memory.changing():
            return changes_of(values)

    def restore(
        self,
        sources: Sequence[RowSource],
        *,
        optimizer_state: bool = True,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Replaces all rows by the rows that snapshots have for this shard.

        Args:
            sources: snapshots or their files, of any number of shards. If several sources have a key, the last source
                counts. Keys of other shards by :func:`shard_of` are skipped.
            optimizer_state: False loads only the embeddings. The optimizer state then starts from its initial values.
            elsewhere: tables of the sources that other stores hold. This call skips them, and refuses all other
                unknown tables.

        Raises:
            CheckpointError: a file is damaged, or tables, dims, dtypes or optimizers do not match. The store is
                unchanged.
            StorageFullError: there is no memory for all rows. The store holds a part of the rows.
        """
        self.state.memory.check_open()
        if self.state.memory.saving is not None:
            raise ConfigError(f"group {self.spec.name!r}: is being saved; restore when that has ended")
        self.check(sources, optimizer_state=optimizer_state, elsewhere=elsewhere)
        self.state.replace(lambda values: restore(values, sources, optimizer_state))

    def inherit(self, sources: Sequence[RowSource]) -> None:
        """Replaces all rows by the matching columns of an earlier run's rows, as the start of a new run.

        :func:`~girih.store.snapshot.inherit.fit_of` decides which columns match.

        Args:
            sources: snapshots or their files, of any number of shards. Sources with other columns, and unknown
                tables, are skipped.

        Raises:
            CheckpointError: a file is damaged. The store is unchanged.
            StorageFullError: there is no memory for all rows. The store holds a part of the rows.
        """
        self.state.memory.check_open()
        for source in sources:
            source.verify()
        self.state.replace(lambda values: inherit(values, sources))

    def check(
        self, sources: Sequence[RowSource], *, optimizer_state: bool = True, elsewhere: Collection[str] = ()
    ) -> None:
        """Makes the checks of :meth:`restore`, but replaces nothing.

        Raises:
            CheckpointError: for the same reasons as in :meth:`restore`.
        """
        check_sources(self.state.layout.description, sources, optimizer_state, frozenset(elsewhere))

    def close(self) -> None:
        """Releases the arena. Shared memory and files can be attached again later. Rows of a heap arena are lost."""
        self.state.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _checked(self, keys: Keys, step: int = 1) -> Keys:
        """Returns the keys as contiguous arrays, after checking shapes, types and ranges."""
        self.state.memory.check_open()
        ids, tables, counts, rows = keys
        num_keys = len(ids)
        if ids.dtype != _INT64 or ids.shape != (num_keys,):
            raise _mismatch("ids", ids, _INT64, num_keys)
        for name, array in (("tables", tables), ("counts", counts if len(counts) else None), ("rows", rows)):
            if array is not None and (array.dtype != _INT32 or array.shape != (num_keys,)):
                raise _mismatch(name, array, _INT32, num_keys)
        # Kernels do not check bounds. As unsigned numbers, negative table numbers are too large as well.
        if num_keys and int(tables.view(np.uint32).max()) >= len(self.spec.tables):
            raise ConfigError(
                f"group {self.spec.name!r}: table numbers from {tables.min()} to {tables.max()};"
                f" expected 0 to {len(self.spec.tables) - 1}"
            )
        if not 1 <= step <= LAST_STEP:
            raise ConfigError(f"step = {step}: expected 1 to 2³¹ - 1")
        rows = None if rows is None else np.ascontiguousarray(rows)
        return Keys(
            np.ascontiguousarray(ids), np.ascontiguousarray(tables), np.ascontiguousarray(counts), rows
        )

    def _noted(self) -> Values:
        """Returns the values of a store that records changes."""
        if self.state.noted is None:
            raise ConfigError(
                f"group {self.spec.name!r}: rows in GPU memory note no changes, so they cannot be published; use"
                " store.tiers = ['dram'] or ['dram', 'ssd']"
            )
        return self.state.noted

    def _pushes(self, push: Push) -> Pushes:
        """Returns the record of pushes. Raises ConfigError if this store cannot record them."""
        if self.state.pushes is None:
            raise ConfigError(
                f"push {push.number}: only rows in a single host memory record pushes; use a shared or file arena"
            )
        return self.state.pushes


def _open_state(
    spec: GroupSpec,
    shard: int,
    num_shards: int,
    arena: ArenaOptions | Gpu | None,
    clock: Clock | None,
    tiers: Tiers | None,
    gpu_tier: GpuTier | None,
) -> State:
    if (tiers or gpu_tier) and not isinstance(arena, Heap | None):
        raise ConfigError(f"{arena.where}: tiers need private memory; use a heap arena, or one tier")
    heap = arena if isinstance(arena, Heap) else Heap()
    steady = clock or steady_clock
    if gpu_tier is None and not isinstance(arena, Gpu):
        return open_state(spec, shard, num_shards, arena or heap, clock, tiers)
    try:
        from girih.store.gpu.gpu_state import GpuState
        from girih.store.gpu.gpu_tiered_state import GpuTieredState
    except ImportError as error:
        raise ConfigError(f"rows in GPU memory need torch and triton: {error}; pip install triton") from error
    if isinstance(arena, Gpu):
        return GpuState(spec, shard, num_shards, arena, steady)
    host = open_state(spec, shard, num_shards, heap, steady, tiers)
    return host if gpu_tier is None else GpuTieredState(host, gpu_tier, steady)


def _mismatch(name: str, array: NDArray[Any], dtype: np.dtype[Any], *shape: int) -> ConfigError:
    return ConfigError(f"{name}: received {array.dtype}{list(array.shape)}; expected {dtype}{list(shape)}")


def _matrix(name: str, array: Floats, num_rows: int, num_columns: int) -> Floats:
    """Returns the same array, contiguous, after checking its type and shape."""
    if array.dtype != _FLOAT32 or array.shape != (num_rows, num_columns):
        raise _mismatch(name, array, _FLOAT32, num_rows, num_columns)
    return np.ascontiguousarray(array)


def _check_out(out: Floats, addresses: Longs | None, num_keys: int, dim: int) -> None:
    if not out.flags.carray or out.dtype != _FLOAT32 or out.shape != (num_keys, dim):
        raise ConfigError(
            f"out: received {out.dtype}{list(out.shape)}; expected writable float32{[num_keys, dim]}"
        )
    if addresses is None:
        return
    if not addresses.flags.carray:  # writes to a copy would be lost
        raise ConfigError(
            "addresses: received an array in pieces, or one to be read only; expected a writable one"
        )
    if addresses.dtype != _INT64 or addresses.shape != (num_keys,):
        raise _mismatch("addresses", addresses, _INT64, num_keys)


def _checked_terms(change: RowUpdate, terms: Terms, num_keys: int, dim: int) -> RowUpdate:
    matrix, tail = change.grads, terms.tail
    num_terms, num_factors = len(terms.order), len(terms.factors)
    num_tails = len(matrix) if tail.shape[1] else len(tail)
    for name, array, dtype, shape in (
        ("terms: starts", terms.starts, _INT32, (num_keys + 1,)),
        ("terms: order", terms.order, _INT32, (num_terms,)),
        ("terms: factors", terms.factors, _FLOAT32, (num_terms if num_factors else 0,)),
        ("terms: tail", tail, _FLOAT32, (num_tails, tail.shape[1])),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise _mismatch(name, array, dtype, *shape)
    if num_keys and int(terms.starts[-1]) > num_terms:
        raise ConfigError(
            f"terms: {int(terms.starts[-1])} in starts; expected at most {num_terms}, those of order"
        )
    return change._replace(grads=_matrix("grads", matrix, len(matrix), dim - tail.shape[1]))
