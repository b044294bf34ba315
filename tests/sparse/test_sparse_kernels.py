"""Dedup, pooling and scattering against their plain twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import pool as pool_kernels
from reference import dedup, pool

SIZE, DIM, COLUMNS = 5, 3, 5


@st.composite
def batches(draw):
    """ids, offsets, features of some tables, weights."""
    num_features = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 4), min_size=num_features * SIZE, max_size=num_features * SIZE))
    num_ids = sum(lengths)
    small = st.sampled_from([0, -1, 1, 7, 2**63 - 1, -(2**63)])
    ids = np.array(draw(st.lists(small, min_size=num_ids, max_size=num_ids)), np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tables = np.array(
        sorted(draw(st.lists(st.integers(0, 2), min_size=num_features, max_size=num_features))), np.int32
    )
    features = np.array(draw(st.permutations(range(num_features))), np.int64)
    weighted = draw(st.booleans())
    weights = np.linspace(-1, 2, num_ids, dtype=np.float32) if weighted else np.empty(0, np.float32)
    return ids, offsets, features, tables, weights


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_there_and_back(batch, random):
    ids, offsets, features, tables, weights = batch
    scratch, num_ids = np.zeros((256, 2), np.int64), len(ids)
    for round_ in (1, 10, 20):  # the scratch table is used again without being cleared
        inverse = np.full(num_ids, -1, np.int32)
        keys, key_tables, counts = (
            np.zeros(num_ids, np.int64),
            np.zeros(num_ids, np.int32),
            np.zeros(num_ids, np.int32),
        )
        found = dedup_kernels.dedup(
            ids, offsets, SIZE, features, tables, scratch, round_, inverse, keys, key_tables, counts
        )
        expected, expected_counts, expected_inverse = dedup(ids, offsets, SIZE, features, tables)
        assert list(zip(key_tables[:found].tolist(), keys[:found].tolist(), strict=True)) == expected
        assert counts[:found].tolist() == expected_counts
        assert dict(enumerate(inverse.tolist())) == expected_inverse

    rng = np.random.default_rng(random.randrange(1 << 30))
    rows = rng.normal(size=(found, COLUMNS)).astype(np.float32)
    modes = rng.integers(0, 3, len(features)).astype(np.int8)
    out = np.full((SIZE, len(features), DIM), np.nan, np.float32)
    for begin, end in ((0, 2), (2, SIZE)):
        pool_kernels.pool(rows, 1, inverse, offsets, weights, SIZE, features, modes, begin, end, out)
    np.testing.assert_allclose(
        out, pool(rows, 1, inverse, offsets, weights, SIZE, features, modes, DIM), atol=1e-5
    )

    # The way back is the transpose: <pool(rows), g> = <rows, scatter(g)>.
    gradients = rng.normal(size=out.shape).astype(np.float32)
    back = np.zeros((found, COLUMNS), np.float32)
    middle = found // 2
    for first, last in ((0, middle), (middle, found)):
        pool_kernels.scatter(
            gradients, 1, inverse, offsets, weights, SIZE, features, modes, first, last, back
        )
    assert (back[:, 0] == 0).all()
    assert (back[:, 1 + DIM :] == 0).all()
    assert np.vdot(out.astype(float), gradients) == pytest.approx(np.vdot(rows.astype(float), back), abs=1e-3)

    start, end = offsets[0], offsets[SIZE]
    whole = np.empty((end - start, DIM), np.float32)
    pool_kernels.spread(rows, 2, inverse, start, whole)
    np.testing.assert_array_equal(whole, rows[inverse[start:end], 2 : 2 + DIM])
    back = np.zeros((found, COLUMNS), np.float32)
    pool_kernels.gather_spread(whole, 2, inverse, start, 0, found, back)
    expected = np.zeros((found, COLUMNS))
    np.add.at(expected[:, 2 : 2 + DIM], inverse[start:end], whole.astype(float))
    np.testing.assert_allclose(back, expected, atol=1e-4)


def test_order_by_shard_is_a_stable_partition():
    shards = np.array([2, 0, 1, 0, 2, 2], np.int32)
    order, bounds = np.empty(6, np.int64), np.empty(4, np.int64)
    dedup_kernels.order_by_shard(shards, 3, order, bounds)
    assert order.tolist() == [1, 3, 2, 0, 4, 5]
    assert bounds.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_nonfinite(bad):
    values = np.ones((4, 3), np.float32) * np.float32(3e38)
    assert pool_kernels.first_nonfinite(values) == -1
    values[2, 1] = bad
    assert pool_kernels.first_nonfinite(values) == 2
