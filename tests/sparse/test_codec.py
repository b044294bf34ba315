"""Ids and vectors on the wire: round trips, and arrays of a peer that means no good."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.data import Batch
from girih.errors import WireError
from girih.sparse.protocol import BatchCodec


def batch_of(lengths, num_examples, *, weighted, seed):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_ids = int(offsets[-1])
    ids = rng.choice(np.array([0, -1, 5, 2**63 - 1, -(2**63)]), num_ids)
    nothing = np.empty((num_examples, 0), np.float32)
    weights = rng.normal(size=num_ids).astype(np.float32) if weighted else None
    return Batch(ids=ids, offsets=offsets, numeric=nothing, labels=nothing, weights=weights)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 5), st.integers(1, 3), st.data(), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_ids_survive(num_examples, num_features, data, compress, weighted, seed):
    size = num_examples * num_features
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    pooled = tuple(data.draw(st.lists(st.booleans(), min_size=num_features, max_size=num_features)))
    batch = batch_of(lengths, num_examples, weighted=weighted, seed=seed)
    packets = BatchCodec(pooled, compress_ids=compress)
    again = packets.unpack_ids(packets.pack_ids(batch), num_examples)
    np.testing.assert_array_equal(again.offsets, batch.offsets)
    assert (again.weights is None) == (batch.weights is None) or not num_examples
    for bag in range(size):
        part, f = slice(batch.offsets[bag], batch.offsets[bag + 1]), bag // max(1, num_examples)
        weights = (np.zeros(len(batch.ids)) if b.weights is None else b.weights for b in (batch, again))
        mine, theirs = (
            list(zip(b.ids[part].tolist(), w[part].tolist(), strict=True))
            for b, w in zip((batch, again), weights, strict=True)
        )
        assert (sorted(mine) == sorted(theirs)) if pooled[f] and compress else (mine == theirs)


INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
IDS, BOUNDS = np.arange(3), np.array([0, 1, 2, 2, 3], np.int32)


@pytest.mark.parametrize(
    "arrays",
    [
        (),
        (IDS,),
        (IDS, BOUNDS[:-1]),
        (IDS, BOUNDS + 1),
        (IDS, np.array([0, 2, 1, 2, 3], np.int32)),
        (IDS, np.array([0, 1, 2, 2, 4], np.int32)),
        (IDS, np.array([0, INT_MAX, INT_MIN, -1, 3], np.int32)),
        (IDS, BOUNDS.astype(np.int64)),
        (IDS.astype(np.float64), BOUNDS),
        (IDS.astype(np.int32), BOUNDS),
        (IDS.reshape(3, 1), BOUNDS),
        (IDS, BOUNDS.reshape(5, 1)),
        (np.array(3), BOUNDS),
        (IDS, np.array(0, np.int32)),
        (IDS, BOUNDS, np.ones(2, np.float32)),
        (IDS, BOUNDS, np.ones(3)),
        (IDS, BOUNDS, np.ones((3, 2), np.float32)),
    ],
)
def test_hostile_ids_are_refused(arrays):
    with pytest.raises(WireError):
        BatchCodec((True, False)).unpack_ids(arrays, 2)
    with pytest.raises(WireError):
        BatchCodec((True, False), compress_ids=True).unpack_ids(arrays, 2)


@pytest.mark.parametrize("num_examples", [-1, 0, 1, 2**40, -(2**63)])
def test_hostile_counts_are_refused(num_examples):
    with pytest.raises(WireError):
        BatchCodec((True, False)).unpack_ids((IDS, BOUNDS), num_examples)


@pytest.mark.parametrize("half", [False, True])
def test_vectors_survive(half):
    rng = np.random.default_rng(0)
    packets = BatchCodec((True,), float16_embeddings=half, float16_gradients=half)
    rows = [rng.normal(size=shape).astype(np.float32) for shape in ((5, 2, 4), (3, 4), (0, 4), (4, 0, 4))]
    for row, again in zip(rows, packets.unpack_embeddings(packets.pack_embeddings(rows)), strict=True):
        assert row.shape == again.shape
        np.testing.assert_allclose(again, row, rtol=0, atol=2**-11 * 4 if half else 0)
    given = [rows[0], None, rows[1]]
    found = packets.unpack_gradients(packets.pack_gradients(given))
    assert found[1] is None
    np.testing.assert_allclose(found[0], rows[0].reshape(-1, 4), rtol=0, atol=2**-11 * 4 if half else 0)
