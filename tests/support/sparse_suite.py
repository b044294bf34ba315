"""Tests of every sparse half, to subclass: ``class TestMine(SparseHalfSuite)`` with a ``make``."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from girih.checkpoint.parts import PartReader
from girih.checkpoint.storage import Storage
from girih.data.batch import Batch
from girih.models.embeddings import Embeddings
from girih.models.needs import FIRST_ORDER
from girih.sparse.half import Pulled, SparseHalf
from support import cases
from support.cases import coefficients, give, numbers_of
from support.fakes import FakeSparse, Key, Vector
from support.votes import push, refuse

SLICES = (slice(0, 2), slice(2, 3), slice(3, 5))


class SparseHalfSuite:
    """Tests of a sparse half against rows in a dictionary.

    Attributes:
        contributors: trainers that do the same at the same time, whose gradients are summed.
    """

    contributors = 1

    def make(self) -> SparseHalf:
        """A half of ``cases.spec()`` without a row."""
        raise NotImplementedError

    def dispatched(self, half: SparseHalf, batch: Batch) -> Batch:
        """The batch as this half pulls it; the same, where ids come with it."""
        return batch

    def saved(self, half: SparseHalf, storage: Storage) -> PartReader:
        """Saves; returns the parts of all processes."""
        save = half.begin_save(storage)
        parts = save.write()
        save.close()
        return PartReader(storage, parts)

    def test_pulled_embeddings_are_leaves_that_collect_gradients(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        embeddings = self._pull(half, batch).wait()
        give(embeddings, coefficients(batch, 0), batch)
        for block in (*embeddings.blocks, *embeddings.first_order):
            assert block.values.is_leaf
            assert block.values.grad is not None
        assert embeddings.sequences["history"].values.grad is not None
        half.close()

    def test_a_push_moves_rows_as_the_plain_twin_says(self) -> None:
        half, batches = self.make(), cases.batches()
        twin = self._twin(half)
        for step in range(1, 5):
            self._step(half, batches[step % 2], step, lr_scale=1 / step)
            self._twin_step(twin, batches[step % 2], step, lr_scale=1 / step)
            self._assert_alike(half, twin)
        half.close()

    def test_a_discarded_batch_moves_nothing(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        self._step(half, batch, 1)
        before = numbers_of(half.peek(cases.probe()).wait())
        for end in (refuse, lambda pulled: pulled.discard()):
            pulled = self._pull(half, batch)
            give(pulled.wait(), coefficients(batch, 0), batch)
            end(pulled).wait()
            half.sync()
            _assert_equal(numbers_of(half.peek(cases.probe()).wait()), before)
        half.close()

    def test_a_batch_goes_with_the_last_reference_to_it(self) -> None:
        """Its memory must not wait for the collector of cycles, which comes by when it will."""
        half, (batch, _) = self.make(), cases.batches()
        self._step(half, batch, 1)
        gc.collect()
        gc.disable()
        try:
            pulled = self._pull(half, batch)
            give(pulled.wait(), coefficients(batch, 0), batch)
            push(pulled, 2, 1.0).wait()
            half.sync()
            gone = weakref.ref(pulled)
            del pulled
            deadline = time.monotonic() + 5.0
            while gone() is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # a thread that served the batch may still return from its call
            assert gone() is None
        finally:
            gc.enable()
        half.close()

    def test_a_peek_makes_no_rows(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        found = half.peek(batch).wait()
        assert sum(half.stats().rows.values()) == 0
        assert not any(block.values.requires_grad for block in found.blocks)
        _assert_equal(numbers_of(self._pull(half, batch).wait()), numbers_of(found))
        half.close()

    def test_rows_and_counters_are_told(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        self._step(half, batch, 1)
        # ids occur so often that flags of other keys would give other sums
        half.peek(cases.batch_of([1, 1, 1, 11, 10], [7, 9, 9, 9, 7], [[7] * 4, [10, 10], [], [], []])).wait()
        stats = half.stats()
        assert dict(stats.rows) == {"user": 4, "item": 6}
        assert stats.store["rows"] == 10
        # evaluated.history, .item, .user, ids.…, unseen.…
        counts = self.contributors * np.array([6, 5, 5, 8, 5, 5, 2, 3, 2])
        features = [count for _, count in sorted(stats.features.items())]
        assert isinstance(half, FakeSparse) or features == counts.tolist()
        half.close()

    def test_batches_in_flight_are_applied_in_the_order_of_their_pushes(self) -> None:
        batches = cases.batches()
        for order in ((0, 1), (1, 0)):
            half = self.make()
            twin = self._twin(half)
            pulled: list[Pulled] = [self._pull(half, batch) for batch in batches]
            plain = [twin.pull(batch) for batch in batches]
            for number, batch in enumerate(batches):
                give(pulled[number].wait(), coefficients(batch, number), batch)
                give(plain[number].wait(), self._all(batch, number), batch)
            for step, number in enumerate(order, 1):
                push(pulled[number], step, 1.0).wait()
                push(plain[number], step)
            half.sync()
            self._assert_alike(half, twin)
            half.close()

    def test_micro_batches_are_pushed_together_as_the_whole_batch(self) -> None:
        half, other, (batch, _) = self.make(), self.make(), cases.batches()
        wanted = coefficients(batch, 3)
        whole = self._pull(half, batch)
        give(whole.wait(), wanted, batch)
        push(whole, 1, 1.0).wait()
        parts = self._pull(other, batch)
        for examples in SLICES:
            embeddings = parts.wait(examples)
            assert len(embeddings["user"]) == examples.stop - examples.start
            give(embeddings, wanted, batch, examples)
        push(parts, 1, 1.0).wait()
        for each in (half, other):
            each.sync()
        one, two = (numbers_of(each.peek(cases.probe()).wait()) for each in (half, other))
        for name, values in one.items():
            np.testing.assert_allclose(two[name], values, rtol=1e-6, atol=1e-7)
        for each in (half, other):
            each.close()

    def test_batches_that_were_prepared_are_pulled_as_those_that_were_not(self) -> None:
        half, other, batches = self.make(), self.make(), cases.batches()
        given = [self.dispatched(half, batches[step % 2]) for step in range(5)]
        prepared = None
        for step, batch in enumerate(given[:-1], 1):
            pulled = half.pull(batch, prepared)
            prepared = half.prepare(given[step])  # the last of which is let go of
            half.peek(cases.probe()).wait()
            give(pulled.wait(), coefficients(batches[(step - 1) % 2], step), batches[(step - 1) % 2])
            push(pulled, step, 1.0).wait()
            self._step(other, batches[(step - 1) % 2], step)
            _assert_equal(*(numbers_of(each.peek(cases.probe()).wait()) for each in (half, other)))
        assert half.stats().rows == other.stats().rows
        for each in (half, other):
            each.close()

    def test_the_parts_of_a_batch_are_those_of_the_whole(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        pulled = self._pull(half, batch)
        whole = numbers_of(pulled.wait())
        parts = [numbers_of(pulled.wait(examples)) for examples in SLICES]
        _assert_equal({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)
        half.close()

    def test_a_gradient_that_is_not_finite_is_refused_and_moves_nothing(self) -> None:
        half, (batch, _) = self.make(), cases.batches()
        self._step(half, batch, 1)
        before = numbers_of(half.peek(cases.probe()).wait())
        for bad in (np.nan, np.inf, -np.inf):
            pulled = self._pull(half, batch)
            wanted = coefficients(batch, 0)
            wanted["user"][1, 2] = bad
            give(pulled.wait(), wanted, batch)
            error = cases.refusal(lambda pulled=pulled: push(pulled, 2, 1.0).wait())  # type: ignore[misc]
            assert "user" in str(error)
            _assert_equal(numbers_of(half.peek(cases.probe()).wait()), before)
        half.close()

    def test_what_was_saved_is_loaded(self, tmp_path: Path) -> None:
        half, batches = self.make(), cases.batches()
        for step, batch in enumerate(batches, 1):
            self._step(half, batch, step)
        reader = self.saved(half, Storage.at(tmp_path))
        assert reader.parts
        other = self.make()
        self._step(other, cases.batch_of([11], [11]), 1)  # goes with the load
        other.load(reader, step=2)
        assert half.stats().rows == other.stats().rows
        for each in (half, other):  # with the optimizer's state
            self._step(each, batches[0], 3)
        one, two = (numbers_of(each.peek(cases.probe()).wait()) for each in (half, other))
        _assert_equal(one, two)
        for each in (half, other):
            each.close()

    def _pull(self, half: SparseHalf, batch: Batch) -> Pulled:
        return half.pull(self.dispatched(half, batch))

    def _step(self, half: SparseHalf, batch: Batch, step: int, *, lr_scale: float = 1.0) -> None:
        pulled = self._pull(half, batch)
        give(pulled.wait(), coefficients(batch, step), batch)
        push(pulled, step, lr_scale).wait()
        half.sync()

    def _twin_step(self, twin: FakeSparse, batch: Batch, step: int, *, lr_scale: float) -> None:
        pulled = twin.pull(batch)
        give(pulled.wait(), self._all(batch, step), batch)
        push(pulled, step, lr_scale)

    def _all(self, batch: Batch, seed: int) -> dict[str, Vector]:
        """The gradients of all trainers together."""
        return {name: self.contributors * each for name, each in coefficients(batch, seed).items()}

    def _twin(self, half: SparseHalf) -> FakeSparse:
        """A plain half with the same initial rows."""
        found: Embeddings = half.peek(cases.probe()).wait()
        by_key = {
            ("user", "embedding"): found["user"],
            ("item", "embedding"): found["item"],
            ("user", FIRST_ORDER): found.first_order[0].values[:, 0],
        }

        def initial(key: Key, dim: int) -> Vector:
            values: Vector = by_key[key[:2]][key[2]].detach().cpu().numpy().copy()
            return values

        return FakeSparse(cases.spec(), initial=initial)

    def _assert_alike(self, half: SparseHalf, twin: FakeSparse) -> None:
        ours, theirs = (numbers_of(each.peek(cases.probe()).wait()) for each in (half, twin))
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def _assert_equal(one: Mapping[str, Vector], two: Mapping[str, Vector]) -> None:
    for name, values in two.items():
        np.testing.assert_array_equal(one[name], values, err_msg=name)
