"""Schedules: they join the two halves, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from girih.data.batch import Batch, micro_batches
from girih.dense.half import Computed, DenseHalf, Outcome
from girih.errors import NonFiniteError, WireError
from girih.models.embeddings import Embeddings
from girih.sparse.half import Pending, Pulled, SparseHalf
from girih.telemetry.stats import Spans

Token = TypeVar("Token")
Batches = Iterable[tuple[Batch, Token]]
MayBegin = Callable[[int], bool]
"""Returns whether the batch with this distance from the last yielded step may begin to move rows or parameters."""


@dataclass(frozen=True, slots=True)
class Step(Generic[Token]):
    """The result of one batch that was trained on or refused.

    Attributes:
        token: the value that came with the batch: the position after it.
        num_examples: examples of the batch, over all trainers.
        outcome: its loss, or the reason for the refusal.
        staleness: earlier batches whose gradients were not applied when its rows were read.
        under_way: later batches that have begun to move rows or parameters. State must only be saved if there are none.
    """

    token: Token
    num_examples: int
    outcome: Outcome
    staleness: int = 0
    under_way: int = 0

    @property
    def loss(self) -> float:
        """The mean loss of the batch."""
        return self.outcome.facts().loss

    @property
    def refused(self) -> NonFiniteError | None:
        """The reason why nothing was applied, or None."""
        return self.outcome.facts().refused


def always(number: int) -> bool:
    """Allows each batch to begin."""
    return True


@dataclass(slots=True)
class JoinedHalves:
    """Both halves of a trainer, driven by a schedule.

    Attributes:
        num_updates: number of applied updates.
        lr_scale: returns the factor for the sparse learning rates; called once per step.
        turn: lock held while a batch is pulled or pushed, if several threads do that.
    """

    sparse: SparseHalf
    dense: DenseHalf
    num_updates: int
    lr_scale: Callable[[], float]
    spans: Spans
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)

    def pull(self, batch: Batch, *prepared: Any) -> Pulled:
        """Starts to read the rows of a batch."""
        with self.turn, self.spans("pull"):
            return self.sparse.pull(batch, *prepared)

    def move(
        self, batch: Batch, token: Token, pulled: Pulled, computed: Computed
    ) -> tuple[Step[Token], Pending]:
        """Pushes and applies the gradients of a batch if both halves vote for it; else does neither."""
        vote = computed.vote
        with self.turn, self.spans("push"):
            pending = pulled.push(self.num_updates + 1, self.lr_scale(), vote)
            self.num_updates += not vote.known_refused
        with self.spans("apply"):
            outcome = computed.apply(vote)
        num_examples = batch.num_examples if batch.share is None else batch.share.num_examples
        return Step(token, num_examples, outcome, pulled.staleness), pending


class Schedule(Protocol):
    """Trains on batches in order. Yields a step once its updates are applied or in flight.

    If closed early, it drops the batches that it has read ahead.
    """

    def __call__(
        self,
        batches: Batches[Token],
        halves: JoinedHalves,
        may_begin: MayBegin = always,
    ) -> Generator[Step[Token], None, None]:
        """Runs the schedule.

        Args:
            may_begin: asks if a batch may begin. Not needed by a schedule whose batches move one at a time.
        """
        ...


@dataclass(slots=True)
class StalenessGate:
    """Bounds the batches of a trainer that are read but not yet applied. It uses no clock, socket or thread.

    Attributes:
        staleness: τ, the maximum number of these batches when a batch is read.
        num_read, num_applied: batches so far; a batch that moved nothing counts as applied.
    """

    staleness: int
    num_read: int = 0
    num_applied: int = 0

    def admits(self) -> bool:
        """Returns whether the next batch may be read now."""
        return self.num_read - self.num_applied <= self.staleness


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Pulls up to ``staleness`` batches before the gradients of earlier batches are applied.

    So lookups of later batches and updates of earlier ones run during dense compute (Persia §3, §4.2.1). With 0,
    each batch sees all earlier updates.

    Attributes:
        micro_batches: parts in which a batch is computed, with one push and one apply for all parts (PICASSO §III-C).
        prefetch: number of further batches to read. Work that needs only their ids is done during the compute of earlier batches.
    """

    staleness: int
    micro_batches: int = 1
    prefetch: int = 0

    def __call__(
        self,
        batches: Batches[Token],
        halves: JoinedHalves,
        may_begin: MayBegin = always,
    ) -> Generator[Step[Token], None, None]:
        """Yields a step once its update is in flight."""
        source, gate = _BatchSource(iter(batches), halves), StalenessGate(self.staleness)
        ahead: deque[tuple[Batch, Token, Pulled]] = deque()
        under_way: deque[Pending] = deque()
        try:
            while True:
                while under_way and under_way[0].done():
                    under_way.popleft().wait()
                    gate.num_applied += 1
                while gate.admits() and (item := source.pull()):
                    ahead.append(item)
                    gate.num_read += 1
                if self.prefetch:
                    source.prepare(self.prefetch)
                if ahead:
                    batch, _, pulled = ahead[0]  # a failed batch stays queued and is dropped at the end
                    computed = self._computed(batch, pulled, halves)
                    step, pending = halves.move(*ahead.popleft(), computed)
                    del computed, pulled  # the next batch needs the memory
                    under_way.append(pending)
                    yield step
                elif under_way:
                    with halves.spans("wait for update"):
                        under_way.popleft().wait()
                    gate.num_applied += 1
                else:
                    return
        finally:
            for _, _, pulled in ahead:
                with suppress(WireError):  # the error that broke the connection was, or will be, raised
                    pulled.discard()

    def _computed(self, batch: Batch, pulled: Pulled, halves: JoinedHalves) -> Computed:
        """Runs the forward and backward pass of a batch whose rows are being fetched."""
        dense, spans = halves.dense, halves.spans
        if self.micro_batches == 1:
            with spans("wait for rows"):
                embeddings = pulled.wait()
            return dense.compute(batch, embeddings)

        def rows(examples: slice) -> Embeddings:
            with spans("wait for rows"):
                return pulled.wait(examples)

        (examples, first), *later = micro_batches(batch, self.micro_batches)
        computed = dense.compute(first, rows(examples), last=not later)
        for number, (examples, part) in enumerate(later, 1):
            computed = computed.add(part, rows(examples), last=number == len(later))
        return computed


