"""One shard of one group of tables, in one process.

A store knows no rank, no network and no loss: keys come in, rows go out, gradients come in. It may be used by
one thread at a time; its kernels release the GIL, so that several shards run on several threads.

Shapes: U unique keys, W columns of a row that training sees, T tables, S segments.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from girih.errors import ConfigError
from girih.kernels.cpu import layout
from girih.store.accounting import StoreCounts
from girih.store.changes import Changes, changes_of, too_many
from girih.store.clock import Clock, steady_clock
from girih.store.gpu.options import Gpu, GpuTier
from girih.store.memory.mapping import ArenaOptions, Heap
from girih.store.memory.pushes import Push
from girih.store.rows.row_table import ONCE
from girih.store.snapshot.inherit import inherit
from girih.store.snapshot.restore import RowSource, check_sources, restore
from girih.store.snapshot.snapshot import ArrivingSnapshot, LiveSnapshot, Snapshot
from girih.store.spec import Floats, GroupSpec, Ints, Longs
from girih.store.state import LAST_STEP, GradientTerms, ShardState, open_state
from girih.store.tiers.tiered_state import open_tiered_state
from girih.store.tiers.tiered_values import Tiers

if TYPE_CHECKING:
    from girih.store.gpu.gpu_state import GpuState


class Store(StoreCounts):
    """The rows of one shard.

    A key that has no row reads its initial value, a pure function of the key, and its gradient is dropped. At
    ``max_rows`` (divided by the number of shards, rounded up) a table refuses or evicts as its eviction says,
    but never a row that the same call, or for policies that count steps the same step, uses.

    Args:
        spec: the tables and their rows.
        shard, num_shards: which part of all keys this is; the caller routes keys by :func:`shard_of`.
        arena: where the arrays live; :class:`Heap` by default.
        tiers: has the values of most rows in a file below memory, with a heap arena only; None keeps all in the arena.
        gpu_tier: has those of some rows in GPU memory above, with a heap arena only.
        clock: seconds since 1970, for tables whose rows expire after some seconds; None takes that of the process, or of the shared
            memory that is attached to.

    Attributes:
        on_gpu: whether rows lie in GPU memory, or the hottest of them.
        num_peeks, num_absent: keys that :meth:`peek` was asked for by this process, and those of them that had no row.

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
        arena: ArenaOptions | Gpu | None = None,
        clock: Clock | None = None,
        tiers: Tiers | None = None,
        gpu_tier: GpuTier | None = None,
    ) -> None:
        self.spec, self.shard, self.num_shards, self._dim = spec, shard, num_shards, spec.dim
        self.num_peeks, self.num_absent = 0, 0
        self.on_gpu = isinstance(arena, Gpu) or gpu_tier is not None
        self.state = _open_state(spec, shard, num_shards, arena, clock, tiers, gpu_tier)

    def lookup(
        self,
        ids: Longs,
        tables: Ints,
        counts: Ints | None,
        step: int,
        out: Floats,
        addresses: Longs | None = None,
    ) -> Ints:
        """Reads rows for training: marks them used, and makes rows for new keys that are admitted.

        Args:
            ids: int64[U]; with ``tables``, int32[U], the keys, each once.
            counts: int32[U], how often each key occurs in the batch; None where all occur once.
            step: from 1.
            out: float32[U, W], contiguous, written.
            addresses: int64[U], written: where each key's float32[W] lie, until the next verb. Rows of 32 bits are then
                read where they are, and ``out`` has the others only.

        Returns:
            int32[U]: where the rows are, -1 for none; a hint for :meth:`apply_gradients`.

        Raises:
            ConfigError: arrays of other shapes or types, a table or step out of range.
            StorageFullError: no memory for more rows; the keys before were served.
        """
        ids, tables = self._keys(ids, tables)
        counts = ONCE if counts is None else _checked("counts", counts, np.int32, (len(ids),))
        _check_step(step)
        self._check_out(out, len(ids))
        return self.state.lookup(ids, tables, counts, step, out, _addresses(addresses, len(ids)))

    def peek(self, ids: Longs, tables: Ints, out: Floats, addresses: Longs | None = None) -> Ints:
        """Reads rows for evaluation and changes nothing; arguments and result as in :meth:`lookup`."""
        ids, tables = self._keys(ids, tables)
        self._check_out(out, len(ids))
        rows = self.state.peek(ids, tables, out, _addresses(addresses, len(ids)))
        self.num_peeks += len(rows)
        self.num_absent += int(np.count_nonzero(rows < 0))
        return rows

    def fetch(self, ids: Longs, tables: Ints) -> None:
        """Begins to read, from tiers below memory, the rows of keys that the next :meth:`lookup` will want.

        Changes no result. May be called by another thread than the verbs.

        Args:
            ids, tables: the keys, as in :meth:`lookup`.
        """
        self.state.fetch(*self._keys(ids, tables))

    def apply_gradients(
        self,
        ids: Longs,
        tables: Ints,
        rows: Ints | None,
        grads: Floats | GradientTerms,
        step: int,
        lr_scale: float = 1.0,
        push: Push | None = None,
    ) -> int:
        """One optimizer step on the row of each key, by its gradient; sets the row's version to ``step``.

        ``rows``, int32[U] from :meth:`lookup`, saves the search. Each is checked against its key: where
        another key lives now, the key is searched, and one without a row drops its gradient.

        Args:
            ids, tables: the keys, as in :meth:`lookup`.
            grads: float32[U, W], those of equal keys summed, all finite; or terms to be summed, whose rows a kernel reads unchecked.
            lr_scale: multiplies every learning rate.
            push: what the push is called, which may be sent again: a row that it moved it does not move again, in a later
                process neither.

        Returns:
            How many gradients were dropped now.

        Raises:
            ConfigError: a push to rows in several tiers, or on a GPU; see also :meth:`girih.store.memory.pushes.Pushes.taking`.
        """
        ids, tables = self._keys(ids, tables)
        if isinstance(grads, GradientTerms):
            grads = _checked_terms(grads, len(ids), self._dim)
        else:
            grads = _checked("grads", grads, np.float32, (len(ids), self._dim))
        _check_step(step)
        if rows is not None:
            rows = _checked("rows", rows, np.int32, (len(ids),))
        if push is None:
            return self.state.apply_gradients(ids, tables, rows, grads, step, lr_scale)
        return _state_of_pushes(self, push).apply_push(push, ids, tables, rows, grads, step, lr_scale)

    def note_push(self, push: Push) -> None:
        """Notes as applied a push that has no keys here. Raises as :meth:`apply_gradients` does."""
        with self.state.memory.changing(), _state_of_pushes(self, push).memory.pushes.taking(push, 0):
            return

    def has_applied(self, push: Push) -> bool:
        """Whether a push, or a later one of its lane, was applied whole."""
        return _state_of_pushes(self, push).memory.pushes.last(push.lane) >= push.number

    def forget_pushes(self) -> None:
        """Forgets all pushes: whoever numbered them begins anew."""
        if type(self.state) is ShardState:
            with self.state.memory.changing():
                self.state.memory.pushes.clear()

    def assign(self, ids: Longs, tables: Ints, values: Floats) -> None:
        """Sets the rows of keys to ``values``, float32[U, W], making rows without asking admission.

        Optimizer state stays (FTRL's z is made to agree). It counts as a use, and as a change, in the step
        after the last one seen.

        Raises:
            ConfigError: a table is full and none of its rows may leave; all other keys are assigned.
        """
        ids, tables = self._keys(ids, tables)
        values = _checked("values", values, np.float32, (len(ids), self._dim))
        rows = self.state.assign(ids, tables, values)
        if (rows < 0).any():
            table = int(tables[np.argmin(rows)])
            most = self.state.layout.kernel.rules[table, layout.MAX_ROWS]
            raise ConfigError(
                f"table {self.spec.tables[table].name!r}: full at {most:,} rows"
                f" in this shard; {(rows < 0).sum():,} of {len(ids):,} keys not assigned; raise max_rows"
            )

    def snapshot(self, directory: str | os.PathLike[str] | None = None) -> LiveSnapshot:
        """The whole state as it is now, to be read by another thread while verbs go on; to be closed.

        Taking it costs no time that grows with the rows. Until it was read, rows are copied before they change,
        in bounded memory; what does not fit goes to a file without a name in ``directory``.

        Raises:
            ConfigError: one was taken and not closed.
        """
        state = self.state.at_rest()
        if isinstance(state, ShardState):
            return Snapshot(state, directory)
        return ArrivingSnapshot(state, directory)

    def note_changes(self, since: int) -> None:
        """Keeps notes from now on of what changes, for :meth:`changes_since`; earlier ones are forgotten.

        Args:
            since: a name for this moment.

        Raises:
            ConfigError: rows lie in GPU memory, where nobody notes what changes.
        """
        state = _noting_state(self)
        with state.memory.lock:
            state.memory.note_changes(since)

    def knows_changes(self, since: int) -> bool:
        """Whether :meth:`changes_since` can tell what changed since then.

        Not where notes began at another moment, all rows were replaced since, more than
        :data:`~girih.store.memory.shard_memory.MOST_LEFT` rows left, or what changed takes more than
        :data:`girih.store.changes.MOST_BYTES`.
        """
        state = _noting_state(self)
        return state.memory.noted_since == since and not too_many(state)

    def changes_since(self, since: int) -> Changes:
        """Copies what changed since then; takes time by its size.

        Raises:
            ConfigError: it is not known; see :meth:`knows_changes`.
        """
        if not self.knows_changes(since):
            raise ConfigError(
                f"group {self.spec.name!r}: changes since {since} are not known; take a snapshot"
            )
        state = _noting_state(self)
        with state.memory.changing():
            return changes_of(state)

    def restore(
        self,
        sources: Sequence[RowSource],
        *,
        optimizer_state: bool = True,
        elsewhere: Collection[str] = (),
    ) -> None:
        """Replaces everything by what snapshots hold for this shard.

        Args:
            sources: snapshots or their files, of any number of shards; if a key is in several, the last one counts. Keys that :func:`shard_of` gives to others are left out.
            optimizer_state: False takes the embeddings alone and begins the optimizer anew.
            elsewhere: tables of the sources that other stores hold, to be left out; any other table is refused.

        Raises:
            CheckpointError: a damaged file, or tables, dims, dtypes or optimizers that do not match. The
                store is as before.
            StorageFullError: no memory; the store holds a part.
        """
        self.state.memory.check_open()
        if self.state.memory.saving is not None:
            raise ConfigError(f"group {self.spec.name!r}: is being saved; restore when that has ended")
        self.check(sources, optimizer_state=optimizer_state, elsewhere=elsewhere)
        self.state.replace(lambda state: restore(state, sources, optimizer_state))

    def inherit(self, sources: Sequence[RowSource]) -> None:
        """Replaces everything by what fits of an earlier run's rows, with which a new run begins: see :func:`~girih.store.snapshot.inherit.fit_of`.

        Args:
            sources: snapshots or their files, of any number of shards; those with other columns, and tables that are not here, are
                left out.

        Raises:
            CheckpointError: a damaged file; the store is as before. StorageFullError: no memory; the store holds a part.
        """
        self.state.memory.check_open()
        for source in sources:
            source.verify()
        self.state.replace(lambda state: inherit(state, sources))

    def check(
        self, sources: Sequence[RowSource], *, optimizer_state: bool = True, elsewhere: Collection[str] = ()
    ) -> None:
        """Refuses what :meth:`restore` would refuse, but replaces nothing.

        Raises:
            CheckpointError: see there.
        """
        check_sources(self.state, sources, optimizer_state, frozenset(elsewhere))

    def close(self) -> None:
        """Lets go of the arena: shared memory and files can be attached to again; a heap store is gone."""
        self.state.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _keys(self, ids: Longs, tables: Ints) -> tuple[Longs, Ints]:
        self.state.memory.check_open()
        ids = _checked("ids", ids, np.int64, (len(ids),))
        tables = _checked("tables", tables, np.int32, (len(ids),))
        # Kernels do not check bounds; as unsigned numbers, negative ones are large too.
        if len(tables) and int(tables.view(np.uint32).max()) >= len(self.spec.tables):
            raise ConfigError(
                f"group {self.spec.name!r}: table numbers from {tables.min()} to {tables.max()};"
                f" expected 0 to {len(self.spec.tables) - 1}"
            )
        return ids, tables

    def _check_out(self, out: Floats, num_keys: int) -> None:
        shape = (num_keys, self._dim)
        if out.dtype != np.float32 or out.shape != shape or not out.flags.carray:
            raise ConfigError(
                f"out: received {out.dtype}{list(out.shape)}; expected writable float32{list(shape)}"
            )


