"""Messages between trainers whose rows are in GPU memory: keys, rows and gradients go from GPU to GPU, by AllToAllv.

They are of the trainers' own group, as those of the dense halves are, so that all trainers issue one order of them over one communicator.

Shapes: R ranks, U unique keys of this rank's batch, K keys that are asked of this rank, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import Counts
from girih.sparse.halves.group_messages import TimedMessages
from girih.sparse.routing.gpu_router import KEY_WORDS, GpuRowCodec, GpuTraffic
from girih.telemetry.stats import Stats

Coming = Callable[[], Tensor]
"""A message on its way: returns it, which on a GPU may be before it is there, as its stream knows."""


class GpuMessages(TimedMessages):
    """The ways of one trainer's messages.

    Args:
        rows, gradients: how these travel.
    """

    def __init__(
        self, ranks: TrainerGroup, stats: Stats, *, rows: GpuRowCodec, gradients: GpuRowCodec
    ) -> None:
        super().__init__(ranks, stats)
        self._rows, self._gradients = rows, gradients

    def send_keys(self, traffic: GpuTraffic, *, train: bool) -> Coming:
        """Keys of this rank's batch go to their owners, and those of rows here come: int32[K, KEY_WORDS]."""
        came = self._send_to_owners("ids", KEY_WORDS, traffic, traffic.message, train=train)
        return lambda: came().view(int(traffic.asked.sum()), KEY_WORDS)

    def send_rows(
        self, traffic: GpuTraffic, values: Tensor, alone: Callable[[slice], Tensor], *, train: bool
    ) -> Coming:
        """Rows that this rank serves, float32[K, W], go to who asked, and those that it asked for come: float32[U, W].

        Args:
            alone: bool[·] of a slice of the K keys: whether no other rank asks for the same.
        """
        codec, dim = self._rows, values.shape[1]
        came = self.send_to_askers("embeddings", codec.width(dim), traffic, codec.pack(values), train=train)

        def rows() -> Tensor:
            unpacked = codec.unpack(came().view(int(traffic.asks.sum()), codec.width(dim)))
            if codec.float16:  # what this rank alone asks for does not travel, and is not rounded
                mine, theirs = self._rank_slice(traffic.asks), self._rank_slice(traffic.asked)
                unpacked[mine] = torch.where(alone(theirs).unsqueeze(1), values[theirs], unpacked[mine])
            return unpacked

        return rows

    def send_gradients(self, traffic: GpuTraffic, values: Tensor) -> Coming:
        """Gradients of rows that this rank asked for go to their owners, and those of rows here come: float32[K, W]."""
        codec, dim = self._gradients, values.shape[1]
        came = self._send_to_owners("gradients", codec.width(dim), traffic, codec.pack(values), train=True)

        def gradients() -> Tensor:
            unpacked = codec.unpack(came().view(int(traffic.asked.sum()), codec.width(dim)))
            if codec.float16:  # what does not travel is not rounded
                unpacked[self._rank_slice(traffic.asked)] = values[self._rank_slice(traffic.asks)]
            return unpacked

        return gradients

    def _rank_slice(self, counts: Counts) -> slice:
        """This rank's part of what lies by rank."""
        behind = counts.sum(axis=1).cumsum()[self._ranks.rank]
        return slice(int(behind - counts[self._ranks.rank].sum()), int(behind))

    def _send_to_owners(
        self, kind: str, width: int, traffic: GpuTraffic, sent: Tensor, *, train: bool
    ) -> Coming:
        """Sends numbers of each key that this rank asks for to the key's owner."""
        return self._exchange(kind, sent, width * traffic.asks, width * traffic.asked, train=train)

    def send_to_askers(
        self, kind: str, width: int, traffic: GpuTraffic, sent: Tensor, *, train: bool
    ) -> Coming:
        """Sends numbers of each key that others ask of this rank to those who asked."""
        return self._exchange(kind, sent, width * traffic.asked, width * traffic.asks, train=train)

    def _exchange(self, kind: str, sent: Tensor, to_each: Counts, of_each: Counts, *, train: bool) -> Coming:
        sizes, others = to_each.sum(axis=1), np.arange(self._ranks.size) != self._ranks.rank
        self._stats.sent(kind, sent.element_size() * int(sizes[others].sum()))
        with self.waiting(kind, train=train):
            came = self._ranks.begin_exchange(sent.reshape(-1), sizes.tolist(), of_each.sum(axis=1).tolist())

        def wait() -> Tensor:
            with self.waiting(kind, train=train):
                return came()

        return wait
