"""The batches that a group server has begun and not ended: each holds a net while its layers are computed, until its write is done."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from girih.errors import GirihError
from girih.hierarchical.live_parts import LiveParts, NetOnServer
from girih.hierarchical.wire import GradientStreams, Wire
from girih.telemetry.stats import DENSE_STALENESS, Stats, StatsSnapshot

Key = tuple[int, int, int]
"""Client, net and batch."""


@dataclass(eq=False)
class ForwardCall:
    """A forward pass that waits for the gradients of its outputs."""

    part: int
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor]


@dataclass(eq=False)
class OpenBatch:
    """The state of a batch of one net: a net of the server's, the graphs of its forward passes, and gradients of parameters.

    Attributes:
        read_at: writes of all nets that were done before its first forward pass.
        before: copies of the live buffers, as they were then.
        streams: what writes the gradients that the net gets.
        computing: forward passes under way. has_parts: whether one has succeeded.
    """

    net: NetOnServer
    read_at: int
    before: list[Tensor]
    streams: GradientStreams
    calls: dict[int, ForwardCall] = field(default_factory=dict)
    computing: int = 0
    has_parts: bool = False


class OpenBatches:
    """All of them, by client, net and batch. Methods may be called by any thread.

    Args:
        live: lends nets to batches.
        wire: how gradients of training steps are written.
        stats: counts how many are open, and the staleness of writes.
        server: the server's name in errors.
        patience_s: how long a client without a connection is waited for, for errors too.
    """

    def __init__(self, live: LiveParts, wire: Wire, stats: Stats, *, server: str, patience_s: float) -> None:
        self._live, self._wire, self._stats = live, wire, stats
        self._server, self._patience_s = server, patience_s
        self._lock = threading.Lock()
        self._batches: dict[Key, OpenBatch] = {}
        self._streams: dict[tuple[int, int], GradientStreams] = {}  # by client and net
        self._gone: set[int] = set()
        self._num_begun = self._num_done = 0  # writes
        stats.watch(lambda: {"queues": {"batches": len(self)}})

    def __len__(self) -> int:
        return len(self._batches)

    @contextmanager
    def computing(self, key: Key) -> Iterator[OpenBatch]:
        """The batch that a forward pass is of, which the first one begins.

        If no pass of it succeeds, the last one to fail drops it, since another may compute with its net.

        Raises:
            GirihError: the client is gone.
        """
        batch = self._begun(key)
        try:
            yield batch
            batch.has_parts = True
        finally:
            with self._lock:
                batch.computing -= 1
                is_nothing = not batch.computing and not batch.has_parts and self._batches.get(key) is batch
                if is_nothing:
                    del self._batches[key]
            if is_nothing:
                self._undo(batch)

    def known(self, key: Key) -> OpenBatch:
        """A batch that was begun.

        Raises:
            GirihError: it was not, or has ended.
        """
        return self._there(key, self._batches.get(key))

    @contextmanager
    def applying(self, key: Key) -> Iterator[tuple[OpenBatch, int]]:
        """Ends a batch with its write: the batch, and the writes of other nets since it read. A write that fails leaves it open.

        Raises:
            GirihError: see :meth:`known`.
        """
        with self._lock:
            batch = self._there(key, self._batches.pop(key, None))
            staleness = self._num_begun - batch.read_at
            self._num_begun += 1
        try:
            yield batch, staleness
        except Exception:
            with self._lock:
                self._num_begun -= 1
                if key[0] not in self._gone:
                    self._batches[key] = batch
            raise
        batch.streams.apply()
        with self._lock:
            self._num_done += 1
            self._stats.histograms[DENSE_STALENESS][staleness] += 1
        self._live.give_back(batch.net)

    def discard(self, key: Key) -> None:
        """Ends a batch without a write, if it is there: buffers are as they were before it."""
        with self._lock:
            batch = self._batches.pop(key, None)
        if batch is not None:
            self._undo(batch)

    def forget(self, client: int) -> None:
        """Drops what a client left that does not come back."""
        with self._lock:
            self._gone.add(client)
            for key in [key for key in self._batches if key[0] == client]:
                del self._batches[key]  # with its net, which a thread may be computing with
            for net in [net for net in self._streams if net[0] == client]:
                del self._streams[net]

    def streams(self, client: int, net: int) -> GradientStreams:
        """The writer of the gradients that a net gets."""
        with self._lock:
            return self._streams_of(client, net)

    def streams_of(self, client: int) -> dict[int, GradientStreams]:
        """The same by net, of those that have begun a batch."""
        with self._lock:
            return {net: streams for (its, net), streams in self._streams.items() if its == client}

    def forget_left_out(self) -> None:
        """Drops what earlier steps of all nets left out of their gradients."""
        with self._lock:
            for streams in self._streams.values():
                streams.forget()

    def snapshot(self, *, spans: bool) -> StatsSnapshot:
        """The server's statistics, while no write is being counted."""
        with self._lock:
            self._stats.gauges["batches"] = len(self)
            return self._stats.snapshot(spans=spans)

    def _begun(self, key: Key) -> OpenBatch:
        with self._lock:
            if key[0] in self._gone:
                raise GirihError(
                    f"{self._server}: a trainer calls that left, or had no connection for {self._patience_s:.0f} s;"
                    " go on with --resume"
                )
            batch = self._batches.get(key)
            if batch is None:
                before = [buffer.clone() for buffer in self._live.buffers()]
                streams = self._streams_of(*key[:2])
                batch = self._batches[key] = OpenBatch(self._live.borrow(), self._num_done, before, streams)
            batch.computing += 1
            return batch

    def _streams_of(self, client: int, net: int) -> GradientStreams:
        if (client, net) not in self._streams:
            self._streams[client, net] = self._wire.backward()
        return self._streams[client, net]

    def _there(self, key: Key, batch: OpenBatch | None) -> OpenBatch:
        if batch is None:
            raise GirihError(
                f"{self._server}: net {key[1]} of a trainer has no batch {key[2]} here, which is dropped where there"
                f" is no connection for {self._patience_s:.0f} s; go on with --resume"
            )
        return batch

    def _undo(self, batch: OpenBatch) -> None:
        """Has buffers as they were before a batch, and its net back."""
        batch.streams.discard()
        for buffer, before in zip(self._live.buffers(), batch.before, strict=True):
            buffer.copy_(before)
        self._live.give_back(batch.net)