def in_step(micro_batches: int = 1, *, prefetch: int = 0) -> Pipelined:
    """Returns the schedule of pull, compute, push: each batch sees all earlier updates; staleness is 0."""
    return Pipelined(0, micro_batches, prefetch)


class _BatchSource(Generic[Token]):
    """Yields batches in order, and prepares the next ones."""

    def __init__(self, batches: Iterator[tuple[Batch, Token]], halves: JoinedHalves) -> None:
        self._batches, self._halves = batches, halves
        self._prepared: deque[tuple[Batch, Token, Any]] = deque()
        self._failed: Exception | None = None
        self._ended = False

    def prepare(self, count: int) -> None:
        """Reads and prepares the next batches, if not done yet. An error in reading is raised when that batch is pulled."""
        while len(self._prepared) < count and self._failed is None:
            try:
                item = self._next()
            except Exception as error:
                self._failed = error
            else:
                if item is None:
                    return
                self._prepared.append((*item, self._halves.sparse.prepare(item[0])))

    def pull(self) -> tuple[Batch, Token, Pulled] | None:
        """Starts to read the rows of the next batch; None after the last one."""
        prepared = self._prepared.popleft() if self._prepared else None
        if prepared is None and self._failed is not None:
            raise self._failed
        item = self._next() if prepared is None else prepared[:2]
        if item is None:
            return None
        return *item, self._halves.pull(item[0], *(() if prepared is None else prepared[2:]))

    def _next(self) -> tuple[Batch, Token] | None:
        item = None if self._ended else next(self._batches, None)
        self._ended = item is None
        return item
