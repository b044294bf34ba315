"""Averaging in the background: a thread exchanges live parameters with dense servers.

This is ShadowSync (Zheng et al., arXiv 2003.03477). The thread reads the parameters while nets update them, and adds
the servers' answers to them. So updates that nets make meanwhile stay.

Shapes: P numbers of all parameters together.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.comm.rpc import Client, Reply
from girih.comm.service import answer, answers, from_text
from girih.dense.options import spread_over
from girih.errors import ConfigError
from girih.hierarchical.averaging import DenseVerb, ranges
from girih.kernels.cpu.arrays import F32
from girih.telemetry.busy import waiting
from girih.telemetry.stats import Stats, StatsSnapshot


class Shadow:
    """The averaging of one replica. It never blocks the threads that train the replica.

    Args:
        parameters: the live parameters, float32, on a CPU; threads may write to them at any time.
        servers: each averages its range of the parameters.
        replica: the number of this replica among all.
        every_steps: steps of this replica between the starts of two rounds; a round that takes longer delays the next.
        stats: counts bytes sent and rounds (``averaging_rounds``).
        vector: the number of these parameters, if each replica is in several processes.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        servers: Sequence[Client],
        replica: int,
        every_steps: int,
        stats: Stats,
        vector: int = 0,
    ) -> None:
        # with separate version counters for autograd
        self._live = [each.data for each in parameters]
        self._servers, self._every_steps, self._stats = servers, every_steps, stats
        self._called = replica, vector
        self._ranges = ranges(sum(each.numel() for each in self._live), len(servers))
        self._changed = threading.Condition()
        self._num_steps = self._num_begun_at = 0
        self._paused = self._busy = self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="girih-shadow", daemon=True)
        self._thread.start()

    def stepped(self) -> None:
        """Counts a step of this replica. Thread-safe. Never waits for a round.

        Raises:
            GirihError: a round has failed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._num_steps += 1
            self._paused = False
            if self._is_due():
                self._changed.notify_all()

    def begin(self) -> None:
        """Makes the servers start with these parameters. Only one replica calls it, while no replica averages."""
        flat = _flat(self._live)
        self._wait(
            [server.call(DenseVerb.BEGIN, self._called[1:], (part,)) for server, part in self._parts(flat)]
        )

    def leave(self) -> None:
        """Announces that this replica makes no step before the next meeting, or ends. Rounds do not wait for it."""
        with self._changed:
            self._paused = True
        self._wait([server.call(DenseVerb.LEAVE, self._called) for server in self._servers])

    def meet(self, buffers: Sequence[Tensor] = ()) -> tuple[F32, F32]:
        """Returns the model of all replicas. All replicas must call it, while none of them trains.

        The replicas keep their parameters. No round is under way from this call until the next step.

        Args:
            buffers: the floating-point buffers, Q numbers together.

        Returns:
            The model, float32[P], and the mean of all replicas' buffers, float32[Q].
        """
        self.leave()
        with self._changed:
            with waiting():  # waits for the dense servers
                self._changed.wait_for(lambda: not self._busy)
            if self._failure is not None:
                raise self._failure
        flat_buffers = _flat(buffers)
        parts = [flat_buffers[part] for part in ranges(len(flat_buffers), len(self._servers))]
        self._stats.sent("dense", flat_buffers.nbytes)
        calls = [
            server.call(DenseVerb.MEET, self._called, (part, other))
            for (server, part), other in zip(self._parts(_flat(self._live)), parts, strict=True)
        ]
        replies = self._wait(calls)
        return np.concatenate(replies[::2]), np.concatenate(replies[1::2])

    def processes(self, *, spans: bool = False) -> Mapping[str, StatsSnapshot]:
        """Maps the title of each dense server to its ``Stats.snapshot``."""
        replies = answers(self._servers, DenseVerb.STATS, (int(spans),))
        return {f"dense-server {number}": from_text(frame.arrays[0]) for number, frame in enumerate(replies)}

    def close(self) -> None:
        """Ends the thread, and disconnects from the servers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for server in self._servers:
            server.close()  # makes a round under way fail
        self._thread.join()

    def _is_due(self) -> bool:
        return not self._paused and self._num_steps - self._num_begun_at >= self._every_steps

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._is_due())
                if self._closing:
                    return
                self._num_begun_at, self._busy = self._num_steps, True
            try:
                with self._stats.spans("average"):
                    self._average()
            except Exception as error:  # the next step or meeting raises it
                self._failure = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                if self._failure is not None:
                    return

    def _average(self) -> None:
        flat = _flat(self._live)
        calls = [server.call(DenseVerb.AVERAGE, self._called, (part,)) for server, part in self._parts(flat)]
        correction = torch.from_numpy(np.concatenate(self._wait(calls)))
        for live, part in spread_over(self._live, correction):
            live.add_(part)
        self._stats.counters["averaging_rounds"] += 1

    def _parts(self, flat: F32) -> list[tuple[Client, F32]]:
        self._stats.sent("dense", flat.nbytes)
        return [(server, flat[part]) for server, part in zip(self._servers, self._ranges, strict=True)]

    @staticmethod
    def _wait(calls: Sequence[Reply]) -> list[F32]:
        return [array for call in calls for array in answer(call).arrays]


def check_averaged(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses parameters that cannot be averaged.

    Raises:
        ConfigError: a parameter is not float32. The error names it.
    """
    for name, parameter in named:
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"dense parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}; expected float32, the dtype in which copies are"
                " averaged: make it float32, or set groups = 1"
            )


def _flat(tensors: Sequence[Tensor]) -> F32:
    if not tensors:
        return np.empty(0, np.float32)
    flat: F32 = torch.cat([each.reshape(-1).float() for each in tensors]).numpy()
    return flat


def average_buffers(buffers: Iterable[Tensor], ranks: TrainerGroup) -> None:
    """Sets each buffer to the mean of all copies, in place. Integer buffers get rank 0's values."""
    for buffer in buffers:
        if buffer.is_floating_point():
            ranks.all_reduce(buffer)
            buffer /= ranks.size
        else:
            ranks.broadcast_tensor(buffer)
