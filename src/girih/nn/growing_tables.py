"""Tables that grow, in host memory or in the memory of a GPU. Several modules may share them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from girih.errors import ConfigError, nearest
from girih.kernels.cpu import ahead
from girih.models.needs import EMBEDDING, of_all
from girih.nn.inputs import integers
from girih.nn.refusals import UNCAPTURED
from girih.optim import SparseOptimizer
from girih.schema import Categorical, Schema
from girih.sparse.groups.embedding_group import AnyGroup
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import Group, pack
from girih.sparse.halves.local import open_group
from girih.sparse.options import StoreOptions
from girih.store import Keys, LiveSnapshot, SnapshotFile, Store, shard_of
from girih.store.clock import refuse_expired
from girih.store.snapshot.file import add_newest_uses
from girih.tables import Table


def tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors in girih's objects, and in lists and dicts, each once. ``seen`` is for internal use."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts: Iterable[Any] = value if isinstance(value, list | tuple) else ()
    if isinstance(value, dict):
        parts = value.values()
    elif type(value).__module__.startswith("girih."):
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, seen)


NO_LABEL = ""
"""Name of the label of a schema without labels. No feature can have this name."""
HOST = torch.device("cpu")


class TableReader:
    """The groups of tables that some features read.

    Attributes:
        groups: over the present shards of the rows.
    """

    def __init__(self, packed: Sequence[Group], shards: LocalShards, device: str) -> None:
        self._packed = packed
        self.follow(shards, device)

    def follow(self, shards: LocalShards, device: str) -> None:
        """Switches to other shards. ``device`` is the argument of :func:`~girih.sparse.halves.local.open_group`."""
        self.groups: list[AnyGroup] = [
            open_group(device, group, stores, shards.pool)
            for group, stores in zip(self._packed, shards.stores, strict=True)
        ]


class GrowingTables:
    """The tables of some features, packed into groups.

    Attributes:
        schema: features and tables.
        groups: the tables, packed.
        step: number of their last update.
        shards: all rows; replaced when rows move.
        on_gpu: True if the rows are in GPU memory.
        device: device of the outputs.
    """

    _last_stream: Any

    def __init__(
        self,
        features: Sequence[Categorical],
        tables: Sequence[Table],
        optimizer: SparseOptimizer,
        seed: int,
        options: StoreOptions,
    ) -> None:
        if options.on_gpu and options.is_tiered:
            raise ConfigError(
                f"store: tiers = {list(options.tiers or ())}: modules have no tiers below GPU memory; use ('gpu',)"
            )
        self.schema = Schema(features, NO_LABEL, tables)
        self._pack = partial(pack, optimizer=optimizer, seed=seed)
        self.groups = self._pack(self.schema, of_all(self.schema, EMBEDDING))
        self._options = options
        self._readers: weakref.WeakSet[TableReader] = weakref.WeakSet()
        self.step = 0
        self._last_stream: Any = None  # the last stream on the GPU that has the rows
        self._newest: dict[str, int] = {}  # last use of loaded rows, until training reads them
        self._settle(self._opened(on_gpu=options.on_gpu), on_gpu=options.on_gpu)

    @property
    def stays(self) -> bool:
        """True if the options place rows in host memory, so that they do not follow their module to a GPU."""
        options = self._options
        return not options.on_gpu and (options.tiers is not None or options.arena is not None)

    def read_by(self, features: Sequence[Categorical], kind: str) -> TableReader:
        """Returns a reader of some features: EMBEDDING gives bags, SEQUENCE the vectors of all ids of each feature."""
        schema = Schema(features, NO_LABEL, self.schema.tables)
        with self.used():
            reader = TableReader(self._pack(schema, of_all(schema, kind)), self.shards, self._kind)
        self._readers.add(reader)
        return reader

    def move(self, device: torch.device) -> None:
        """Moves all rows to a GPU, or back to host memory, bit for bit with their optimizer state.

        Does nothing if they are there.

        Raises:
            ConfigError: the device cannot hold rows; they stay in place.
            StorageFullError: there is no memory for them; they stay in place.
        """
        on_gpu = device.type == "cuda"
        interpreted = self.on_gpu and self.device == HOST
        if on_gpu == self.on_gpu and (interpreted or not on_gpu or device == self.device):
            return
        with torch.cuda.device(device) if on_gpu and torch.cuda.is_available() else contextlib.nullcontext():
            before, there = self.shards, self._opened(on_gpu=on_gpu)
            try:
                for own, new in zip(before.stores, there.stores, strict=True):
                    self._copy(own, new)
            except BaseException:
                there.close()
                raise
            self._settle(there, on_gpu=on_gpu)
        before.close()

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose work runs after the earlier work: on a GPU, on the current stream.

        The current stream may have changed.

        Raises:
            ConfigError: a CUDA graph is being captured.
        """
        return contextlib.nullcontext() if self._last_stream is None else self._in_turn()

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError(f"a girih.nn module {UNCAPTURED}; leave it out of a CUDA graph")
            stream = torch.cuda.current_stream()
            if stream != self._last_stream:
                stream.wait_stream(self._last_stream)
                groups = [group for reader in self._readers for group in reader.groups]
                for tensor in tensors_in([*self._states, *groups], set()):
                    if tensor.device == self.device:  # not in host memory
                        tensor.record_stream(stream)
                self._last_stream = stream
            yield

    def rows(self) -> dict[str, int]:
        """Returns the number of rows of each table. Waits for a GPU."""
        with self.used():
            return self.shards.rows()

    def assign(self, table: str, ids: Tensor, vectors: Tensor) -> None:
        """Sets rows of a table: int64[n] distinct ids, float32[n, D]. New ids get rows."""
        places = {
            each.name: (group, number)
            for group, packed in enumerate(self.groups)
            for number, each in enumerate(packed.spec.tables)
        }
        if table not in places:
            raise ConfigError(f"table {table!r} is not one of this module's{nearest(table, places)}")
        group, number = places[table]
        dim = self.groups[group].spec.dim
        ids = integers(ids, "ids").cpu().long().flatten()
        if vectors.shape != (len(ids), dim):
            raise ConfigError(f"vectors: shape {tuple(vectors.shape)}, expected {(len(ids), dim)}")
        keys, tables = ids.numpy(), np.full(len(ids), number, np.int32)
        if len(np.unique(keys)) != len(keys):
            raise ConfigError("ids: some are repeated; expected each once")
        values = np.ascontiguousarray(vectors.detach().float().cpu().numpy())
        shards = shard_of(keys, tables, self.shards.shards_each)
        with self.used():
            for store in self.shards.stores[group]:
                part = np.flatnonzero(shards == store.shard)
                store.assign(Keys(keys[part], tables[part]), values[part])

    def restore(self, sources: Sequence[SnapshotFile]) -> None:
        """Replaces all rows by the rows of any number of shards.

        Raises:
            CheckpointError: rows of other tables, or of another dim, dtype or optimizer; no row was replaced.
        """
        known = {table.name for table in self.schema.tables}
        found = []
        for _, store in self.shards.files():
            own = {table.name for table in store.spec.tables}
            files = [file for file in sources if own & (names := _tables_in(file)) or not known & names]
            store.check(files, elsewhere=known - own)
            found.append((store, files))
        with self.used():
            for store, files in found:
                store.restore(files, elsewhere=known)
        self._newest.clear()
        for file in sources:
            add_newest_uses(self._newest, file)

    def refuse_expired(self) -> None:
        """Refuses to train with loaded rows if a table would lose all of them now. Evaluation may read them.

        Raises:
            CheckpointError: see :func:`girih.store.clock.refuse_expired`.
        """
        refuse_expired(self._newest, (table for group in self.groups for table in group.spec.tables))
        self._newest.clear()

    @property
    def _kind(self) -> str:
        return "gpu" if self.on_gpu else "cpu"

    def _opened(self, *, on_gpu: bool) -> LocalShards:
        """Opens empty shards in the memory of the current GPU, or of the host."""
        specs = [group.spec for group in self.groups]
        if on_gpu:
            there = StoreOptions(tiers=("gpu",), reserve_rows=self._options.reserve_rows)
            return LocalShards(self.groups, self._options if self._options.on_gpu else there)
        options = replace(self._options, tiers=None) if self._options.on_gpu else self._options
        optimizers = [[segment.optimizer for segment in spec.segments] for spec in specs]
        ahead.make_ready(ahead.training(optimizers, [table.eviction for table in self.schema.tables]))
        num_shards = options.num_shards(specs, torch.get_num_threads())
        return LocalShards(self.groups, replace(options, shards=num_shards))

    def _copy(self, sources: Sequence[Store], targets: Sequence[Store]) -> None:
        """Copies the rows of a group's shards to any number of other shards."""
        with contextlib.ExitStack() as stack:
            taken: list[LiveSnapshot] = []
            with self.used():
                for store in sources:
                    taken.append(store.snapshot())
                    stack.enter_context(taken[-1])
            for store in targets:
                store.restore(taken)

    def _settle(self, shards: LocalShards, *, on_gpu: bool) -> None:
        """Switches to these shards, with all readers."""
        self.shards, self.on_gpu = shards, on_gpu
        self._states: list[Any] = [store.state for _, store in shards.files()]
        first = self._states[0] if self._states else None
        self.device: torch.device = getattr(first, "device", HOST)
        is_cuda = self.device.type == "cuda"
        self._last_stream = torch.cuda.current_stream(self.device) if is_cuda else None
        for reader in self._readers:
            reader.follow(shards, self._kind)


def _tables_in(file: SnapshotFile) -> set[str]:
    return {table["name"] for table in file.description["tables"]}
