"""An embedding group in GPU memory: ids go over once, and rows, bags and gradients stay there.

What depends on ids alone (unique keys, the sorted ids of each key) is done on a stream of its own when the next batch is
prepared, beside the computation of this one.

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

_FEW = 4  # ids of a bag, on the average, from which on a look at bags' gradients costs less than sums that are written and read


@dataclass(frozen=True)
class GpuRead:
    """The rows of a batch.

    Attributes:
        outputs: float32[B, F, D], or [L, D] where one is whole.
        keys: whose rows they are; rows: where they are, as the store has it.
    """

    outputs: Sequence[Tensor]
    keys: GpuKeys
    rows: Any


@dataclass(frozen=True)
class GpuGradients:
    """Gradients of keys.

    Attributes:
        totals: float32[n, W].
        nonfinite_key: int32[1]: a key whose own is not finite, or -1.
        direct: what may sum them while rows move, in place of ``totals``.
    """

    totals: Tensor
    nonfinite_key: Tensor
    direct: FusedInputs | None = None


class GpuGroup:
    """A group on the GPU of this process.

    Args:
        shards: its one store, in GPU memory, or with GPU memory as its uppermost tier.
        shared_copy: see :class:`GpuBags`.

    Raises:
        ConfigError: several shards, or a store elsewhere.
    """

    def __init__(self, group: Group, shards: Sequence[Store], shared_copy: SharedCopy | None = None) -> None:
        self.group = group
        self._state = on_gpu(group, shards)
        self._bags = GpuBags(group, self._state.device, shared_copy)
        self._side = SideStream(self._state.device)

    @property
    def device_type(self) -> str:
        """See :class:`girih.sparse.groups.group.EmbeddingGroup`."""
        return self.device.type

    @property
    def device(self) -> torch.device:
        """The device of rows, bags and gradients."""
        return self._bags.device

    def find(self, batch: Batch | GpuBatch) -> GpuKeys:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`; done beside whatever the GPU does."""
        with self._side() as ready:
            return self._bags.find(batch, train=True, ready=ready)

    def fetch(self, keys: GpuKeys) -> None:
        """Brings in rows from tiers below, beside whatever the GPU does; waits for their keys."""
        with self._side():
            self._state.begin_read(keys.keys)

    def lookup(
        self, batch: Batch | GpuBatch, step: int, *, train: bool, keys: GpuKeys | None = None
    ) -> tuple[GpuRead, Fill]:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`."""
        keys = self._bags.find(batch, train=train) if keys is None else keys
        take_over(keys.ready, keys, self._bags.device)
        read, addresses = self._looked_up(keys, batch, step, train=train)

        def fill(examples: slice) -> None:
            self._fill(read, addresses, batch, examples)

        return read, fill

    def lookup_weighted(self, batch: Batch | GpuBatch, step: int, *, train: bool) -> tuple[GpuRead, Tensor]:
        """:meth:`lookup` with all outputs filled in; also what :meth:`weight_gradients` takes, float32[n, W]: a copy, since rows may move before."""
        keys = self._bags.find(batch, train=train)
        read, addresses = self._looked_up(keys, batch, step, train=train)
        self._fill(read, addresses, batch, slice(0, batch.num_examples))
        return read, self._state.kernels.columns(keys.keys, addresses)

    def weight_gradients(
        self, read: GpuRead, values: Tensor, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> Tensor:
        """The gradients of the weights of ids, float32[N], by those of outputs; done without a wait."""
        return self._bags.weight_gradients(read.keys, values, gradients, batch)

    def gradients(
        self, read: GpuRead, gradients: Sequence[Tensor | None], batch: Batch | GpuBatch
    ) -> GpuGradients | None:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`; done without a wait."""
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
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`."""
        keys = read.keys.keys
        change = DeviceUpdate(gradients.totals, gradients.nonfinite_key, step, lr_scale, gradients.direct)
        self._state.move(keys, read.rows, change)

    def inverse(self, read: GpuRead) -> Tensor:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`."""
        return read.keys.unique.inverse

    def absent(self, read: GpuRead) -> NDArray[np.bool_]:
        """See :class:`~girih.sparse.groups.group.EmbeddingGroup`: waits for the GPU."""
        return np.asarray((torch.as_tensor(read.rows) < 0).cpu())

    def _looked_up(
        self, keys: GpuKeys, batch: Batch | GpuBatch, step: int, *, train: bool
    ) -> tuple[GpuRead, Tensor]:
        """The rows of a batch, no output of which is filled in, and where the columns of each key lie until the next verb."""
        rows, addresses = self._state.read(keys.keys, step) if train else self._state.peeked(keys.keys)
        return GpuRead(self._bags.outputs(batch), keys, rows), addresses

    def _fill(self, read: GpuRead, addresses: Tensor, batch: Batch | GpuBatch, examples: slice) -> None:
        rows = RowAddresses(addresses, self._state.kernels.segments.dtype, aligned=True)
        self._bags.fill(read.outputs, read.keys, rows, batch, examples)


def on_gpu(group: Group, shards: Sequence[Store]) -> GroupState:
    """The one shard of a group here.

    Raises:
        ConfigError: several shards, or a store elsewhere.
    """
    state = shards[0].state if len(shards) == 1 else None
    if not isinstance(state, GroupState):
        raise ConfigError(
            f"group {group.spec.name!r}: {len(shards)} shards; expected one, in GPU memory: set store.shards = 1"
        )
    return state
