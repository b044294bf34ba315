"""The sparse half of one process: shards in its own memory, on threads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from girih.data.batch import Batch
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.groups.group import CpuGroup, EmbeddingGroup, ReadRows, apply_all
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import Group
from girih.sparse.halves.here import Arrival, ShardedHalf
from girih.sparse.spec import SparseSpec
from girih.store import Store


class LocalSparse(ShardedHalf[list[Any], ReadRows]):
    """Tables in this process.

    Args:
        spec: tables, and how they are kept.
        process, elsewhere: which process this is, and what tables others hold: see ``LocalShards``.
        devices: device of each group, by name; that of the store's memory where a group is missing.
        micro_batches, ahead: see :class:`ShardedHalf`.
    """

    def __init__(
        self,
        spec: SparseSpec,
        *,
        process: int = 0,
        elsewhere: Collection[str] | None = None,
        devices: Mapping[str, str] | None = None,
        micro_batches: int = 1,
        ahead: bool = False,
    ) -> None:
        groups = spec.groups()
        shards = LocalShards(groups, spec.resolved_store(), place=process, elsewhere=elsewhere, gpu=spec.gpu)
        super().__init__(groups, shards, micro_batches=micro_batches, ahead=ahead)
        shared_copy, device = SharedCopy(), spec.store.device or "cpu"
        self.groups: list[EmbeddingGroup] = [
            open_group((devices or {}).get(group.spec.name, device), group, stores, shards.pool, shared_copy)
            for group, stores in zip(groups, shards.stores, strict=True)
        ]

    def is_on_gpu_of(self, device: Any) -> bool:
        """Whether all rows are in the memory of the GPU that a ``torch.device`` names; where kernels are interpreted, that is the CPU."""
        own = [getattr(group, "device", None) for group in self.groups]
        return bool(own) and all(each is not None and each.type == device.type for each in own)

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[Any]:
        """The unique keys of each group."""
        return [group.find(batch) for group in self.groups]

    def fetch(self, found: list[Any]) -> None:
        """See :class:`ShardedHalf`."""
        for group, keys in zip(self.groups, found, strict=True):
            group.fetch(keys)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        found: list[Any] | None = None,
        *,
        train: bool,
    ) -> Iterator[Arrival[ReadRows]]:
        """See :class:`ShardedHalf`; rows are looked up with the first micro-batch."""
        first, *later = parts
        reads, fills = [], []
        for number, group in enumerate(self.groups):
            keys = None if found is None else found[number]
            read, fill = group.lookup(batch, step, train=train, found=keys)
            fill(first)
            reads.append(read)
            fills += (
                [fill] if later else []
            )  # which else has its rows let go of before those of the next group
        for group, read in [] if train else zip(self.groups, reads, strict=True):
            self.features.add_evaluation(batch, group.group, group.inverse(read), group.absent(read))
        outputs = [output for read in reads for output in read.outputs]
        yield reads, outputs
        for examples in later:
            for fill in fills:
                fill(examples)
            yield reads, outputs

    def update(
        self, batch: Batch, reads: list[ReadRows], gradients: Sequence[Gradients], step: int, lr_scale: float
    ) -> None:
        """See :class:`ShardedHalf`."""
        apply_all(self.groups, reads, gradients, batch, step, lr_scale)

    def update_unless(
        self,
        agree: Any,
        batch: Batch,
        reads: list[ReadRows],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
    ) -> Any:
        """See :class:`ShardedHalf`; returns a :class:`girih.sparse.halves.late.LateUpdate`."""
        from girih.sparse.halves.late_groups import apply_unless, with_counts

        update = apply_unless(agree, self.groups, reads, gradients, batch, step, lr_scale)
        return with_counts(update, self._shards)


def open_group(
    device: str,
    group: Group,
    shards: Sequence[Store],
    pool: ThreadPoolExecutor | None,
    shared_copy: SharedCopy | None = None,
) -> EmbeddingGroup:
    """The group on a device, as the plan names it: "cpu" or "gpu". For the arguments see :class:`CpuGroup` and ``GpuGroup``."""
    if device == "cpu":
        return CpuGroup(group, shards, pool)
    from girih.sparse.groups.gpu_group import GpuGroup

    return GpuGroup(group, shards, shared_copy)
