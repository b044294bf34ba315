"""The sparse half of one process: shards in its own memory, with a thread for each."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch
from girih.errors import GirihError
from girih.planner.placement import Placement
from girih.sparse.groups.bags import Gradients
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.groups.group import CpuGroup, EmbeddingGroup, FeatureCounts, ReadRows
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.groups.pack import Group
from girih.sparse.half import SparseStats
from girih.sparse.halves.row_updates import apply_all
from girih.sparse.halves.sharded import Arrival, ShardedHalf
from girih.sparse.spec import SparseSpec
from girih.store import Store


class LocalSparse(ShardedHalf[list[object], ReadRows]):
    """Tables in this process.

    Args:
        spec: the tables, and their storage.
        process, elsewhere: number of this process, and the tables of other processes: see ``LocalShards``.
        devices: device of each group, by name. The default is the device of the store's memory.
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

    def is_on_gpu_of(self, device: torch.device) -> bool:
        """Returns whether there are rows, and all are in the memory of this type of device.

        With interpreted kernels, that is the memory of the CPU.
        """
        return bool(self.groups) and all(group.device_type == device.type for group in self.groups)

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> list[object]:
        """Returns the unique keys of each group."""
        return [group.find(batch) for group in self.groups]

    def fetch(self, request: list[object]) -> None:
        """See :class:`ShardedHalf`."""
        for group, keys in zip(self.groups, request, strict=True):
            group.fetch(keys)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        request: list[object] | None = None,
        *,
        train: bool,
    ) -> Generator[Arrival[ReadRows], None, None]:
        """See :class:`ShardedHalf`. All rows are looked up with the first micro-batch."""
        first, *later = parts
        reads, fills = [], []
        for number, group in enumerate(self.groups):
            keys = None if request is None else request[number]
            read, fill = group.lookup(batch, step, train=train, keys=keys)
            fill(first)
            reads.append(read)
            fills += (
                [fill] if later else []
            )  # if not kept, the rows are released before the next group is read
        for group, read in [] if train else zip(self.groups, reads, strict=True):
            inverse = np.asarray(torch.as_tensor(group.inverse(read)).cpu())
            self.features.add_evaluation(batch, group.group, inverse, group.absent(read))
        outputs: list[NDArray[np.float32] | torch.Tensor] = []
        for read in reads:
            outputs += read.outputs
        yield reads, outputs
        for examples in later:
            for fill in fills:
                fill(examples)
            yield reads, outputs

    def update(
        self,
        batch: Batch,
        reads: list[ReadRows],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """See :class:`ShardedHalf`."""
        apply_all(self.groups, reads, gradients, batch, step, lr_scale, vote)
        if vote.deferred:
            from girih.sparse.halves.gpu_counters import report_counts

            report_counts(vote, self._shards)


def open_group(
    device: str,
    group: Group,
    shards: Sequence[Store],
    pool: ThreadPoolExecutor | None,
    shared_copy: SharedCopy | None = None,
) -> EmbeddingGroup:
    """Returns the group on a device of the plan, "cpu" or "gpu".

    For the other arguments see :class:`CpuGroup` and ``GpuGroup``.
    """
    if device == "cpu":
        return CpuGroup(group, shards, pool)
    from girih.sparse.groups.gpu_group import GpuGroup

    return GpuGroup(group, shards, shared_copy)


class FeatureParallelSparse(LocalSparse):
    """The tables of this trainer's features.

    Args:
        placement: the trainer that owns each feature.
        micro_batches, ahead: see :class:`ShardedHalf`.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        placement: Placement,
        *,
        micro_batches: int = 1,
        ahead: bool = False,
    ) -> None:
        self._ranks = ranks
        self._all_tables = [table.name for table in spec.schema.tables]
        self._all_features = FeatureCounts(spec.groups()).read()
        schema = placement.schema_of(ranks.rank, spec.schema)
        narrowed = spec.narrowed(placement.features_of(ranks.rank), schema)
        # the same number of shards on all ranks, because files are numbered by shards
        super().__init__(
            replace(narrowed, store=spec.resolved_store()),
            process=ranks.rank,
            elsewhere=set(self._all_tables) - {table.name for table in schema.tables},
            micro_batches=micro_batches,
            ahead=ahead,
        )

    def update(
        self,
        batch: Batch,
        reads: list[ReadRows],
        gradients: Sequence[Gradients],
        step: int,
        lr_scale: float,
        vote: Vote,
    ) -> None:
        """See :class:`ShardedHalf`.

        Raises:
            GirihError: gradients are finite, but their sum is not. Other trainers may have updated their rows already.
        """
        known = bool(vote.refused)
        super().update(batch, reads, gradients, step, lr_scale, vote)
        if vote.known_refused and not known and self._ranks.size > 1:
            error = vote.error_from(vote.reported.tolist())
            raise GirihError(
                f"trainer {self._ranks.rank}: in the sum, {error}; other trainers have updated their rows; resume from the"
                " last checkpoint, with a lower learning rate or train.clip_norm"
            ) from error

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Returns sums over all shards of all ranks."""
        total, rows = self._ranks.sum_by_name, dict.fromkeys(self._all_tables, 0) | self._shards.rows()
        features = self._all_features | self.features.read()
        return SparseStats(total(self._shards.counters()), total(rows), features=total(features))
