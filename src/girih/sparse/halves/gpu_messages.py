"""Messages between trainers whose rows are in GPU memory: keys, rows and gradients go from GPU to GPU, by AllToAllv.

They are of the trainers' own group, as those of the dense halves are, so that all trainers issue one order of them over one communicator.

Shapes: R ranks, U unique keys of this rank's batch, K keys that are asked of this rank, W columns of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.group.exchange import Counts
from girih.runs.stats import EXCHANGE_NS, Stats
from girih.sparse.routing.gpu_router import KEY_WORDS, GpuTraffic
from girih.sparse.routing.gpu_row_codec import GpuRowCodec

Coming = Callable[[], Tensor]
"""A message on its way: returns it, which on a GPU may be before it is there, as its stream knows."""


class GpuMessages:
    """The ways of one trainer's messages.

    Args:
        stats: where bytes and seconds are counted.
        rows, gradients: how these travel.
    """

    def __init__(
        self, ranks: TrainerGroup, stats: Stats, *, rows: GpuRowCodec, gradients: GpuRowCodec
    ) -> None:
        self._ranks, self._stats = ranks, stats
        self._rows, self._gradients = rows, gradients

    def send_keys(self, each: GpuTraffic, *, train: bool) -> Coming:
        """Keys of this rank's batch go to their owners, and those of rows here come: int32[K, KEY_WORDS]."""
        came = self._there("ids", KEY_WORDS, each, each.message, train=train)
        return lambda: came().view(int(each.asked.sum()), KEY_WORDS)

    def send_rows(
        self, each: GpuTraffic, values: Tensor, alone: Callable[[slice], Tensor], *, train: bool
    ) -> Coming:
        """Rows that this rank serves, float32[K, W], go to who asked, and those that it asked for come: float32[U, W].

        Args:
            alone: bool[·] of a slice of the K keys: whether no other rank asks for the same.
        """
        codec, dim = self._rows, values.shape[1]
        came = self.send_back("embeddings", codec.width(dim), each, codec.pack(values), train=train)

        def rows() -> Tensor:
            found = codec.unpack(came().view(int(each.asks.sum()), codec.width(dim)))
            if codec.float16:  # what this rank alone asks for does not travel, and is not rounded
                mine, theirs = self._own(each.asks), self._own(each.asked)
                found[mine] = torch.where(alone(theirs).unsqueeze(1), values[theirs], found[mine])
            return found

        return rows

    def send_gradients(self, each: GpuTraffic, own: Tensor) -> Coming:
        """Gradients of rows that this rank asked for go to their owners, and those of rows here come: float32[K, W]."""
        codec, dim = self._gradients, own.shape[1]
        came = self._there("gradients", codec.width(dim), each, codec.pack(own), train=True)

        def gradients() -> Tensor:
            found = codec.unpack(came().view(int(each.asked.sum()), codec.width(dim)))
            if codec.float16:  # what does not travel is not rounded
                found[self._own(each.asked)] = own[self._own(each.asks)]
            return found

        return gradients

    @contextmanager
    def waiting(self, kind: str, *, train: bool) -> Iterator[None]:
        """Times what the host waits for others; on a GPU it hands messages over and goes on."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._stats.spans.add(f"exchange {kind}", start, seconds)
        if train:
            self._stats.counters[EXCHANGE_NS] += round(1e9 * seconds)

    def _own(self, counts: Counts) -> slice:
        """This rank's part of what lies by rank."""
        behind = counts.sum(axis=1).cumsum()[self._ranks.rank]
        return slice(int(behind - counts[self._ranks.rank].sum()), int(behind))

    def _there(self, kind: str, width: int, each: GpuTraffic, sent: Tensor, *, train: bool) -> Coming:
        """Sends something of each key that this rank asks for to the key's owner."""
        return self._begin(kind, sent, width * each.asks, width * each.asked, train=train)

    def send_back(self, kind: str, width: int, each: GpuTraffic, sent: Tensor, *, train: bool) -> Coming:
        """Sends something of each key that this rank is asked for to who asked."""
        return self._begin(kind, sent, width * each.asked, width * each.asks, train=train)

    def _begin(self, kind: str, sent: Tensor, to_each: Counts, of_each: Counts, *, train: bool) -> Coming:
        sizes, others = to_each.sum(axis=1), np.arange(self._ranks.size) != self._ranks.rank
        self._stats.sent(kind, sent.element_size() * int(sizes[others].sum()))
        with self.waiting(kind, train=train):
            came = self._ranks.begin_exchange(sent.reshape(-1), sizes.tolist(), of_each.sum(axis=1).tolist())

        def wait() -> Tensor:
            with self.waiting(kind, train=train):
                return came()

        return wait
