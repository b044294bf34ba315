"""An embedding group in GPU memory: the ids are copied to the GPU once, and rows, bags and gradients stay on it.

Some work depends only on ids: the unique keys, and the sorted ids of each key. When the next batch is prepared, a
separate stream does this work, while the GPU computes the current batch.

Shapes: F features of the group, B examples, N ids in the batch, n of the group, D columns of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.data.batch import Batch
from girih.errors import ConfigError
from girih.kernels.gpu.gradients import FusedInputs
from girih.sparse.groups.gpu_bags import GpuBags, GpuKeys, RowAddresses, SideStream, take_over
from girih.sparse.groups.gpu_batch import GpuBatch, SharedCopy
from girih.sparse.groups.group import Fill
from girih.sparse.groups.pack import Group
from girih.store import Store
from girih.store.gpu.group_state import DeviceUpdate, GroupState

_FEW = 4  # from this mean number of ids per bag on, reading all gradients once is cheaper than writing and reading sums


@dataclass(frozen=True)
class GpuRead:
    """The rows of one group for one batch.

    Attributes:
        outputs: float32[B, F, D], or [L, D] for a whole output.
        keys: the unique keys of these rows.
        rows: the row numbers in the store.
    """

    outputs: Sequence[Tensor]
    keys: GpuKeys
    rows: Any


@dataclass(frozen=True)
class GpuGradients:
    """The gradients of a group's keys.

    Attributes:
        totals: float32[n, W], the gradient of each key.
        nonfinite_key: int32[1]: a key with a gradient that is not finite, or -1.
        direct: the inputs of a kernel that may sum the gradients during the row update and then ignores ``totals``.
    """

    totals: Tensor
    nonfinite_key: Tensor
    direct: FusedInputs | None = None


class GpuGroup:
    """An embedding group on the GPU of this process.

    Args:
        shards: one store, in GPU memory or with GPU memory as its upper tier.
        shared_copy: see :class:`GpuBags`.

    Raises:
        ConfigError: there are several shards, or the store does not use GPU memory.
    """

    def __init__(self, group: Group, shards: Sequence[Store], shared_copy: SharedCopy | None = None) -> None:
        self.group = group
        self._state = on_gpu(group, shards)
        self._bags = GpuBags(group, self._state.device, shared_copy)
        self._side = SideStream(self._state.device)

    @property
    def device_type(self) -> str:
        """See :class:`girih.sparse.groups.embedding_group.EmbeddingGroup`."""
        return self.device.type

    @property
    def device(self) -> torch.device:
        """The device of rows, bags and gradients."""
        return self._bags.device

    def find(self, batch: Batch | GpuBatch) -> GpuKeys:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`. Runs on a separate stream, next to other GPU work."""
        with self._side() as ready:
            return self._bags.find(batch, train=True, ready=ready)

    def fetch(self, keys: GpuKeys) -> None:
        """Reads rows from lower tiers on a separate stream, next to other GPU work. Waits for the keys."""
        with self._side():
            self._state.begin_read(keys.keys)

    def lookup(
        self, batch: Batch | GpuBatch, step: int, *, train: bool, keys: GpuKeys | None = None
    ) -> tuple[GpuRead, Fill]:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`."""
        keys = self._bags.find(batch, train=train) if keys is None else keys
        take_over(keys.ready, keys, self._bags.device)
        read, addresses = self._looked_up(keys, batch, step, train=train)

        def fill(examples: slice) -> None:
            self._fill(read, addresses, batch, examples)

        return read, fill

    def lookup_weighted(self, batch: Batch | GpuBatch, step: int, *, train: bool) -> tuple[GpuRead, Tensor]:
        """Reads rows like :meth:`lookup` and fills in all outputs.

        Also returns float32[n, W], the columns of each key, for :meth:`weight_gradients`. They are a copy, since rows
        may be updated before.
        """
        keys = self._bags.find(batch, train=train)
        read, addresses = self._looked_up(keys, batch, step, train=train)
        self._fill(read, addresses, batch, slice(0, batch.num_examples))
        return read, self._state.kernels.columns(keys.keys, addresses)

    def weight_gradients(
        self, read: GpuRead, values: Tensor, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> Tensor:
        """Returns float32[N], the gradients of the weights of ids, from those of outputs. Does not wait for the GPU."""
        return self._bags.weight_gradients(read.keys, values, gradients, batch)

    def gradients(
        self, read: GpuRead, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> GpuGradients | None:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`. Does not wait for the GPU."""
        if all(gradient is None for gradient in gradients):
            return None
        terms, pieces = read.keys.of_training()
        contiguous = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        lent = [gradient for gradient in contiguous if gradient is not None]
        sum_inputs = read.keys.keys, terms, pieces, self._bags.sources(contiguous, batch)
        kernels, numbers = self._state.kernels, sum(gradient.numel() for gradient in lent)
        if read.keys.weights is None and _FEW * numbers <= len(read.keys.keys) * kernels.segments.num_columns:
            return GpuGradients(*kernels.direct_sums(*sum_inputs, lent))
        return GpuGradients(*kernels.sums(*sum_inputs))

    def apply(self, read: GpuRead, gradients: GpuGradients, step: int, lr_scale: float) -> None:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`."""
        keys = read.keys.keys
        change = DeviceUpdate(gradients.totals, gradients.nonfinite_key, step, lr_scale, gradients.direct)
        self._state.move(keys, read.rows, change)

    def inverse(self, read: GpuRead) -> Tensor:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`."""
        return read.keys.unique.inverse

    def absent(self, read: GpuRead) -> NDArray[np.bool_]:
        """See :class:`~girih.sparse.groups.embedding_group.EmbeddingGroup`. Waits for the GPU."""
        return np.asarray((torch.as_tensor(read.rows) < 0).cpu())

    def _looked_up(
        self, keys: GpuKeys, batch: Batch | GpuBatch, step: int, *, train: bool
    ) -> tuple[GpuRead, Tensor]:
        """Reads the rows of a batch, without filling in outputs.

        Also returns int64[n], the address of each key's columns, valid until the store's next verb.
        """
        rows, addresses = self._state.read(keys.keys, step) if train else self._state.peeked(keys.keys)
        return GpuRead(self._bags.outputs(batch), keys, rows), addresses

    def _fill(self, read: GpuRead, addresses: Tensor, batch: Batch | GpuBatch, examples: slice) -> None:
        rows = RowAddresses(addresses, self._state.kernels.segments.dtype, aligned=True)
        self._bags.fill(read.outputs, read.keys, rows, batch, examples)


def on_gpu(group: Group, shards: Sequence[Store]) -> GroupState:
    """Returns the state of a group's only shard.

    Raises:
        ConfigError: there are several shards, or the shard does not use GPU memory.
    """
    state = shards[0].state if len(shards) == 1 else None
    if not isinstance(state, GroupState):
        raise ConfigError(
            f"group {group.spec.name!r}: {len(shards)} shards; expected one, in GPU memory: set store.shards = 1"
        )
    return state
