"""The sparse half with shards on the GPUs of all trainers. Keys and rows go from GPU to GPU, by AllToAllv.

It is :class:`girih.sparse.halves.collective.CollectiveSparse` with rows in GPU memory. A batch is prepared on
a separate stream, while earlier batches are computed. The stream finds the unique keys, and ranks exchange their
numbers. The keys travel with the rows of the batch before, while the trainer waits for these rows. So all trainers send
their messages in the same order, including those of their dense halves. On the same stream, owners do the work that
depends on ids alone, and bring in rows from tiers below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import DirectExchange
from girih.data.batch import Batch
from girih.sparse.groups.gpu_bags import SideStream, take_over
from girih.sparse.groups.gpu_batch import SharedCopy
from girih.sparse.halves.collective import ExchangingSparse, KeyRequest
from girih.sparse.halves.gpu_counters import DeferredCounts, counts_of, summed_over
from girih.sparse.halves.group_messages import GroupMessages, RowCodec
from girih.sparse.halves.sharded import Arrival
from girih.sparse.routing.gpu_routed_group import GpuAsked, GpuRoutedGroup, GpuServed
from girih.sparse.routing.routed_group import GroupTraffic
from girih.sparse.spec import SparseSpec
from girih.store.gpu.gpu_memory import to_device, to_host
from girih.store.gpu.gpu_state import GpuState
from girih.telemetry.stats import Stats


class GpuCollectiveSparse(ExchangingSparse[GpuAsked, GpuServed]):
    """Tables whose shards are spread evenly over the GPUs of the trainers, one shard on each.

    Each group has separate messages. While the messages of one group are on the way, the GPU does the work that the
    next group needs. With micro-batches, all rows arrive before the first micro-batch, and bags are filled in
    micro-batch by micro-batch. The trainers' own process group carries these messages and those of the dense halves. So
    all trainers send them in the same order over one communicator.

    Args:
        float16_embeddings, float16_gradients: True sends rows, or their gradients, as float16 with one scale each.
        micro_batches, ahead: see :class:`ShardedHalf`.

    Raises:
        ConfigError: the store is not in GPU memory.
    """

    def __init__(
        self,
        spec: SparseSpec,
        ranks: TrainerGroup,
        stats: Stats | None = None,
        *,
        float16_embeddings: bool = False,
        float16_gradients: bool = False,
        micro_batches: int = 1,
        ahead: bool = False,
    ) -> None:
        # counts go over gloo while the trainer computes
        super().__init__(spec, ranks, stats, micro_batches=micro_batches, ahead=ahead, threaded=ahead)
        shared_copy, groups = SharedCopy(), self.groups_of_tables
        self.routed = routed = [
            GpuRoutedGroup(group, stores, ranks.size, first, shared_copy)
            for group, stores, first in zip(groups, self._shards.stores, self.first_tables, strict=True)
        ]
        self.sets = self.key_sets = [[number] for number in range(len(groups))]
        self.messages = GroupMessages(
            ranks,
            DirectExchange(ranks),
            self._stats,
            counting=DirectExchange(self._part or ranks),
            rows=RowCodec(float16_embeddings),
            gradients=RowCodec(float16_gradients),
            ahead=len(groups),
        )
        self._unsent: deque[KeyRequest[GpuAsked, GpuServed]] = deque()
        # with tiers below, the host waits in every step
        self._is_deferred = bool(groups) and all(isinstance(group.state, GpuState) for group in routed)
        self._device = routed[0].state.device if groups else torch.device("cpu")
        self._side: Callable[[], AbstractContextManager[torch.cuda.Event | None]] = (
            SideStream(self._device) if groups else nullcontext
        )

    def is_on_gpu_of(self, device: torch.device) -> bool:
        """Returns whether there are rows, and all are in the memory of this type of device.

        With interpreted kernels, that is the memory of the CPU.
        """
        return self._is_deferred and self._device.type == device.type

    def find(self, batch: Batch, parts: Sequence[slice], *, train: bool) -> KeyRequest[GpuAsked, GpuServed]:
        """Finds the keys of a batch, and sends each rank its number of keys. Waits until the GPU has found them."""
        with self._side():  # the host waits for no other stream
            return self.ask(batch, parts, train=train)

    def send_keys(self, request: KeyRequest[GpuAsked, GpuServed], *, train: bool) -> None:
        """See :class:`ExchangingSparse`. Runs on a separate stream, in parallel with other work of the GPU."""
        if not request.served:
            with self._side() as request.ready:
                super().send_keys(request, train=train)

    def fetch(self, request: KeyRequest[GpuAsked, GpuServed]) -> None:
        """Queues the keys. They are sent with the rows of the next batch that is read."""
        self._unsent.append(request)

    def read(
        self,
        batch: Batch,
        step: int,
        parts: Sequence[slice],
        request: KeyRequest[GpuAsked, GpuServed] | None = None,
        *,
        train: bool,
    ) -> Generator[Arrival[GroupTraffic[GpuAsked, GpuServed]], None, None]:
        """Gets rows from their owners; see :class:`ShardedHalf`."""
        request = self.find(batch, parts, train=train) if request is None else request
        if request.brought is not None and request.brought.done():
            request.brought.result()  # raises the thread's error
        self.send_keys(request, train=train)
        take_over(request.ready, request, self._device)
        for number, arrival in enumerate(super().read(batch, step, parts, request, train=train)):
            while self._unsent and number == 0:  # before the trainer continues and sends messages
                request = self._unsent.popleft()
                self.send_keys(request, train=True)
                if self.routed and not self._is_deferred:
                    # after this batch's rows, because the trainer waits for them
                    request.brought = self._submit(partial(self._bring, request))
            yield arrival

    def on_device(self, numbers: NDArray[np.float64]) -> Tensor:
        """See :class:`ExchangingSparse`."""
        return to_device(numbers, self._device)

    def on_host(self, numbers: Tensor) -> NDArray[Any]:
        """See :class:`ExchangingSparse`."""
        return to_host(numbers)

    def late_counts(self) -> DeferredCounts | None:
        """See :class:`ExchangingSparse`."""
        counts = counts_of(self._shards)
        return None if counts is None else summed_over(counts, self.ranks)

    def _bring(self, request: KeyRequest[GpuAsked, GpuServed]) -> None:
        """Brings in the rows of a batch whose keys were sent, in parallel with other work of the GPU."""
        with self._side():
            super().fetch(request)
