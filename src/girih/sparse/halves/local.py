"""The sparse half of one process: shards in its own memory, on threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.data.batch import Batch
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.models.needs import Needs
from girih.optim import SparseOptimizer
from girih.schema import Schema
from girih.sparse.groups.assemble import assemble, bounds_in
from girih.sparse.groups.group import EmbeddingGroup, GroupPulled
from girih.sparse.groups.local_shards import LocalShards, ShardsSave
from girih.sparse.groups.pack import pack
from girih.sparse.halves.immediate import Done, ImmediateUpdates
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from girih.store import Store


@dataclass
class LocalPulled:
    """A batch whose embeddings are here already."""

    batch: Batch
    parts: list[GroupPulled]
    embeddings: Embeddings
    staleness: int = 0

    def wait(self) -> Embeddings:
        """The embeddings."""
        return self.embeddings


class LocalSparse(ImmediateUpdates):
    """Tables in this process.

    Args:
        schema: features and tables.
        needs: feature name → what the model reads of it.
        optimizer: of embeddings; first_order_optimizer: of first-order weights, the same where None.
        options: shards, and where their memory lies.
        seed: initial values are a function of it, the table's name, the id and the column.
        place, elsewhere: which process this is, and what tables others hold: see ``LocalShards``.
    """

    def __init__(
        self,
        schema: Schema,
        needs: Needs,
        *,
        optimizer: SparseOptimizer,
        first_order_optimizer: SparseOptimizer | None = None,
        options: StoreOptions | None = None,
        seed: int = 0,
        place: int = 0,
        elsewhere: Collection[str] | None = None,
    ) -> None:
        self.schema = schema
        self.step = 0
        self.wire_bytes: Counter[str] = Counter()
        groups = pack(schema, needs, optimizer, first_order_optimizer, seed)
        self._holding = LocalShards(groups, options or StoreOptions(), place=place, elsewhere=elsewhere)
        self.tiles = [
            EmbeddingGroup(group, stores, self._holding.pool)
            for group, stores in zip(groups, self._holding.stores, strict=True)
        ]

    @classmethod
    def of(cls, spec: SparseSpec) -> LocalSparse:
        """The tables of a spec."""
        return cls(
            spec.schema,
            spec.needs,
            optimizer=spec.optimizer,
            first_order_optimizer=spec.first_order_optimizer,
            options=spec.store,
            seed=spec.seed,
        )

    def pull(self, batch: Batch) -> LocalPulled:
        """Reads a batch's rows for training."""
        return self._read(batch, train=True)

    def peek(self, batch: Batch) -> LocalPulled:
        """Reads for evaluation; keys without a row give their initial value."""
        return self._read(batch, train=False)

    def push(self, pulled: LocalPulled, lr_scale: float = 1.0) -> Done:
        """Applies the gradients that the pulled embeddings collected: one optimizer step.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; no row was moved.
        """
        batch, step = pulled.batch, self.step + 1
        updates = []
        for tile, part in zip(self.tiles, pulled.parts, strict=True):
            gradients = tile.gradients(part, batch)
            if gradients is None:
                continue
            if gradients.nonfinite_key >= 0:
                feature = tile.feature_of(part, gradients.nonfinite_key, batch)
                name = "?" if feature is None else self.schema.sparse[feature].name
                raise NonFiniteError(f"the gradient of feature {name!r} is NaN or infinite")
            updates.append((tile, part, gradients))
        for tile, part, gradients in updates:
            tile.apply(part, gradients, step, lr_scale)
        self.step = step
        return Done()

    def counters(self) -> Mapping[str, int]:
        """Sums over all shards, see ``Store.counters``, and ``rows``."""
        return self._holding.counters()

    def rows(self) -> dict[str, int]:
        """Rows of each table."""
        return self._holding.rows()

    def begin_save(self, writer: Storage) -> ShardsSave:
        """Takes a live snapshot of every shard, to be written as parts of a checkpoint."""
        return self._holding.begin_save(writer)

    def load(self, reader: PartReader) -> None:
        """Replaces all rows by those of any number of shards."""
        self._holding.load(reader)

    def stores(self) -> Iterator[tuple[str, Store]]:
        """Every shard, and the name of its part of a checkpoint."""
        return self._holding.files()

    def close(self) -> None:
        """Gives the memory back; the tile cannot be used after it."""
        self._holding.close()

    def _read(self, batch: Batch, *, train: bool) -> LocalPulled:
        parts = [tile.read(batch, self.step + 1, train=train) for tile in self.tiles]
        return LocalPulled(
            batch,
            parts,
            assemble([tile.group for tile in self.tiles], [part.leaves for part in parts], bounds_in(batch)),
        )
