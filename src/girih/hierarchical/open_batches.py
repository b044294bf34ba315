"""The batches that a group server has begun and not ended.

Each batch holds a net from its first forward pass until its write is done.
"""

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
    """The state of a batch: a net of the server, the graphs of its forward passes, and gradients of parameters.

    Attributes:
        read_at: the number of finished writes of all nets before its first forward pass.
        before: copies of the live buffers at that time.
        streams: the codecs of the gradients that the net receives.
        computing: the number of forward passes under way.
        has_parts: whether one of them has succeeded.
    """

    net: NetOnServer
    read_at: int
    before: list[Tensor]
    streams: GradientStreams
    calls: dict[int, ForwardCall] = field(default_factory=dict)
    computing: int = 0
    has_parts: bool = False


class OpenBatches:
    """All open batches, by client, net and batch. Thread-safe.

    Args:
        live: lends nets to batches.
        wire: the codecs of the gradients of training steps.
        stats: counts open batches and the staleness of writes.
        server: the server's name in errors.
        patience_s: the time that a client may be without a connection, for errors too.
    """

    def __init__(self, live: LiveParts, wire: Wire, stats: Stats, *, server: str, patience_s: float) -> None:
        self._live, self._wire, self._stats = live, wire, stats
        self._server, self._patience_s = server, patience_s
        self._lock = threading.Lock()
        self._batches: dict[Key, OpenBatch] = {}
        self._streams: dict[tuple[int, int], GradientStreams] = {}  # by client and net
        self._gone: set[int] = set()
        self._num_begun = self._num_done = 0  # numbers of writes
        stats.watch(lambda: {"queues": {"batches": len(self)}})

    def __len__(self) -> int:
        return len(self._batches)

    @contextmanager
    def computing(self, key: Key) -> Iterator[OpenBatch]:
        """Returns the batch of a forward pass. The first pass begins the batch.

        If no pass of it succeeds, the last failing pass drops the batch, because other passes may still compute with
        its net.

        Raises:
            GirihError: the client has left.
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
        """Returns a batch that has begun.

        Raises:
            GirihError: the batch has not begun, or has ended.
        """
        return self._there(key, self._batches.get(key))

    @contextmanager
    def applying(self, key: Key) -> Iterator[tuple[OpenBatch, int]]:
        """Ends a batch with its write. Yields the batch and the number of others' writes since its read.

        A failed write leaves the batch open.

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
        """Ends a batch without a write, if it exists. Restores the buffers."""
        with self._lock:
            batch = self._batches.pop(key, None)
        if batch is not None:
            self._undo(batch)

    def forget(self, client: int) -> None:
        """Drops the batches of a client that does not come back."""
        with self._lock:
            self._gone.add(client)
            for key in [key for key in self._batches if key[0] == client]:
                del self._batches[key]  # with its net, because a thread may be computing with the net
            for net in [net for net in self._streams if net[0] == client]:
                del self._streams[net]

    def streams(self, client: int, net: int) -> GradientStreams:
        """The codecs of the gradients that a net receives."""
        with self._lock:
            return self._streams_of(client, net)

    def streams_of(self, client: int) -> dict[int, GradientStreams]:
        """The codecs by net, for the nets that have begun a batch."""
        with self._lock:
            return {net: streams for (its, net), streams in self._streams.items() if its == client}

    def forget_left_out(self) -> None:
        """Drops the numbers that earlier steps of all nets left out of their gradients."""
        with self._lock:
            for streams in self._streams.values():
                streams.forget()

    def snapshot(self, *, spans: bool) -> StatsSnapshot:
        """The server's statistics, taken while no write is being counted."""
        with self._lock:
            self._stats.gauges["batches"] = len(self)
            return self._stats.snapshot(spans=spans)

    def _begun(self, key: Key) -> OpenBatch:
        with self._lock:
            if key[0] in self._gone:
                raise GirihError(
                    f"{self._server}: received a call of a trainer that left, or had no connection for {self._patience_s:.0f} s;"
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
                f"{self._server}: net {key[1]} of a trainer has no batch {key[2]} on this server; batches are dropped"
                f" without a connection for {self._patience_s:.0f} s; go on with --resume"
            )
        return batch

    def _undo(self, batch: OpenBatch) -> None:
        """Restores the buffers from before a batch, and takes its net back."""
        batch.streams.discard()
        for buffer, before in zip(self._live.buffers(), batch.before, strict=True):
            buffer.copy_(before)
        self._live.give_back(batch.net)
