"""A dense server: averages its range of the parameters of all replicas, beside their training (HT §2.2, ShadowSync).

Requests are done one after the other. A round of an algorithm that takes all replicas together is done once all are there, or
have left; who waits for it is the thread of a replica that does nothing else.

Shapes: P numbers of the range.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.messages import as_text
from girih.comm.rpc import Request
from girih.comm.serving import Service
from girih.dense.averaging.algorithm import BY_NAME, Averaging
from girih.dense.service.protocol import Verb
from girih.runs.stats import Stats


@dataclass
class DenseServer:
    """One server of several.

    Attributes:
        num_replicas: those that average.
        averaging: name of the algorithm. rate: its elastic rate; None takes the algorithm's own.
        address: where to listen; see :func:`girih.comm.endpoints.listen`.
    """

    index: int
    num_replicas: int
    averaging: str
    rate: float | None
    address: str
    secret: bytes
    incarnation: int = 0
    name: str = RoleName.DENSE_SERVER

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        algorithm = BY_NAME[self.averaging](self.num_replicas, self.rate)
        _Work(algorithm, self.num_replicas).serve(self, ready, stop)


class _Work(Service):
    """The work of a server, request by request."""

    def __init__(self, algorithm: Averaging, num_replicas: int) -> None:
        super().__init__({
            Verb.BEGIN: self._begin, Verb.AVERAGE: self._take_part, Verb.LEAVE: self._leave, Verb.MEET: self._meet,
            Verb.STATS: self._read_stats,
        })  # fmt: skip
        self._algorithm, self._num_replicas = algorithm, num_replicas
        self._waiting: dict[int, Request] = {}  # for the round under way, by replica
        self._left: set[int] = set()
        self._met: dict[int, Request] = {}
        self._stats = Stats()

    def _begin(self, request: Request) -> None:
        self._algorithm.begin(np.array(request.frame.arrays[0]))
        request.reply()

    def _take_part(self, request: Request) -> None:
        self._waiting[request.frame.fields[0]] = request
        self._average_if_all_are_there()

    def _leave(self, request: Request) -> None:
        self._left.add(request.frame.fields[0])
        self._average_if_all_are_there()
        request.reply()

    def _average_if_all_are_there(self) -> None:
        missing = self._num_replicas - len(self._waiting.keys() | self._left)
        if not self._waiting or (self._algorithm.together and missing):
            return
        requests = [self._waiting[replica] for replica in sorted(self._waiting)]
        self._waiting = {}
        with self._stats.spans("average"):
            corrections = self._algorithm.round(np.stack([each.frame.arrays[0] for each in requests]))
        self._stats.counters["rounds"] += 1
        for request, correction in zip(requests, corrections, strict=True):
            self._stats.sent("dense", correction.nbytes)
            request.reply((), (correction,))

    def _meet(self, request: Request) -> None:
        self._met[request.frame.fields[0]] = request
        if len(self._met) < self._num_replicas:
            return
        requests = [self._met[replica] for replica in sorted(self._met)]
        self._met, self._left = {}, set()
        model = self._algorithm.model(np.stack([each.frame.arrays[0] for each in requests]))
        for each in requests:
            self._stats.sent("dense", model.nbytes)
            each.reply((), (model,))

    def _read_stats(self, request: Request) -> None:
        request.reply((), (as_text(self._stats.snapshot(spans=bool(request.frame.fields[0]))),))
