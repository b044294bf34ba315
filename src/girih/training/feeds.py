"""Feeds of examples to a trainer: each batch with the position at which the next one starts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.group import TrainerGroup
from girih.comm.registry import Registry, resolver
from girih.comm.rpc import Client, Frame, Reply, connect
from girih.data import Batch, Dataset, NormalizationStats, Position, ReadAhead, read_ahead
from girih.data.batch import Share
from girih.data.shares import share_of
from girih.errors import ConfigError, GirihError
from girih.schema import Schema
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


class TrainingFeed(Protocol):
    """A trainer's share of the training data, for one call of ``fit``."""

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """This trainer's share of every batch of an epoch, from a position on."""
        ...

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Title of a process behind this feed → its ``Stats.snapshot``."""
        ...

    def close(self) -> None:
        """Gives back what the feed holds; this trainer needs no more."""
        ...


class Feed(Protocol):
    """Brings a trainer its examples."""

    def train(self, data: Dataset, normalization: NormalizationStats) -> TrainingFeed:
        """The training data; called by all trainers together."""
        ...

    def end_training(self) -> None:
        """Ends what :meth:`train` started, once no trainer needs it; called by all together."""
        ...

    def evaluate(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> Iterator[Batch]:
        """This trainer's share of each batch in turn.

        Args:
            whole: all examples on every trainer, as predictions have them.
        """
        ...

    def schema_of(self, data: Dataset) -> Schema:
        """Features of the batches that :meth:`evaluate` gives."""
        ...

    def scores(self, gauc_by: str | None) -> bool:
        """Whether this trainer's logits of an evaluation count; else others have the same.

        Args:
            gauc_by: a feature that the one who scores needs.
        """
        ...


class ExampleFeed:
    """Every trainer reads all batches and keeps its share of the examples."""

    def __init__(self, ranks: TrainerGroup) -> None:
        self._ranks = ranks

    def train(self, data: Dataset, normalization: NormalizationStats) -> ReadHere:
        """Reads in a thread of this process."""
        return ReadHere(data, lambda batch: normalization.apply(self._share(batch)))

    def end_training(self) -> None:
        """No-op: it started nothing."""

    def evaluate(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> Iterator[Batch]:
        """Shares of every batch, read in a thread."""
        shares = (batch if whole else self._share(batch) for batch, _ in data.batches(0))
        return _closing(read_ahead((normalization.apply(batch) for batch in shares), data.read_ahead))

    def schema_of(self, data: Dataset) -> Schema:
        """All features."""
        return data.schema

    def scores(self, gauc_by: str | None) -> bool:
        """Every trainer scores its share."""
        return True

    def _share(self, batch: Batch) -> Batch:
        return batch if self._ranks.size == 1 else share_of(batch, self._ranks.rank, self._ranks.size)


class FeatureFeed:
    """Every trainer reads the columns of its own features, of all examples.

    Args:
        features: this trainer's.
    """

    def __init__(self, ranks: TrainerGroup, features: Collection[str]) -> None:
        self._ranks, self._features = ranks, features

    def train(self, data: Dataset, normalization: NormalizationStats) -> ReadHere:
        """Reads in a thread of this process."""
        data = self._columns_of(data)
        return ReadHere(data, normalization.narrowed(data.schema).apply)

    def end_training(self) -> None:
        """No-op: it started nothing."""

    def evaluate(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> Iterator[Batch]:
        """All examples, read in a thread."""
        data = self._columns_of(data)
        apply = normalization.narrowed(data.schema).apply
        return _closing(read_ahead((apply(batch) for batch, _ in data.batches(0)), data.read_ahead))

    def schema_of(self, data: Dataset) -> Schema:
        """This trainer's features."""
        return self._columns_of(data).schema

    def scores(self, gauc_by: str | None) -> bool:
        """One scores everything: the first, or the one that has ``gauc_by``."""
        return self._ranks.first if gauc_by is None else gauc_by in self._features

    def _columns_of(self, data: Dataset) -> Dataset:
        if self._ranks.size == 1:
            return data
        if data.on_bad_row != "error":
            raise ConfigError(
                f"data.on_bad_row = {data.on_bad_row!r}: with strategy 'substitution' each trainer sees its own columns"
                " and cannot know what others skip; set it to 'error', or use 'synchronous'"
            )
        own = [feature.name for feature in data.schema.features if feature.name in self._features]
        return data.select(own, labels=True)


