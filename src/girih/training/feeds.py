"""Feeds of examples to a trainer. A feed yields batches, each with the position of the next batch."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from girih.cluster.roles import RoleName
from girih.comm.group import TrainerGroup
from girih.comm.registry import Registry, resolver
from girih.comm.registry.remote import CONNECTED_S
from girih.comm.rpc import Client, Frame, Reply
from girih.comm.service import answer, answers, as_text, connect, from_text
from girih.data import Batch, Dataset, NormalizationStats, Position
from girih.data.batch import Share, share_of
from girih.data.read_ahead import read_ahead
from girih.errors import ConfigError, GirihError, Lost
from girih.kernels.cpu.arrays import U8
from girih.schema import Schema
from girih.sparse.protocol import SparseVerb
from girih.telemetry.stats import StatsSnapshot

LOADER = RoleName.LOADER
END_S = 5.0


class EpochStream(Protocol):
    """One pass over an epoch, or the rest of it."""

    def __iter__(self) -> Iterator[tuple[Batch, Position]]: ...

    def __next__(self) -> tuple[Batch, Position]: ...

    def close(self) -> None:
        """Ends the pass and drops the batches that were read ahead."""
        ...


@dataclass
class TrainingFeed:
    """A trainer's share of the training data, for one call of ``fit``. This process reads the data.

    Attributes:
        prepare: a function that returns this trainer's part of a batch.
        stopped: returns whether this trainer was asked to stop. It is called while this trainer waits for a stream.
    """

    data: Dataset
    prepare: Callable[[Batch], Batch]
    stopped: Callable[[], bool] = field(default=lambda: False, kw_only=True)

    def stream(self, epoch: int, position: Position | None) -> EpochStream:
        """Returns this trainer's share of each batch of an epoch, starting at a position. A thread reads the data."""
        return self.data.ahead(epoch, position, self.prepare, self.stopped)

    def stats(self) -> Mapping[str, StatsSnapshot]:
        """Maps the name of each process behind this feed to its ``Stats.snapshot``."""
        return {}

    def close(self) -> None:
        """Releases the resources of the feed. Called when this trainer needs no more batches."""


