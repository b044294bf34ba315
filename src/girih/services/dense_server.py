"""A dense server: averages its range of the parameters of all replicas while they train (HT §2.2, ShadowSync).

The server handles requests one after the other. Some algorithms need all replicas in a round. Such a round runs when
all replicas have asked for it. Meanwhile only a separate thread of each replica waits. If a replica has left, no round
runs, and the other replicas keep their parameters: a mean of some replicas is not the mean of all.

Shapes: P numbers of the range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.rpc import Request
from girih.comm.service import Meeting, Service
from girih.errors import WireError
from girih.hierarchical.averaging import BY_NAME, Averaging, DenseVerb


class _Vector:
    """A range of parameters that are averaged together, with its waiting requests.

    Attributes:
        size: P, or None before it is known.
    """

    def __init__(self, algorithm: Averaging, num_replicas: int) -> None:
        self.algorithm = algorithm
        self.round, self.meeting = Meeting[Request](num_replicas), Meeting[Request](num_replicas)
        self.size: int | None = None


@dataclass(kw_only=True)
class DenseServer(Service):
    """One of several dense servers.

    Attributes:
        num_replicas: the replicas that are averaged.
        averaging: the name of the algorithm.
        rate: the algorithm's elastic rate; None takes its default.
    """

    name = RoleName.DENSE_SERVER
    verbs = DenseVerb
    num_replicas: int
    averaging: str
    rate: float | None

    def open(self, closing: ExitStack) -> None:
        """See :class:`Service`."""
        self._vectors: defaultdict[int, _Vector] = defaultdict(self._new_vector)
        super().open(closing)

    def _new_vector(self) -> _Vector:
        return _Vector(BY_NAME[self.averaging](self.num_replicas, self.rate), self.num_replicas)

    def on_begin(self, request: Request) -> None:
        """See :class:`DenseVerb`."""
        (number,) = request.frame.fields
        _check(request, None, 1)
        model = np.array(request.frame.arrays[0])
        known = self._vectors.get(number)
        if known is not None and (known.round.waiting or known.meeting.waiting) and known.size != len(model):
            raise WireError(f"{len(model)} numbers of vector {number}; replicas wait with {known.size}")
        vector = self._vectors[number]
        vector.algorithm.begin(model)
        vector.size = len(model)
        request.reply()

    def on_average(self, request: Request) -> None:
        """See :class:`DenseVerb`."""
        replica, number = self._called(request)
        vector = self._begun(number)
        _check(request, vector, 1)
        vector.round.waiting[replica] = request
        self._average_if_complete(vector)

    def on_leave(self, request: Request) -> None:
        """See :class:`DenseVerb`."""
        replica, number = self._called(request)
        self._vectors[number].round.absent.add(replica)
        self._average_if_complete(self._vectors[number])
        request.reply()

    def _average_if_complete(self, vector: _Vector) -> None:
        together = vector.algorithm.together
        if not vector.round.waiting or (together and not vector.round.is_complete):
            return
        requests = vector.round.end()
        with _failing(requests):
            replicas = np.stack([peer.frame.arrays[0] for peer in requests])
            if together and len(requests) < self.num_replicas:
                corrections = np.zeros_like(replicas)
            else:
                with self.stats.spans("average"):
                    corrections = vector.algorithm.round(replicas)
                self.stats.counters["rounds"] += 1
            for request, correction in zip(requests, corrections, strict=True):
                self.stats.sent("dense", correction.nbytes)
                request.reply((), (correction,))

    def on_meet(self, request: Request) -> None:
        """See :class:`DenseVerb`."""
        replica, number = self._called(request)
        vector = self._begun(number)
        _check(request, vector, 2)
        shape = request.frame.arrays[1].shape
        for other, met in vector.meeting.waiting.items():
            expected = met.frame.arrays[1].shape
            if other != replica and shape != expected:
                raise WireError(f"buffers {list(shape)} of replica {replica}; expected {list(expected)}")
        vector.meeting.waiting[replica] = request
        if not vector.meeting.is_complete:
            return
        requests = vector.meeting.end()
        vector.round.absent.clear()
        with _failing(requests):
            parameters, buffers = (np.stack([peer.frame.arrays[n] for peer in requests]) for n in range(2))
            model, mean = vector.algorithm.model(parameters), buffers.mean(axis=0)
            for peer in requests:
                self.stats.sent("dense", model.nbytes + mean.nbytes)
                peer.reply((), (model, mean))

    def _called(self, request: Request) -> tuple[int, int]:
        """Returns the replica that asks, and the number of the vector."""
        replica, number = request.frame.fields
        if not 0 <= replica < self.num_replicas:
            raise WireError(f"replica {replica}; expected 0 to {self.num_replicas - 1}")
        return replica, number

    def _begun(self, number: int) -> _Vector:
        vector = self._vectors.get(number)
        if vector is None or vector.size is None:
            raise WireError(f"vector {number} was not begun on this server")
        return vector


def _check(request: Request, vector: _Vector | None, num_arrays: int) -> None:
    """Refuses arrays that do not fit the other replicas' arrays, before a replica waits for them."""
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
    """Fails all requests if an error occurs, because all of them wait.

    Numbers that are not finite stay, as in training. numpy's warnings are off: one raised as an error would leave a
    round half done.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except Exception as error:
        for request in requests:
            request.fail(error)
