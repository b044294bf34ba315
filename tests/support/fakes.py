"""Halves in plain Python, of which every number can be followed by hand; for tests of what joins halves.

Shapes: B examples, D width of an embedding, L ids of a sequence feature in the batch.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch
from girih.dense.half import Outcome, StepFacts
from girih.errors import NonFiniteError
from girih.models.embeddings import Block, Embeddings, Jagged
from girih.models.needs import EMBEDDING, FIRST_ORDER, SEQUENCE
from girih.sparse.half import SparseStats
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import LiveNumber, StatsSnapshot

Key = tuple[str, str, int]
"""Table, segment ("embedding" or "first_order") and id."""
Vector = NDArray[np.float32]


def plain_initial(key: Key, dim: int) -> Vector:
    """Initial values that differ by key."""
    return np.full(dim, zlib.crc32(repr(key).encode()) % 97 / 97 - 0.5, np.float32)


class FakePending:
    """An update that is applied when its half delivers it, or when it is waited for."""

    def __init__(self, half: FakeSparse, apply: Callable[[], None]) -> None:
        self._half, self._apply, self._done = half, apply, False

    def done(self) -> bool:
        """Whether it is applied."""
        return self._done

    def wait(self) -> None:
        """Delivers all up to this one."""
        while not self._done:
            self._half.deliver()

    def arrive(self) -> None:
        """Applies it."""
        self._apply()
        self._done = True


class FakePulled:
    """The rows of a batch as they were when it was pulled."""

    def __init__(self, half: FakeSparse, batch: Batch, number: int, *, train: bool) -> None:
        self.staleness = len(half.open) if train else 0
        self._half, self._batch, self._number, self._train = half, batch, number, train
        self._rows = {key: half.row(key, train=train) for each in half.reads(batch) for key in each[2]}
        self._parts: list[tuple[str, str, list[Key], Tensor, int]] = []

    def wait(self, examples: slice | None = None) -> Embeddings:
        """The embeddings; each call makes leaves of its own."""
        chosen = range(*(examples or slice(None)).indices(self._batch.num_examples))
        blocks: dict[str, list[Block]] = {EMBEDDING: [], FIRST_ORDER: []}
        sequences = {}
        for name, kind, _, bags in self._half.reads(self._batch):
            own = [bags[example] for example in chosen]
            leaf = self._leaf(name, kind, own)
            if kind == SEQUENCE:
                bounds = np.cumsum([0, *(len(bag) for bag in own)])
                sequences[name] = Jagged(leaf, torch.from_numpy(bounds))
            else:
                blocks[kind].append(Block((name,), leaf))
        return Embeddings(tuple(blocks[EMBEDDING]), sequences, tuple(blocks[FIRST_ORDER]))

    def push(self, step: int, lr_scale: float, vote: Vote) -> FakePending:
        """Applies the gradients, once they are delivered; or nothing."""
        error, totals = None, {}
        try:
            totals = self._totals()
        except NonFiniteError as refusal:
            error = refusal
        vote.cast(torch.tensor(error is not None))
        vote.error_from = lambda numbers: error
        if vote.known_refused:
            self._half.events.append(("refuse", self._number))
            return self._half.send(self._number, lambda: None)
        self._half.events.append(("push", self._number))
        self._half.last_step = step
        return self._half.send(self._number, lambda: self._half.move(totals, lr_scale))

    def discard(self) -> FakePending:
        """Gives the batch up."""
        self._half.events.append(("give up", self._number))
        return self._half.send(self._number, lambda: None)

    def _leaf(self, name: str, kind: str, bags: list[list[Key]]) -> Tensor:
        dim = self._half.dim(name, kind)
        rows = [[self._rows[key] for key in bag] for bag in bags]
        if kind == SEQUENCE:
            flat = [row for bag in rows for row in bag]
            values = np.array(flat, np.float32)
            shape: tuple[int, ...] = (len(flat), dim)
        else:
            pooled = [np.mean(bag, axis=0) if bag else np.zeros(dim, np.float32) for bag in rows]
            values = np.array(pooled, np.float32)
            shape = (len(bags), 1, dim)
        leaf = torch.from_numpy(values.reshape(shape)).requires_grad_(self._train)
        self._gather(name, kind, bags, leaf)
        return leaf

    def _gather(self, name: str, kind: str, bags: list[list[Key]], leaf: Tensor) -> None:
        at = 0
        for example, bag in enumerate(bags):
            row = at if kind == SEQUENCE else example
            self._parts.append((name, kind, bag, leaf, row))
            at += len(bag)

    def _totals(self) -> dict[Key, Vector]:
        totals: dict[Key, Vector] = {}
        for name, kind, bag, leaf, row in self._parts:
            if leaf.grad is None:
                continue
            gradient = leaf.grad.numpy()
            for place, key in enumerate(bag):
                own = gradient[row + place] if kind == SEQUENCE else gradient[row, 0] / len(bag)
                if not np.isfinite(own).all():
                    raise NonFiniteError(f"the gradient of feature {name!r} is NaN or infinite")
                totals[key] = totals.get(key, np.zeros_like(own)) + own
        return totals


class FakeSave:
    """Rows as they were."""

    def __init__(self, writer: Storage, rows: Mapping[Key, tuple[Vector, Vector]]) -> None:
        self._writer = writer
        text = json.dumps([[*key, v.tolist(), a.tolist()] for key, (v, a) in rows.items()])
        self._text = text.encode()

    def write(self) -> dict[str, Any]:
        """Writes the file."""
        with self._writer.create("rows.json") as sink:
            sink.begin(len(self._text))
            sink.write_at(memoryview(self._text), 0)
            sink.finish()
        return {"rows.json": {"bytes": len(self._text), "crc32": {"": zlib.crc32(self._text)}}}

    def wait_copied(self) -> None:
        """No-op."""

    def close(self) -> None:
        """No-op."""


class FakeSparse:
    """Rows in a dictionary, moved by Adagrad: the plain twin of every sparse half.

    Args:
        spec: features, needs and learning rate; pooling is the mean.
        at_once: updates are applied when they are pushed; else by :meth:`deliver`, one at a time.
        initial: of a key and a width, the initial row.

    Attributes:
        events: ("prepare" | "pull" | "push" | "refuse" | "give up" | "apply", number of the batch), in order.
        open: numbers of batches that were pulled and are not yet applied or ended.
    """

    def __init__(
        self, spec: SparseSpec, *, at_once: bool = True, initial: Callable[[Key, int], Vector] = plain_initial
    ) -> None:
        self.spec, self.at_once, self.initial = spec, at_once, initial
        self.rows: dict[Key, tuple[Vector, Vector]] = {}
        self.events: list[tuple[str, int]] = []
        self.open: list[int] = []
        self.last_step = 0
        self.closed = False
        self._num_pulled = 0
        self._under_way: deque[FakePending] = deque()

    def prepare(self, batch: Batch) -> Batch:
        """Notes it, as of the next batch to be pulled."""
        self.events.append(("prepare", self._num_pulled))
        return batch

    def pull(self, batch: Batch, prepared: object = None) -> FakePulled:
        """Reads a batch's rows for training.

        Raises:
            ValueError: another batch was prepared.
        """
        if prepared is not None and prepared is not batch:
            raise ValueError("another batch was prepared than is pulled")
        number, self._num_pulled = self._num_pulled, self._num_pulled + 1
        self.events.append(("pull", number))
        pulled = FakePulled(self, batch, number, train=True)
        self.open.append(number)
        return pulled

    def peek(self, batch: Batch) -> FakePulled:
        """Reads for evaluation."""
        return FakePulled(self, batch, -1, train=False)

    def sync(self) -> None:
        """Delivers everything."""
        while self._under_way:
            self.deliver()

    def deliver(self) -> None:
        """Applies the oldest update that is under way."""
        self._under_way.popleft().arrive()

    def stats(self, *, spans: bool = False) -> SparseStats:
        """Rows, by table."""
        keys = {(table, number) for table, _, number in self.rows}
        names = dict.fromkeys((table.name for table in self.spec.schema.tables), 0)
        return SparseStats({"rows": len(keys)}, names | Counter(table for table, _ in keys))

    def live(self) -> dict[str, LiveNumber]:
        """Reports none."""
        return {}

    def begin_save(self, writer: Storage) -> FakeSave:
        """Takes the rows as they are."""
        return FakeSave(writer, self.rows)

    def knows_changes(self, since: int) -> bool:
        """Knows of none."""
        return False

    def begin_segment(self, writer: Storage, number: int, since: int | None) -> FakeSave:
        """Takes the rows as they are."""
        return FakeSave(writer, self.rows)

    def load(self, reader: PartReader, *, step: int) -> None:
        """Replaces all rows."""
        found = [row for name in reader.parts for row in json.loads(reader.storage.read(name))]
        self.rows = {
            (table, segment, number): (np.array(v, np.float32), np.array(a, np.float32))
            for table, segment, number, v, a in found
        }
        self.last_step = step

    def close(self) -> None:
        """Notes it."""
        self.closed = True

    def reads(self, batch: Batch) -> list[tuple[str, str, list[Key], list[list[Key]]]]:
        """(feature, need, all its keys, those of each example) of everything that the model reads."""
        found = []
        for number, feature in enumerate(self.spec.schema.sparse):
            table, size = self.spec.schema.table_of(feature).name, batch.num_examples
            bounds = batch.offsets[number * size : (number + 1) * size + 1].tolist()
            bags = [batch.ids[a:b].tolist() for a, b in pairwise(bounds)]
            for kind in sorted(self.spec.needs.get(feature.name, ())):
                segment = FIRST_ORDER if kind == FIRST_ORDER else EMBEDDING
                keys = [[(table, segment, each) for each in bag] for bag in bags]
                found.append((feature.name, kind, [key for bag in keys for key in bag], keys))
        return found

    def dim(self, feature: str, kind: str) -> int:
        """Width of what the model reads."""
        by_name = {each.name: each for each in self.spec.schema.sparse}
        return 1 if kind == FIRST_ORDER else self.spec.schema.table_of(by_name[feature]).dim or 0

    def row(self, key: Key, *, train: bool) -> Vector:
        """A copy of a row; ``train`` makes it where it is missing."""
        if key in self.rows:
            return self.rows[key][0].copy()
        by_name = {table.name: table.dim or 0 for table in self.spec.schema.tables}
        values = self.initial(key, 1 if key[1] == FIRST_ORDER else by_name[key[0]])
        if train:
            self.rows[key] = values.copy(), np.zeros_like(values)
        return values

    def send(self, number: int, apply: Callable[[], None]) -> FakePending:
        """An update, or word that there is none, on its way."""

        def arrive() -> None:
            apply()
            self.open.remove(number)
            self.events.append(("apply", number))

        pending = FakePending(self, arrive)
        self._under_way.append(pending)
        if self.at_once:
            self.sync()
        return pending

    def move(self, totals: Mapping[Key, Vector], lr_scale: float) -> None:
        """``row -= lr · g / (sqrt(Σ g²) + eps)``."""
        optimizer: Any = self.spec.optimizer
        for key, gradient in totals.items():
            values, squares = self.rows[key]
            squares = squares + gradient * gradient
            moved = values - optimizer.lr * lr_scale * gradient / (np.sqrt(squares) + optimizer.eps)
            self.rows[key] = moved.astype(np.float32), squares.astype(np.float32)


@dataclass(eq=False)
class FakeComputed:
    """Loss and gradients of a batch; the number of batches before it."""

    value: float
    refusal: NonFiniteError | None
    half: FakeDense
    gradients: dict[str, float]
    num_batches: int

    @cached_property
    def vote(self) -> Vote:
        """The vote on the step."""
        return Vote(torch.tensor(self.refusal is not None), torch.tensor(self.value, dtype=torch.float64))

    def add(self, batch: Batch, embeddings: Embeddings, *, last: bool) -> FakeComputed:
        """Loss and gradients with those of the next micro-batch."""
        return self.half.compute(batch, embeddings, self, last=last)

    def apply(self, vote: Vote) -> Outcome:
        """Moves the parameters, or puts the counter back."""
        error = self.refusal or vote.error_from(vote.reported.tolist()) if vote.refused else None
        if vote.refused:
            self.half.num_batches = self.num_batches
            error = error or NonFiniteError("refused")
        else:
            for name, gradient in self.gradients.items():
                self.half.parameters[name] -= self.half.lr * gradient
        return Outcome(StepFacts(self.value, error))


class FakeDense:
    """``logit = weight · (sum of everything) + bias``, moved by gradient descent.

    Attributes:
        parameters: "weight" and "bias".
        num_batches: computed so far; a buffer, which a refused batch puts back.
        spoiled: a parameter whose gradient is made infinite.
        losses: what every batch is said to have lost, in turn, instead of what it did; for tests of schedules.
    """

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr
        self.parameters = {"weight": 0.5, "bias": 0.1}
        self.num_batches = 0
        self.spoiled: str | None = None
        self.losses: list[float] = []
        self.closed = False

    def compute(
        self, batch: Batch, embeddings: Embeddings, onto: FakeComputed | None = None, *, last: bool = True
    ) -> FakeComputed:
        """Loss and gradients, in closed form."""
        before, self.num_batches = self.num_batches, self.num_batches + 1
        sums, logits = self._logits(batch, embeddings)
        labels = batch.labels[:, 0]
        share = 1.0 if batch.share is None else batch.share.weight
        with np.errstate(invalid="ignore"):
            loss = share * float(np.mean(np.logaddexp(0, logits) - labels * logits))
        loss = self.losses.pop(0) if self.losses else loss
        gradient = share * (1 / (1 + np.exp(-logits)) - labels) / max(1, len(labels))
        for leaf, examples in _leaves(embeddings):
            own = torch.from_numpy(self.parameters["weight"] * gradient[examples]).float()
            own = own.view(-1, *[1] * (leaf.dim() - 1)).expand_as(leaf).contiguous()
            leaf.grad = own if leaf.grad is None else leaf.grad + own
        gradients = {"weight": float(gradient @ sums), "bias": float(gradient.sum())}
        if self.spoiled is not None:
            gradients[self.spoiled] = float("inf")
        reason = self._refusal(loss, embeddings)
        if onto is None:
            return FakeComputed(loss, reason, self, gradients, before)
        onto.gradients = {name: onto.gradients[name] + each for name, each in gradients.items()}
        onto.value, onto.refusal = onto.value + loss, onto.refusal or reason
        return onto

    def predict(self, batch: Batch, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, 1]."""
        return torch.from_numpy(self._logits(batch, embeddings)[1]).float()[:, None]

    def sync(self) -> None:
        """No-op: nothing is ever in flight."""

    def stats(self) -> dict[str, int]:
        """Never behind."""
        return {"staleness_max": 0}

    def processes(self, *, spans: bool = False) -> dict[str, StatsSnapshot]:
        """Empty: there is this process alone."""
        return {}

    def state(self) -> dict[str, Any]:
        """The parameters."""
        return {"model": {**self.parameters, "num_batches": self.num_batches}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self.parameters = {name: value for name, value in state["model"].items() if name in self.parameters}
        self.num_batches = state["model"]["num_batches"]

    def close(self) -> None:
        """Notes it."""
        self.closed = True

    def _logits(self, batch: Batch, embeddings: Embeddings) -> tuple[NDArray[Any], NDArray[Any]]:
        sums = np.nan_to_num(batch.numeric.astype(np.float64)).sum(axis=1)
        for leaf, examples in _leaves(embeddings):
            np.add.at(sums, examples, leaf.detach().double().numpy().reshape(len(leaf), -1).sum(axis=1))
        return sums, self.parameters["weight"] * sums + self.parameters["bias"]

    def _refusal(self, loss: float, embeddings: Embeddings) -> NonFiniteError | None:
        if not np.isfinite(loss):
            return NonFiniteError(
                f"the loss is {loss}, and feature {embeddings.first_nonfinite()!r} was read"
            )
        if self.spoiled is not None:
            return NonFiniteError(f"the gradient of dense parameter {self.spoiled!r} is NaN or infinite")
        return None


def _leaves(embeddings: Embeddings) -> list[tuple[Tensor, NDArray[Any]]]:
    """Every tensor of a batch's embeddings, with the example of each of its rows."""
    blocks = [block.values for block in (*embeddings.blocks, *embeddings.first_order)]
    sequences = [(each.values, each.examples().numpy()) for each in embeddings.sequences.values()]
    return [(values, np.arange(len(values))) for values in blocks] + sequences
