"""How examples come to a trainer: each batch with the position at which the next one starts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.context import RunContext
from girih.comm.rpc import Client, Frame, Reply
from girih.data import Batch, Dataset, NormalizationStats, Position, read_ahead
from girih.data.batch import Share
from girih.data.shares import share_of
from girih.errors import GirihError
from girih.sparse.service.protocol import Verb, answer, as_text, from_text

LOADER = RoleName.LOADER
END_S = 5.0


class Stream(Protocol):
    """One pass over an epoch, or the rest of it."""

    def __iter__(self) -> Iterator[tuple[Batch, Position]]: ...

    def __next__(self) -> tuple[Batch, Position]: ...

    def close(self) -> None:
        """Ends the pass; what was read ahead is dropped."""
        ...


class Feed(Protocol):
    """Where a trainer's share of the training data comes from."""

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """This trainer's share of every batch of an epoch, from a position on."""
        ...

    def told(self) -> dict[str, dict[str, Any]]:
        """What the processes beside this feed count, by title: ``wire`` and ``spans``."""
        ...

    def close(self) -> None:
        """Gives back what the feed holds."""
        ...


class ExampleFeed:
    """Every trainer reads all batches and keeps its share of each."""

    def __init__(self, data: Dataset, moments: NormalizationStats, context: RunContext) -> None:
        self._data, self._moments, self._ranks = data, moments, context.ranks

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """This trainer's share of every batch of an epoch, read in a thread."""
        return read_ahead(self._shares(self._data.batches(epoch, position)), self._data.read_ahead)

    def told(self) -> dict[str, dict[str, Any]]:
        """There are none."""
        return {}

    def close(self) -> None:
        """It holds nothing."""
        return

    def _shares(self, batches: Iterator[tuple[Batch, Position]]) -> Iterator[tuple[Batch, Position]]:
        for batch, after in batches:
            if self._ranks.size > 1:
                batch = share_of(batch, self._ranks.rank, self._ranks.size)
            yield self._moments.apply(batch), after


class FeatureFeed(ExampleFeed):
    """Every trainer reads its own columns of all batches, and keeps all examples."""

    def _shares(self, batches: Iterator[tuple[Batch, Position]]) -> Iterator[tuple[Batch, Position]]:
        for batch, after in batches:
            yield self._moments.apply(batch), after


class LoaderFeed:
    """A loader reads, keeps the ids away from trainers, and sends each its share of the rest (Persia §4.1).

    What is left of earlier requests waits at the loader; up to ``read_ahead`` shares are on their way here.
    """

    def __init__(self, data: Dataset, moments: NormalizationStats, context: RunContext) -> None:
        self._data, self._moments, self._ranks = data, moments, context.ranks
        loaders = context.addresses[LOADER]
        self._num_loaders = len(loaders)
        self._loader = context.connect(LOADER, context.ranks.rank % len(loaders))
        self._num_passes = 0

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """This trainer's share of every batch of an epoch."""
        self._num_passes += 1
        told = {"epoch": epoch, "position": None if position is None else position.to_dict()}
        answer(self._loader.call(Verb.BEGIN, (self._num_passes,), (as_text(told),)))
        return _Arriving(self._loader, self._num_passes, self._ranks.rank, self._data, self._moments)

    def told(self) -> dict[str, dict[str, Any]]:
        """What a loader counts, by the first trainer that it serves."""
        if self._ranks.rank >= self._num_loaders:
            return {}
        told = from_text(answer(self._loader.call(Verb.COUNT)).arrays[0])
        return {f"{LOADER} {self._ranks.rank}": told}

    def close(self) -> None:
        """Lets the loader go."""
        self._loader.close()


class _Arriving:
    """The shares of one pass, as they come."""

    def __init__(
        self, loader: Client, number: int, trainer: int, data: Dataset, moments: NormalizationStats
    ) -> None:
        self._loader, self._fields = loader, (number, trainer)
        self._data, self._moments = data, moments
        self._num_asked = 0
        self._asked: deque[Reply] = deque()
        for _ in range(max(1, data.read_ahead)):
            self._ask()
        self._open = True

    def __iter__(self) -> _Arriving:
        return self

    def __next__(self) -> tuple[Batch, Position]:
        if not self._asked:
            raise StopIteration
        frame = answer(self._asked.popleft())
        if not frame.fields[0]:
            self._asked.clear()
            for name, value in from_text(frame.arrays[0]).items():
                setattr(self._data.skipped, name, value)
            raise StopIteration
        self._ask()
        return self._moments.apply(_batch_of(frame)), Position.from_dict(from_text(frame.arrays[3]))

    def _ask(self) -> None:
        self._asked.append(self._loader.call(Verb.NEXT, (*self._fields, self._num_asked)))
        self._num_asked += 1

    def close(self) -> None:
        """Ends the pass for this trainer."""
        if self._open:
            self._open = False
            self._asked.clear()
            with contextlib.suppress(GirihError):  # where the loader is gone, that has been told already
                self._loader.call(Verb.END, self._fields).wait(END_S)


def _batch_of(frame: Frame) -> Batch:
    """A share without its ids."""
    _, worker, sample, num_examples = frame.fields
    numeric, labels, weight, _, *example_weights = (np.array(array) for array in frame.arrays)
    return Batch(
        ids=np.empty(0, np.int64),
        offsets=np.zeros(1, np.int32),
        numeric=numeric,
        labels=labels,
        example_weights=example_weights[0] if example_weights else None,
        share=Share(num_examples=num_examples, weight=float(weight[0]), sample=(worker, sample)),
    )