class ReadHere:
    """Training data that this process reads by itself."""

    def __init__(self, data: Dataset, prepare: Callable[[Batch], Batch]) -> None:
        self._data, self._prepare = data, prepare

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """Every batch of an epoch, read in a thread."""
        batches = ((self._prepare(batch), after) for batch, after in self._data.batches(epoch, position))
        return read_ahead(batches, self._data.read_ahead)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Empty: no other process takes part."""
        return {}

    def close(self) -> None:
        """No-op: it holds nothing."""


class LoaderFeed(ExampleFeed):
    """Loaders read, keep the ids away from trainers, and send each its share of the rest (Persia §4.1).

    Args:
        start: starts loaders for some data; returns where they listen. end: ends them.
        secret: proves that a peer belongs to the run. registry: where a loader that came back is found.
    """

    def __init__(
        self,
        ranks: TrainerGroup,
        start: Callable[[Dataset], Sequence[str]],
        end: Callable[[], None],
        secret: bytes,
        registry: Registry | None = None,
    ) -> None:
        super().__init__(ranks)
        self._start, self._end, self._secret, self._registry = start, end, secret, registry

    def train(self, data: Dataset, normalization: NormalizationStats) -> Loaded:  # type: ignore[override]
        """Has the loaders started."""
        return Loaded(data, normalization, self._ranks, self._start(data), self._secret, self._registry)

    def end_training(self) -> None:
        """Ends the loaders."""
        self._end()


class Loaded:
    """Training data that a loader sends.

    What is left of earlier requests waits at the loader; up to ``read_ahead`` shares are on their way here.
    """

    def __init__(
        self,
        data: Dataset,
        normalization: NormalizationStats,
        ranks: TrainerGroup,
        loaders: Sequence[str],
        secret: bytes,
        registry: Registry | None = None,
    ) -> None:
        self._data, self._normalization, self._ranks = data, normalization, ranks
        self._num_loaders = len(loaders)
        index = ranks.rank % len(loaders)
        resolve = None if registry is None else resolver(registry, LOADER, index)
        self._loader = connect(loaders[index], secret=secret, resolve=resolve)
        self._num_passes = 0

    def stream(self, epoch: int, position: Position | None) -> Stream:
        """This trainer's share of every batch of an epoch."""
        self._num_passes += 1
        begin = {"epoch": epoch, "position": None if position is None else position.to_dict()}
        answer(self._loader.call(Verb.BEGIN, (self._num_passes,), (as_text(begin),)))
        return _Arriving(self._loader, self._num_passes, self._ranks.rank, self._data, self._normalization)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Statistics of the loaders, each asked by the first trainer that it serves."""
        if self._ranks.rank >= self._num_loaders:
            return {}
        return {f"{LOADER} {self._ranks.rank}": from_text(answer(self._loader.call(Verb.STATS)).arrays[0])}

    def close(self) -> None:
        """Lets the loader go."""
        self._loader.close()


def _closing(batches: ReadAhead[Batch]) -> Iterator[Batch]:
    try:
        yield from batches
    finally:
        batches.close()


class _Arriving:
    """The shares of one pass, as they come."""

    def __init__(
        self, loader: Client, number: int, trainer: int, data: Dataset, normalization: NormalizationStats
    ) -> None:
        self._loader, self._fields = loader, (number, trainer)
        self._data, self._normalization = data, normalization
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
        return self._normalization.apply(_batch_of(frame)), Position.from_dict(from_text(frame.arrays[3]))

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
