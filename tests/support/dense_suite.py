"""Tests of every dense half, to subclass: ``class TestMine(DenseHalfSuite)`` with a ``make``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import girih
from girih.data.batch import Batch, Share, cut
from girih.dense.half import Computed, DenseHalf, DenseSpec
from girih.models import DeepFM
from girih.models.embeddings import Block, Embeddings
from support.cases import DIM
from support.votes import apply, drop

NAMES = ("user", "item", "tags")
NUMERIC = ("x0", "x1")
SLICES = (slice(0, 2), slice(2, 3), slice(3, 6))
Numbers = dict[str, NDArray[Any]]


def dense_schema() -> girih.Schema:
    """Three features in tables, two numeric ones."""
    return girih.Schema(
        [
            *(girih.Categorical(name=name, dim=DIM) for name in NAMES),
            *(girih.Numeric(name=name) for name in NUMERIC),
        ],
        labels="click",
    )


class CountingDeepFM(DeepFM):
    """A model with a buffer that every training batch moves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(dense_schema(), hidden=(8,))
        self.num_batches: Tensor
        self.register_buffer("num_batches", torch.zeros(()))

    def forward(self, numeric: Tensor, embeddings: Embeddings) -> Tensor:
        """Logits, float32[B, 1]."""
        if self.training:
            self.num_batches += 1
        return super().forward(numeric, embeddings)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Moves by 0.1 of the gradient, so that moves add up."""
    return torch.optim.SGD(parameters, lr=0.1)


def dense_spec() -> DenseSpec:
    """Specification of the halves of this suite."""
    return DenseSpec(module=CountingDeepFM(), optimizer=sgd)


@dataclass
class Case:
    """A batch and the rows it reads: float32[B, D] of each feature, and float32[B, 1]."""

    batch: Batch
    vectors: NDArray[np.float32]
    weights: NDArray[np.float32]
    names: tuple[str, ...] = NAMES

    def embeddings(self, examples: slice | None = None) -> Embeddings:
        """New leaves."""
        chosen = examples or slice(None)
        vectors, weights = (
            torch.from_numpy(each[chosen].copy()).requires_grad_() for each in (self.vectors, self.weights)
        )
        return Embeddings((Block(self.names, vectors),), {}, (Block(self.names, weights),))

    def of_features(self, names: Collection[str]) -> Case:
        """The case of a trainer that has some features alone."""
        own = [place for place, name in enumerate(self.names) if name in names]
        numeric = [place for place, name in enumerate(NUMERIC) if name in names]
        size = self.batch.num_examples
        batch = replace(
            self.batch,
            ids=np.zeros(len(own) * size, np.int64),
            offsets=np.arange(len(own) * size + 1, dtype=np.int32),
            numeric=self.batch.numeric[:, numeric],
        )
        kept = tuple(self.names[place] for place in own)
        return Case(batch, self.vectors[:, own], self.weights[:, own], kept)

    def part(self, examples: slice) -> Batch:
        """A micro-batch, with its weight in the whole."""
        size = self.batch.num_examples
        count = examples.stop - examples.start
        share = Share(num_examples=size, weight=count / size)
        return replace(cut(self.batch, examples.start, examples.stop), share=share)


def case(seed: int, size: int = 6) -> Case:
    """Numbers at random."""
    rng = np.random.default_rng(seed)
    batch = Batch(
        ids=np.zeros(len(NAMES) * size, np.int64),
        offsets=np.arange(len(NAMES) * size + 1, dtype=np.int32),
        numeric=rng.normal(size=(size, 2)).astype(np.float32),
        labels=(rng.random((size, 1)) < 0.5).astype(np.float32),
    )
    vectors = rng.normal(size=(size, len(NAMES), DIM)).astype(np.float32)
    return Case(batch, vectors, rng.normal(size=(size, len(NAMES), 1)).astype(np.float32))


class DenseHalfSuite:
    """Tests of a dense half; the optimizer is plain gradient descent."""

    def make(self) -> DenseHalf:
        """A half of ``dense_spec()``; the same parameters in every call."""
        raise NotImplementedError

    def case(self, seed: int, size: int = 6) -> Case:
        """This trainer's part of a batch."""
        return case(seed, size)

    def nan_case(self, feature: str) -> tuple[Case, str]:
        """A batch with a NaN in a feature of its third example, and what a refusal of it says, whatever the case."""
        one = self.case(0)
        one.vectors[2, one.names.index(feature)] = np.nan
        return one, feature

    def spoil(self, half: Any) -> str:
        """Makes the next gradient of a parameter infinite; returns the parameter's name."""
        name, parameter = next((n, p) for n, p in half.module.named_parameters() if n.startswith("deep"))

        def spoiled(gradient: Tensor) -> Tensor:
            handle.remove()
            return gradient * float("inf")

        handle = parameter.register_hook(spoiled)
        return str(name)

    def test_embeddings_collect_gradients_and_apply_moves(self) -> None:
        half, one = self.make(), self.case(0)
        before, losses = self.numbers(half), []
        for _ in range(20):
            embeddings = one.embeddings()
            computed = half.compute(one.batch, embeddings)
            assert not computed.vote.refused
            assert all(np.isfinite(each).all() for each in gradients_of(embeddings))
            apply(computed)
            losses.append(float(computed.vote.loss))
        half.sync()
        assert losses[-1] < losses[0]
        assert any((self.numbers(half)[name] != each).any() for name, each in before.items())
        half.close()

    def test_a_discarded_batch_moves_nothing_and_puts_buffers_back(self) -> None:
        half, one = self.make(), self.case(0)
        apply(half.compute(one.batch, one.embeddings()))
        half.sync()
        before = self.numbers(half)
        drop(half.compute(one.batch, one.embeddings()))
        half.sync()
        assert_equal(self.numbers(half), before)
        half.close()

    def test_two_batches_in_flight_have_gradients_of_their_own(self) -> None:
        both, cases = self.make(), (self.case(0), self.case(1, size=4))
        start = self.numbers(both)
        given = [each.embeddings() for each in cases]
        computed = [both.compute(c.batch, e) for c, e in zip(cases, given, strict=True)]
        for handle in computed:
            apply(handle)
        both.sync()
        moves = []
        for number, each in enumerate(cases):
            alone, embeddings = self.make(), each.embeddings()
            own = alone.compute(each.batch, embeddings)
            apply(own)
            alone.sync()
            assert float(own.vote.loss) == float(computed[number].vote.loss)
            for one, two in zip(gradients_of(embeddings), gradients_of(given[number]), strict=True):
                np.testing.assert_array_equal(one, two)
            moves.append({name: value - start[name] for name, value in self.numbers(alone).items()})
            alone.close()
        for name, value in self.numbers(both).items():
            np.testing.assert_allclose(value - start[name], moves[0][name] + moves[1][name], atol=1e-6)
        both.close()

    def test_micro_batches_have_the_loss_and_the_gradients_of_the_whole(self) -> None:
        half, other, one = self.make(), self.make(), self.case(3)
        embeddings = one.embeddings()
        whole = half.compute(one.batch, embeddings)
        given = [one.embeddings(examples) for examples in SLICES]
        parts = in_parts(other, one, given)
        np.testing.assert_allclose(float(parts.vote.loss), float(whole.vote.loss), rtol=1e-6)
        joined = [np.concatenate(each) for each in zip(*map(gradients_of, given), strict=True)]
        for ours, theirs in zip(joined, gradients_of(embeddings), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * abs(theirs).max())
        for each, computed in ((half, whole), (other, parts)):
            assert not computed.vote.refused
            apply(computed)
            each.sync()
        two = self.numbers(other)
        for name, value in self.numbers(half).items():
            if name != "num_batches":
                np.testing.assert_allclose(two[name], value, rtol=1e-6, atol=1e-7)
        for each in (half, other):
            each.close()

    def test_a_loss_that_is_nan_is_refused_and_names_the_feature(self) -> None:
        half, (one, named) = self.make(), self.nan_case("item")
        self._assert_refused(half, lambda: half.compute(one.batch, one.embeddings()), named)

    def test_one_refused_micro_batch_refuses_all(self) -> None:
        half, (one, named) = self.make(), self.nan_case("item")

        def compute() -> Computed:
            return in_parts(half, one, [one.embeddings(examples) for examples in SLICES])

        self._assert_refused(half, compute, named)

    def test_an_infinite_gradient_is_refused_and_names_the_parameter(self) -> None:
        half, one = self.make(), self.case(0)
        name = self.spoil(half)
        self._assert_refused(half, lambda: half.compute(one.batch, one.embeddings()), name)

    def test_predictions_move_nothing(self) -> None:
        half, one = self.make(), self.case(0)
        before = self.numbers(half)
        logits = half.predict(one.batch, one.embeddings())
        assert logits.shape == (6, 1)
        assert not logits.requires_grad
        np.testing.assert_array_equal(half.predict(one.batch, one.embeddings()), logits)
        assert_equal(self.numbers(half), before)
        half.close()

    def test_what_was_saved_is_restored(self) -> None:
        half, other, one = self.make(), self.make(), self.case(0)
        apply(half.compute(one.batch, one.embeddings()))
        half.sync()
        other.restore(half.state())
        other.sync()
        for each in (half, other):
            apply(each.compute(one.batch, one.embeddings()))
            each.sync()
        assert_equal(self.numbers(other), self.numbers(half))
        for each in (half, other):
            each.close()

    def test_staleness_is_told(self) -> None:
        half = self.make()
        assert half.stats()["staleness_max"] == 0
        half.close()

    def numbers(self, half: DenseHalf) -> Numbers:
        """Copies of parameters and buffers."""
        model = half.state()["model"].items()
        return {n: np.array(v.numpy() if isinstance(v, Tensor) else v) for n, v in model}

    def _assert_refused(self, half: DenseHalf, compute: Callable[[], Any], named: str) -> None:
        before = self.numbers(half)
        computed = compute()
        assert bool(computed.vote.refused)
        assert named.lower() in str(apply(computed).facts().refused).lower()
        half.sync()
        assert_equal(self.numbers(half), before)
        half.close()


def in_parts(half: DenseHalf, case: Case, given: Sequence[Embeddings]) -> Computed:
    """What a half computes of a case in micro-batches.

    Args:
        given: the embeddings of each micro-batch.
    """
    computed = half.compute(case.part(SLICES[0]), given[0], last=False)
    for examples, embeddings in zip(SLICES[1:], given[1:], strict=True):
        computed = computed.add(case.part(examples), embeddings, last=examples is SLICES[-1])
    return computed


def gradients_of(embeddings: Embeddings) -> list[NDArray[Any]]:
    """Copies of what embeddings collected; fails where one collected nothing."""
    found = []
    for block in (*embeddings.blocks, *embeddings.first_order):
        assert block.values.grad is not None
        found.append(block.values.grad.numpy().copy())
    return found


def assert_equal(one: Numbers, two: Numbers) -> None:
    """Fails where any number differs."""
    for name, value in two.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
