"""The sparse half of one process: shards in its own memory, on threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from girih.data.batch import Batch
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.group import BY_DEVICE, EmbeddingGroup, GroupRead, apply_all
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.halves.here import ShardedHalf
from girih.sparse.spec import SparseSpec


class LocalSparse(ShardedHalf[GroupRead]):
    """Tables in this process.

    Args:
        spec: tables, and how they are kept.
        process, elsewhere: which process this is, and what tables others hold: see ``LocalShards``.
        devices: device of each group, by name; the CPU where a group is missing.
    """

    def __init__(
        self,
        spec: SparseSpec,
        *,
        process: int = 0,
        elsewhere: Collection[str] | None = None,
        devices: Mapping[str, str] | None = None,
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(groups, spec.resolved_store(), place=process, elsewhere=elsewhere)
        super().__init__(groups, shards)
        self.groups: list[EmbeddingGroup] = [
            BY_DEVICE[(devices or {}).get(group.spec.name, "cpu")](group, stores, shards.pool)
            for group, stores in zip(groups, shards.stores, strict=True)
        ]

    def read(self, batch: Batch, step: int, *, train: bool) -> tuple[list[GroupRead], list[Any]]:
        """See :class:`ShardedHalf`."""
        reads = [group.read(batch, step, train=train) for group in self.groups]
        return reads, [output for read in reads for output in read.outputs]

    def update(
        self, batch: Batch, reads: list[GroupRead], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """See :class:`ShardedHalf`."""
        apply_all(self.groups, reads, gradients, batch, step, lr_scale)
