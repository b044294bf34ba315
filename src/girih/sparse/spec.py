"""Specification of a sparse half: said once, and sent to every process that has a part of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from girih.models.needs import Needs
from girih.optim import SparseOptimizer
from girih.planner.plan import Plan
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
        gpu: number of the GPU that has the rows, where they are in GPU memory; None takes the one that torch has chosen.
        partition: group name → its tables, as the plan has them; None packs all tables of one row layout.
    """

    schema: Schema
    needs: Needs
    optimizer: SparseOptimizer
    first_order_optimizer: SparseOptimizer | None = None
    store: StoreOptions = field(default_factory=StoreOptions)
    seed: int = 0
    threads: int | None = None
    gpu: int | None = None
    partition: Mapping[str, Sequence[str]] | None = None

    def groups(self) -> tuple[Group, ...]:
        """The groups of the partition, or tables packed by row layout.

        Raises:
            ConfigError: a partition that is no packing of the tables.
        """
        return pack(
            self.schema, self.needs, self.optimizer, self.first_order_optimizer, self.seed, self.partition
        )

    def following(self, plan: Plan) -> SparseSpec:
        """The same tables in the groups and on the device of a plan; one that names no group leaves them as they are."""
        partition = {group["name"]: group["tables"] for group in plan.groups} or None
        on_gpu = any(group["device"] == "gpu" for group in plan.groups)
        moves = on_gpu and not self.store.on_gpu
        return replace(self, partition=partition, store=self.store.moved_to("gpu") if moves else self.store)

    def narrowed(self, features: Collection[str], schema: Schema) -> SparseSpec:
        """The tables of some features alone, in the same groups; ``schema`` is theirs."""
        needs = {name: kinds for name, kinds in self.needs.items() if name in features}
        kept = {table.name for table in schema.tables}
        partition = None
        if self.partition is not None:
            parts = ((name, [t for t in tables if t in kept]) for name, tables in self.partition.items())
            partition = {name: tables for name, tables in parts if tables}
        return replace(self, schema=schema, needs=needs, partition=partition)

    def resolved_store(self) -> StoreOptions:
        """Store options with the number of shards decided."""
        shards = self.store.num_shards((group.spec for group in self.groups()), self.threads)
        return replace(self.store, shards=shards)
