"""The specification of a sparse half. Every process that has a part of the half receives it."""

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
    """The tables, the parts of them that the model reads, and the storage of their rows.

    Attributes:
        schema: features and tables.
        needs: feature name → the parts that the model reads.
        optimizer: the optimizer of embeddings. first_order_optimizer: the optimizer of first-order weights; None takes
            the same.
        store: number and memory of the shards.
        seed: initial values are a function of the seed, the table's name, the id and the column.
        threads: the threads for shards of one process, if no option decides their number; None takes its cores.
        gpu: number of the GPU that holds the rows if they are in GPU memory; None takes torch's current GPU.
        partition: group name → its tables, as in a plan; None packs all tables with the same row layout.
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
        """Returns the groups of the partition, or the tables packed by row layout.

        Raises:
            ConfigError: the partition does not have every table once, or a group has tables with different row layouts.
        """
        return pack(
            self.schema, self.needs, self.optimizer, self.first_order_optimizer, self.seed, self.partition
        )

    def following(self, plan: Plan) -> SparseSpec:
        """Returns the spec with the groups and the device of a plan.

        If the plan names no group, tables are packed by row layout.
        """
        partition = {group["name"]: group["tables"] for group in plan.groups} or None
        on_gpu = any(group["device"] == "gpu" for group in plan.groups)
        moves = on_gpu and not self.store.on_gpu
        return replace(self, partition=partition, store=self.store.moved_to("gpu") if moves else self.store)

    def narrowed(self, features: Collection[str], schema: Schema) -> SparseSpec:
        """Returns the spec of some features alone, in the same groups. ``schema`` has only them and their tables."""
        needs = {name: kinds for name, kinds in self.needs.items() if name in features}
        kept = {table.name for table in schema.tables}
        partition = None
        if self.partition is not None:
            parts = ((name, [t for t in tables if t in kept]) for name, tables in self.partition.items())
            partition = {name: tables for name, tables in parts if tables}
        return replace(self, schema=schema, needs=needs, partition=partition)

    def resolved_store(self) -> StoreOptions:
        """Returns the store options with the number of shards decided."""
        shards = self.store.num_shards((group.spec for group in self.groups()), self.threads)
        return replace(self.store, shards=shards)