@dataclass
class ExampleFeed:
    """Feeds a trainer by examples: each trainer reads all batches and keeps its share of the examples."""

    ranks: TrainerGroup

    def train(self, data: Dataset, normalization: NormalizationStats) -> TrainingFeed:
        """Returns the training data, read in a thread of this process. All trainers call it together."""
        data, prepare = self._local_data(agreed(data, self.ranks), normalization)
        return TrainingFeed(data, prepare, stopped=lambda: self.ranks.size == 1 and self.ranks.stop_requested)

    def end_training(self) -> None:
        """Ends the processes that :meth:`train` started when no trainer needs them. All trainers call it together."""

    def evaluate(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> Iterator[Batch]:
        """Yields this trainer's share of each batch in order. A thread reads the data.

        Args:
            whole: True yields all examples on every trainer, for predictions.
        """
        data, prepare = self._local_data(data, normalization, whole=whole)
        with read_ahead((prepare(batch) for batch, _ in data.batches(0)), data.read_ahead) as batches:
            yield from batches

    def schema_of(self, data: Dataset) -> Schema:
        """Returns the features of the batches that :meth:`evaluate` yields."""
        return data.schema

    def scores(self, gauc_by: str | None) -> bool:
        """Returns whether this trainer's logits count in an evaluation. If not, another trainer has the same logits.

        Args:
            gauc_by: the feature for GAUC, which the scoring trainer must have.
        """
        return True

    def _local_data(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> tuple[Dataset, Callable[[Batch], Batch]]:
        """Returns the data to read, and a function that returns this trainer's part of a batch."""
        if whole or self.ranks.size == 1:
            return data, normalization.apply
        return data, lambda batch: normalization.apply(share_of(batch, self.ranks.rank, self.ranks.size))


@dataclass
class FeatureFeed(ExampleFeed):
    """Feeds a trainer by features: each trainer reads only the columns of its features, for all examples.

    Attributes:
        features: the features of this trainer.
    """

    features: Collection[str]

    def schema_of(self, data: Dataset) -> Schema:
        """Returns this trainer's features."""
        return self._columns_of(data).schema

    def scores(self, gauc_by: str | None) -> bool:
        """Returns True on the trainer that scores all examples: the owner of ``gauc_by``, or without it the first."""
        return self.ranks.first if gauc_by is None else gauc_by in self.features

    def _local_data(
        self, data: Dataset, normalization: NormalizationStats, *, whole: bool = False
    ) -> tuple[Dataset, Callable[[Batch], Batch]]:
        """Returns the columns of this trainer, always for all examples."""
        data = self._columns_of(data)
        return data, normalization.narrowed(data.schema).apply

    def _columns_of(self, data: Dataset) -> Dataset:
        if self.ranks.size == 1:
            return data
        if data.on_bad_row != "error":
            raise ConfigError(
                f"data.on_bad_row = {data.on_bad_row!r}: with strategy 'substitution' each trainer reads only its own columns"
                " and does not know which rows others skip; set it to 'error', or use 'synchronous'"
            )
        names = [feature.name for feature in data.schema.features if feature.name in self.features]
        return data.select(names, labels=True)


@dataclass
class LoaderFeed(ExampleFeed):
    """Feeds trainers from loaders (Persia §4.1).

    Loaders send ids only to embedding workers, and send each trainer its share of the remaining data.

    Attributes:
        start: starts loaders for some data, and returns their addresses. end: ends the loaders.
        secret: the secret that proves that a peer belongs to the run.
        registry: the registry, which has the address of a restarted loader.
        return_s: the seconds to wait for a loader that restarts.
    """

    start: Callable[[Dataset], Sequence[str]]
    end: Callable[[], None]
    secret: bytes
    registry: Registry | None = None
    return_s: float = CONNECTED_S

    def train(self, data: Dataset, normalization: NormalizationStats) -> TrainingFeed:
        """Starts the loaders. One of them serves this trainer."""
        data = agreed(data, self.ranks)
        loaders, rank = self.start(data), self.ranks.rank
        index = rank % len(loaders)
        resolve = None if self.registry is None else resolver(self.registry, LOADER, index)
        loader = connect(loaders[index], secret=self.secret, timeout_s=self.return_s, resolve=resolve)
        return LoaderDataset(data, normalization.apply, rank, loader, first=rank < len(loaders))

    def end_training(self) -> None:
        """Ends the loaders."""
        self.end()


@dataclass
class LoaderDataset(TrainingFeed):
    """Training data that a loader sends.

    Up to ``read_ahead`` shares are in flight. A restarted loader continues after the last share that this trainer
    received.

    Attributes:
        rank: the rank of this trainer. first: True if it is the first trainer that the loader serves.
    """

    rank: int
    loader: Client
    first: bool = True
    num_passes: int = 0

    def stream(self, epoch: int, position: Position | None) -> EpochStream:
        """Returns this trainer's share of each batch of an epoch. Iteration sends the request."""
        self.num_passes += 1
        return self._arriving(self.num_passes, epoch, position)

    def stats(self) -> Mapping[str, StatsSnapshot]:
        """Returns the loader's statistics, on the first trainer that it serves."""
        if not self.first:
            return {}
        return {f"{LOADER} {self.rank}": from_text(self._ask(SparseVerb.STATS, 1).arrays[0])}

    def close(self) -> None:
        """Disconnects from the loader."""
        self.loader.close()

    def _arriving(
        self, number: int, epoch: int, position: Position | None
    ) -> Generator[tuple[Batch, Position], None, None]:
        asked, taken = deque[Reply](), 0

        def ask() -> None:
            while len(asked) < max(1, self.data.read_ahead):
                asked.append(self.loader.call(SparseVerb.NEXT, (number, self.rank, taken + len(asked))))

        try:
            self._ask(SparseVerb.BEGIN, number, self.rank, where=_where(epoch, position))
            while True:
                ask()
                try:
                    frame = answer(asked.popleft())
                except Lost:
                    if position is not None and position.epoch > epoch:  # the epoch had no more batches
                        return
                    asked.clear()
                    self._ask(SparseVerb.RESUME, number, self.rank, taken, where=_where(epoch, position))
                    continue
                if not frame.fields[0]:
                    break
                again = partial(self._stored_again, number, taken, _where(epoch, position))
                taken, position = taken + 1, Position.from_dict(from_text(frame.arrays[3]))
                ask()
                yield self.prepare(_batch_of(frame, again)), position
            for name, value in from_text(frame.arrays[0]).items():
                setattr(self.data.skipped, name, value)
        except GirihError:
            self.close()  # the loader may have ended, and a later call would wait for it
            raise
        finally:
            with contextlib.suppress(GirihError):  # if the loader has ended, its end was reported already
                self._end_share(number, taken)

    def _end_share(self, number: int, taken: int) -> None:
        """Tells the loader that no more shares are needed.

        A restarted loader is told too, because workers have samples of its earlier incarnation.
        """
        until_s = time.monotonic() + END_S
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(Lost):
                self.loader.call(SparseVerb.END, (number, self.rank, taken)).wait(left_s)
                return

    def _stored_again(self, number: int, taken: int, where: U8) -> tuple[int, int]:
        """Makes the loader send the ids of a share to their worker again. Returns the new place of the ids.

        Any thread may call it.
        """
        worker, sample = self._ask(SparseVerb.STORE_AGAIN, number, self.rank, taken, where=where).fields
        return worker, sample

    def _ask(self, verb: SparseVerb, *fields: int, where: U8 | None = None) -> Frame:
        (frame,) = answers([self.loader], verb, fields, () if where is None else (where,), again=True)
        return frame


def agreed(data: Dataset, ranks: TrainerGroup) -> Dataset:
    """Returns a stream with the same bounds on all trainers: those that the first trainer found.

    Returns a dataset of files unchanged.
    """
    if ranks.size == 1 or data.source.bounds is None:
        return data
    return data.within(ranks.broadcast(data.source.bounds))


def _where(epoch: int, position: Position | None) -> U8:
    """Encodes the position of a batch for a request to a loader."""
    return as_text({"epoch": epoch, "position": None if position is None else position.to_dict()})


def _batch_of(frame: Frame, again: Callable[[], tuple[int, int]]) -> Batch:
    """Decodes a share, which has no ids. For ``again`` see :class:`Share`."""
    _, worker, sample, num_examples = frame.fields
    numeric, labels, weight, _, *weights = (np.array(array) for array in frame.arrays)
    label_weights, scale = weights[-2:] if len(weights) > 1 else (None, None)
    return Batch(
        ids=np.empty(0, np.int64),
        offsets=np.zeros(1, np.int32),
        numeric=numeric,
        labels=labels,
        example_weights=weights[0] if len(weights) % 2 else None,
        label_weights=label_weights,
        share=Share(
            num_examples=num_examples,
            weight=float(weight[0]),
            label_scale=scale,
            sample=(worker, sample),
            again=again,
        ),
    )
