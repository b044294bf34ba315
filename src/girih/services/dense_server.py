"""A dense server: averages its range of the parameters of all replicas, beside their training (HT §2.2, ShadowSync).

Requests are done one after the other. A round of an algorithm that takes all replicas together is done once all are there; who
waits for it is the thread of a replica that does nothing else. Where replicas have left, there is no round: those that wait
are answered that they stay as they are, since the mean of some is not that of all.

Shapes: P numbers of the range.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.rpc import Request
from girih.comm.service import Service, as_text
from girih.errors import WireError
from girih.hierarchical.averaging import BY_NAME, Averaging, DenseVerb
from girih.telemetry.stats import Stats


@dataclass
class DenseServer:
    """One server of several.

    Attributes:
        num_replicas: those that average.
        averaging: name of the algorithm. rate: its elastic rate; None takes the algorithm's own.
        address: where to listen; see :func:`girih.comm.service.listen`.
    """

    index: int
    num_replicas: int
    averaging: str
    rate: float | None
    address: str
    secret: bytes
    incarnation: int = 0
    name: str = RoleName.DENSE_SERVER
    stats: Stats = field(default_factory=Stats, repr=False, compare=False)

    def run(self, ready: Callable[[str], None], stop: threading.Event) -> None:
        """Serves until ``stop`` is set."""
        make = partial(BY_NAME[self.averaging], self.num_replicas, self.rate)
        _DenseServerWork(make, self.num_replicas, self.stats).serve(self, ready, stop)


class _Vector:
    """A range of parameters that are averaged together: what waits for its rounds and meetings.

    Attributes:
        waiting: for the round under way, by replica. met: for the meeting under way. left: rounds do not wait for these.
        size: P; None before it is known.
    """

    def __init__(self, algorithm: Averaging) -> None:
        self.algorithm = algorithm
        self.waiting: dict[int, Request] = {}
        self.left: set[int] = set()
        self.met: dict[int, Request] = {}
        self.size: int | None = None


class _DenseServerWork(Service):
    """The work of a server, request by request."""

    def __init__(self, make: Callable[[], Averaging], num_replicas: int, stats: Stats) -> None:
        super().__init__({
            DenseVerb.BEGIN: self._begin_vector, DenseVerb.AVERAGE: self._take_part, DenseVerb.LEAVE: self._leave_rounds, DenseVerb.MEET: self._meet_replicas,
            DenseVerb.STATS: self._read_stats,
        }, stats)  # fmt: skip
        self._num_replicas = num_replicas
        self._vectors: defaultdict[int, _Vector] = defaultdict(lambda: _Vector(make()))
        self._stats = stats

    def _begin_vector(self, request: Request) -> None:
        (number,) = request.frame.fields
        _check(request, None, 1)
        model = np.array(request.frame.arrays[0])
        known = self._vectors.get(number)
        if known is not None and (known.waiting or known.met) and known.size != len(model):
            raise WireError(f"{len(model)} numbers of vector {number}; replicas wait with {known.size}")
        vector = self._vectors[number]
        vector.algorithm.begin(model)
        vector.size = len(model)
        request.reply()

    def _take_part(self, request: Request) -> None:
        replica, number = self._called(request)
        vector = self._begun(number)
        _check(request, vector, 1)
        vector.waiting[replica] = request
        self._average_if_all_are_there(vector)

    def _leave_rounds(self, request: Request) -> None:
        replica, number = self._called(request)
        self._vectors[number].left.add(replica)
        self._average_if_all_are_there(self._vectors[number])
        request.reply()

    def _average_if_all_are_there(self, vector: _Vector) -> None:
        missing = self._num_replicas - len(vector.waiting.keys() | vector.left)
        if not vector.waiting or (vector.algorithm.together and missing):
            return
        requests = [vector.waiting[replica] for replica in sorted(vector.waiting)]
        vector.waiting = {}
        with _failing(requests):
            replicas = np.stack([peer.frame.arrays[0] for peer in requests])
            if vector.algorithm.together and len(requests) < self._num_replicas:
                corrections = np.zeros_like(replicas)
            else:
                with self._stats.spans("average"):
                    corrections = vector.algorithm.round(replicas)
                self._stats.counters["rounds"] += 1
            for request, correction in zip(requests, corrections, strict=True):
                self._stats.sent("dense", correction.nbytes)
                request.reply((), (correction,))

    def _meet_replicas(self, request: Request) -> None:
        replica, number = self._called(request)
        vector = self._begun(number)
        _check(request, vector, 2)
        shape = request.frame.arrays[1].shape
        for other, met in vector.met.items():
            expected = met.frame.arrays[1].shape
            if other != replica and shape != expected:
                raise WireError(f"buffers {list(shape)} of replica {replica}; expected {list(expected)}")
        vector.met[replica] = request
        if len(vector.met) < self._num_replicas:
            return
        requests = [vector.met[replica] for replica in sorted(vector.met)]
        vector.met, vector.left = {}, set()
        with _failing(requests):
            parameters, buffers = (np.stack([peer.frame.arrays[n] for peer in requests]) for n in range(2))
            model, mean = vector.algorithm.model(parameters), buffers.mean(axis=0)
            for peer in requests:
                self._stats.sent("dense", model.nbytes + mean.nbytes)
                peer.reply((), (model, mean))

    def _called(self, request: Request) -> tuple[int, int]:
        """The replica that asks, and the number of the vector."""
        replica, number = request.frame.fields
        if not 0 <= replica < self._num_replicas:
            raise WireError(f"replica {replica}; expected 0 to {self._num_replicas - 1}")
        return replica, number

    def _begun(self, number: int) -> _Vector:
        vector = self._vectors.get(number)
        if vector is None or vector.size is None:
            raise WireError(f"vector {number} was not begun here")
        return vector

    def _read_stats(self, request: Request) -> None:
        request.reply((), (as_text(self._stats.snapshot(spans=bool(request.frame.fields[0]))),))


def _check(request: Request, vector: _Vector | None, num_arrays: int) -> None:
    """Refuses arrays that others could not be averaged with, before anybody waits for them."""
    arrays = request.frame.arrays
    size = None if vector is None else vector.size
    bad = len(arrays) != num_arrays or any(array.dtype != np.float32 or array.ndim != 1 for array in arrays)
    if bad or (size is not None and len(arrays[0]) != size):
        came = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays) or "nothing"
        raise WireError(
            f"{came}; expected {num_arrays} of float32, the first [{'P' if size is None else size}]"
        )


@contextmanager
def _failing(requests: Sequence[Request]) -> Iterator[None]:
    """Answers all requests by what goes wrong with one of them, since all wait.

    Numbers that are not finite stay so, as in training: a warning of numpy that somebody has raised would leave a round half done.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except Exception as error:
        for request in requests:
            request.fail(error)
