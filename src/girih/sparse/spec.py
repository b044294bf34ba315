"""Specification of a sparse half: said once, and sent to every process that has a part of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from girih.models.needs import Needs
from girih.optim import SparseOptimizer
from girih.schema import Schema
from girih.sparse.groups.pack import Group, pack
from girih.sparse.options import StoreOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSpec:
    """Tables, what the model reads of them, and how they are kept.

    Attributes:
        schema: features and tables.
        needs: feature name → what the model reads of it.
        optimizer: of embeddings; first_order_optimizer: of first-order weights, the same where None.
        store: shards, and where their memory lies.
        seed: initial values are a function of it, the table's name, the id and the column.
        threads: for shards of a process, where their number is free; None takes its cores.
    """

    schema: Schema
    needs: Needs
    optimizer: SparseOptimizer
    first_order_optimizer: SparseOptimizer | None = None
    store: StoreOptions = field(default_factory=StoreOptions)
    seed: int = 0
    threads: int | None = None

    def groups(self) -> tuple[Group, ...]:
        """Tables packed by row layout."""
        return pack(self.schema, self.needs, self.optimizer, self.first_order_optimizer, self.seed)

    def resolved_store(self) -> StoreOptions:
        """Store options with the number of shards decided."""
        shards = self.store.num_shards((group.spec for group in self.groups()), self.threads)
        return replace(self.store, shards=shards)