def _noting_state(store: Store) -> ShardState:
    """The state of a store that can note changes."""
    if not isinstance(store.state, ShardState) or store.on_gpu:
        raise ConfigError(
            f"group {store.spec.name!r}: rows in GPU memory note no changes, so they cannot be published; use"
            " store.tiers = ['dram'] or ['dram', 'ssd']"
        )
    return store.state


def _state_of_pushes(store: Store, push: Push) -> ShardState:
    """The state of a store that can number pushes."""
    if type(store.state) is not ShardState:
        raise ConfigError(
            f"push {push.number}: only rows that lie in one memory of the host know of pushes; use a shared or file arena"
        )
    return store.state


def _open_state(
    spec: GroupSpec,
    shard: int,
    num_shards: int,
    arena: ArenaOptions | Gpu | None,
    clock: Clock | None,
    tiers: Tiers | None,
    gpu_tier: GpuTier | None,
) -> ShardState | GpuState:
    if (tiers or gpu_tier) and not isinstance(arena, Heap | None):
        raise ConfigError(f"{arena.where}: tiers need private memory; use a heap arena, or one tier")
    heap = arena if isinstance(arena, Heap) else Heap()
    steady = clock or steady_clock
    if isinstance(arena, Gpu):
        with _torch_and_triton():
            from girih.store.gpu.gpu_state import open_gpu_state
        return open_gpu_state(spec, shard, num_shards, arena, steady)
    if gpu_tier is not None:
        with _torch_and_triton():
            from girih.store.gpu_tiers.gpu_tiered_state import open_gpu_tiered_state
        return open_gpu_tiered_state(spec, shard, num_shards, heap, steady, gpu_tier, tiers)
    if tiers is not None:
        return open_tiered_state(spec, shard, num_shards, heap, steady, tiers)
    return open_state(spec, shard, num_shards, arena or heap, clock)


