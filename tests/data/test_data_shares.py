"""A batch cut into shares, against a plain cut."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.data import Batch
from girih.data.batch import cut, micro_batches, share_of, slices_of


def batch_of(size, num_features, lengths, *, weights, example_weights):
    rng = np.random.default_rng(size)
    num_ids = sum(lengths)
    return Batch(
        ids=rng.integers(-9, 9, num_ids),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        numeric=rng.normal(size=(size, 2)).astype(np.float32),
        labels=rng.random((size, 2)).astype(np.float32),
        weights=rng.random(num_ids).astype(np.float32) if weights else None,
        example_weights=rng.integers(0, 3, size).astype(np.float32) if example_weights else None,
        kept=pa.table({"row": np.arange(size)}),
    )


@st.composite
def batches(draw):
    size, num_features = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    lengths = draw(st.lists(st.integers(0, 3), min_size=size * num_features, max_size=size * num_features))
    return batch_of(
        size, num_features, lengths, weights=draw(st.booleans()), example_weights=draw(st.booleans())
    )


def bags(batch, b):
    """The bags of one example, with weights."""
    size, found = batch.num_examples, []
    for f in range(batch.num_features):
        part = slice(batch.offsets[f * size + b], batch.offsets[f * size + b + 1])
        found.append(
            (batch.ids[part].tolist(), None if batch.weights is None else batch.weights[part].tolist())
        )
    return found


def examples(batch):
    weights = [None] * batch.num_examples if batch.example_weights is None else batch.example_weights.tolist()
    return [
        (
            bags(batch, b),
            batch.numeric[b].tolist(),
            batch.labels[b].tolist(),
            weights[b],
            batch.kept["row"][b].as_py(),
        )
        for b in range(batch.num_examples)
    ]


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 5))
def test_shares_are_all_of_a_batch_and_nearly_equal(batch, num_trainers):
    if not batch.num_examples:
        batch = batch_of(
            1, batch.num_features, [0] * batch.num_features, weights=False, example_weights=False
        )
    shares = [share_of(batch, rank, num_trainers) for rank in range(num_trainers)]
    assert [e for share in shares for e in examples(share)] == examples(batch)
    sizes = [share.num_examples for share in shares]
    assert max(sizes) - min(sizes) <= 1
    for share in shares:
        assert share.share.num_examples == batch.num_examples
        assert len(share.offsets) == batch.num_features * share.num_examples + 1
        assert share.offsets[0] == 0
        assert share.offsets.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 5))
def test_weighted_means_of_shares_sum_to_the_mean_of_the_batch(torch, batch, num_trainers):
    from girih.models import bce_with_logits

    torch.manual_seed(0)
    logits = torch.randn(batch.num_examples, 2)

    def loss(part, of):
        weights = None if part.example_weights is None else torch.from_numpy(part.example_weights)
        leaf = of.clone().requires_grad_()
        value = bce_with_logits(leaf, torch.from_numpy(part.labels), weights)
        value.backward()
        return value.detach(), leaf.grad

    value, gradient = loss(batch, logits)
    total, gradients, first = 0.0, [], 0
    for rank in range(num_trainers):
        part = share_of(batch, rank, num_trainers)
        mine = logits[first : first + part.num_examples]
        first += part.num_examples
        own, own_gradient = loss(part, mine)
        total += float(own) * part.share.weight
        gradients.append(own_gradient * part.share.weight)
    assert total == pytest.approx(float(value), abs=1e-6)
    torch.testing.assert_close(torch.cat(gradients), gradient, atol=1e-6, rtol=1e-5)


def test_a_cut_is_of_neighbours():
    batch = batch_of(5, 2, [1, 0, 2, 1, 1, 3, 0, 0, 1, 2], weights=True, example_weights=True)
    assert examples(cut(batch, 1, 4)) == examples(batch)[1:4]
    assert examples(cut(batch, 2, 2)) == []


@settings(deadline=None)
@given(batches(), st.integers(1, 12), st.sampled_from([None, (1, 3), (2, 3)]))
def test_micro_batches_are_a_cut_of_a_batch_and_weigh_what_it_does(batch, count, trainer):
    own = batch if trainer is None else share_of(batch, *trainer)
    found = micro_batches(own, count)
    assert [part.num_examples for _, part in found] == [each.stop - each.start for each, _ in found]
    assert [examples for examples, _ in found] == slices_of(own, count)
    assert [b for examples, _ in found for b in range(own.num_examples)[examples]] == list(
        range(own.num_examples)
    )
    if trainer is None:
        assert len(found) == max(1, min(count, own.num_examples))
    else:  # as many on all trainers, however many examples each has
        assert len(found) == count
    for name in ("numeric", "labels", "example_weights"):
        whole = getattr(own, name)
        if whole is not None:
            joined = np.concatenate([getattr(part, name) for _, part in found])
            np.testing.assert_array_equal(joined, whole)
    if count > 1:
        assert {part.share.num_examples for _, part in found} == {batch.num_examples}
        weight = 1.0 if own.share is None else own.share.weight
        nothing = own.num_examples == 0 or (own.example_weights is not None and not own.example_weights.any())
        assert sum(part.share.weight for _, part in found) == pytest.approx(0.0 if nothing else weight)