@contextlib.contextmanager
def _torch_and_triton() -> Iterator[None]:
    """Refuses rows in GPU memory where a package is missing that they need."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"rows in GPU memory need torch and triton: {error}; pip install triton") from error


def _checked(name: str, array: NDArray[Any], dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    if array.dtype != dtype or array.shape != shape:
        raise ConfigError(
            f"{name}: received {array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}{list(shape)}"
        )
    return np.ascontiguousarray(array)


def _addresses(addresses: Longs | None, num_keys: int) -> Longs | None:
    if addresses is not None and not addresses.flags.carray:  # a copy would be written, and lost
        raise ConfigError(
            "addresses: received an array in pieces, or one to be read only; expected a writable one"
        )
    return None if addresses is None else _checked("addresses", addresses, np.int64, (num_keys,))


def _checked_terms(grads: GradientTerms, num_keys: int, dim: int) -> GradientTerms:
    matrix, terms = grads
    num_tail_columns = terms.tail.shape[1]
    matrix = _checked("grads", matrix, np.float32, (len(matrix), dim - num_tail_columns))
    num_terms, num_tails = len(terms.order), len(matrix) if num_tail_columns else len(terms.tail)
    _checked("terms: starts", terms.starts, np.int32, (num_keys + 1,))
    _checked("terms: order", terms.order, np.int32, (num_terms,))
    _checked("terms: factors", terms.factors, np.float32, (num_terms if len(terms.factors) else 0,))
    _checked("terms: tail", terms.tail, np.float32, (num_tails, terms.tail.shape[1]))
    if num_keys and int(terms.starts[-1]) > num_terms:
        raise ConfigError(
            f"terms: {int(terms.starts[-1])} in starts; expected at most {num_terms}, those of order"
        )
    return GradientTerms(matrix, terms)


def _check_step(step: int) -> None:
    if not 1 <= step <= LAST_STEP:
        raise ConfigError(f"step = {step}: expected 1 to 2³¹ - 1")
