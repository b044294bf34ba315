"""Dedup, pooling and scattering against their plain twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.kernels.cpu import update, vector
from girih.kernels.cpu.arrays import sealed
from girih.sparse.groups.shards import addresses_in
from reference import dedup, pool
from support.twins import shard_of_key

SIZE, COLUMNS = 5, 5
NO_AMOUNTS = sealed(np.empty(0, np.int32))


@st.composite
def batches(draw):
    """ids, offsets, features of some tables, weights."""
    num_features = draw(st.integers(1, 4))
    some = st.lists(st.integers(0, 4), min_size=SIZE, max_size=SIZE)
    lengths = [n for _ in range(num_features) for n in draw(st.one_of(st.just([1] * SIZE), some))]
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
    return sealed(ids), sealed(offsets), features, tables, sealed(weights)


def deduped(batch, shard, num_shards, scratch, base, inverse, first_key=0):
    """One shard's unique keys, and what leads back to them."""
    ids, offsets, features, tables, _ = batch
    room = len(ids)
    keys, key_tables, counts = np.zeros(room, np.int64), np.zeros(room, np.int32), np.zeros(room, np.int32)
    own, key_ends = np.zeros(room, np.int32), np.zeros(len(features), np.int64)
    ends = np.zeros(dedup_kernels.NUM_PARTS, np.int64)
    found = dedup_kernels.dedup(
        ids, offsets, SIZE, features, tables, shard, num_shards, scratch, base, np.zeros(room, np.uint64),
        first_key, own, ends, NO_AMOUNTS, inverse, keys, key_tables, counts, key_ends,
    )  # fmt: skip
    pairs = list(zip(key_tables[:found].tolist(), keys[:found].tolist(), strict=True))
    return pairs, counts[:found], key_ends


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3))
def test_dedup_finds_the_keys_of_each_shard(batch, num_shards):
    ids, offsets, features, tables, _ = batch
    expected, expected_counts, expected_inverse = dedup(ids, offsets, SIZE, features, tables)
    scratch, base = np.zeros(256, np.int32), 1
    for _ in range(3):  # the scratch table is used again without being cleared
        inverse = np.full(len(ids), -1, np.int32)
        all_keys = [()] * (num_shards * max(1, len(ids)))
        for shard in range(num_shards):
            first = shard * len(ids)
            pairs, counts, key_ends = deduped(batch, shard, num_shards, scratch, base, inverse, first)
            base += len(pairs)
            mine = [key for key in expected if shard_of_key(key[1], key[0], num_shards) == shard]
            assert pairs == mine
            assert counts.tolist() == [expected_counts[expected.index(key)] for key in mine]
            all_keys[first : first + len(pairs)] = pairs
            for feature, end in enumerate(key_ends.tolist()):
                assert {table for table, _ in pairs[:end]} <= set(tables[: feature + 1].tolist())
                assert tables[feature] not in {table for table, _ in pairs[end:]}
        assert [all_keys[key] for key in inverse] == [expected[expected_inverse[i]] for i in range(len(ids))]


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("num_ids", [dedup_kernels.MOST_TOGETHER + 1, 60_000])
def test_a_table_with_many_ids_is_parted_by_hash(num_ids, num_shards):
    rng = np.random.default_rng(num_ids)
    sizes = [100, num_ids // 3, num_ids - num_ids // 3, 100]  # two features share the large table
    ids = rng.integers(-num_ids, num_ids, sum(sizes))
    ids[200:9000] = 7
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    features, tables = np.arange(4), np.array([0, 1, 1, 2], np.int32)
    room, inverse = len(ids), np.full(len(ids), -1, np.int32)
    scratch, base = np.zeros(1 << 18, np.int32), 1
    table_of = np.repeat(tables, sizes)
    for shard in range(num_shards):
        keys, key_tables, counts = (np.zeros(room, kind) for kind in (np.int64, np.int32, np.int32))
        key_ends, first = np.zeros(4, np.int64), shard * room
        found = dedup_kernels.dedup(
            sealed(ids), sealed(offsets), 1, features, tables, shard, num_shards, scratch, base,
            np.zeros(2 * num_ids, np.uint64), first, np.zeros(2 * num_ids, np.int32),
            np.zeros(dedup_kernels.NUM_PARTS, np.int64), NO_AMOUNTS, inverse, keys, key_tables, counts, key_ends,
        )  # fmt: skip
        base += found
        mine = (inverse >= first) & (inverse < first + found)
        np.testing.assert_array_equal(keys[inverse[mine] - first], ids[mine])
        np.testing.assert_array_equal(key_tables[inverse[mine] - first], table_of[mine])
        np.testing.assert_array_equal(np.bincount(inverse[mine] - first, minlength=found), counts[:found])
        assert len(set(zip(keys[:found].tolist(), key_tables[:found].tolist(), strict=True))) == found
        assert key_ends[1] == key_ends[2] == np.searchsorted(key_tables[:found], 2)
        assert key_ends[3] == found
    assert (inverse >= 0).all()


def singles(batch):
    """What ``find_singles`` gives for each feature, none where there are weights."""
    _, offsets, features, _, weights = batch
    firsts = np.full(len(features), -1, np.int64)
    if not len(weights):
        pool_kernels.find_singles(offsets, SIZE, features, firsts)
    return firsts[features]


def stitch(rows, first_column, inverse, batch, modes, begin, end, out, tail=None):
    """One output of all features, and one of the columns that follow, by the kernel."""
    _, offsets, features, _, weights = batch
    num_tail = 0 if tail is None else tail.shape[1]
    passes = np.array([[0, len(features), first_column, out.shape[1], num_tail, 0]], np.int64)
    targets = np.array([[out.ctypes.data, tail.ctypes.data if num_tail else 0]], np.int64)
    pool_kernels.stitch(
        addresses_in(rows), inverse, offsets, weights, SIZE, passes, features, modes, targets,
        np.empty(len(features), np.int64), begin, end,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(batches())
def test_features_with_one_id_a_bag(batch):
    _, offsets, features, _, weights = batch
    for feature, first in zip(features.tolist(), singles(batch).tolist(), strict=True):
        bounds = offsets[feature * SIZE : (feature + 1) * SIZE + 1]
        assert first == (bounds[0] if (np.diff(bounds) == 1).all() and not len(weights) else -1)


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_bags_of_one_id_give_the_same_bits_either_way(batch, random):
    ids, offsets, features, _, weights = batch
    inverse = np.full(len(ids), -1, np.int32)
    found = len(deduped(batch, 0, 1, np.zeros(256, np.int32), 1, inverse)[0])
    rng = np.random.default_rng(random.randrange(1 << 30))
    num_features, dim = len(features), 19
    rows = rng.normal(size=(found, dim)).astype(np.float32)
    gradient = rng.normal(size=(SIZE * num_features, dim)).astype(np.float32)
    modes, nothing = rng.integers(0, 3, num_features).astype(np.int8), np.empty((0, 0), np.float32)
    both = []
    for firsts in (singles(batch), np.full(num_features, -1, np.int64)):
        out, back = np.empty_like(gradient), np.zeros((found, dim), np.float32)
        examples = (
            [(0, SIZE)] if not both else [(b, b + 1) for b in range(SIZE)]
        )  # each with bags of one id of its own
        for begin, end in examples:
            stitch(rows, 0, inverse, batch, modes, begin, end, out)
        gradient_kernels.scatter(
            sealed(gradient), sealed(nothing), 0, inverse, offsets, weights, SIZE, features, firsts,
            np.arange(num_features), modes, num_features, 0, found, back,
        )  # fmt: skip
        both.append((out.view(np.uint32), back.view(np.uint32)))
    np.testing.assert_array_equal(both[0][0], both[1][0])
    np.testing.assert_array_equal(both[0][1], both[1][1])


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_there_and_back(batch, random):
    ids, offsets, features, _, weights = batch
    inverse = np.full(len(ids), -1, np.int32)
    pairs, _, _ = deduped(batch, 0, 1, np.zeros(256, np.int32), 1, inverse)
    found = len(pairs)

    rng = np.random.default_rng(random.randrange(1 << 30))
    columns = COLUMNS + 16 * rng.integers(0, 3)  # whole lanes, and what is left of them
    num_tail = rng.integers(0, 3)  # columns behind the output's that another output takes in the same pass
    dim = columns - 2 - num_tail
    rows = rng.normal(size=(found, columns)).astype(np.float32)
    modes = rng.integers(0, 3, len(features)).astype(np.int8)
    both = np.full((SIZE, len(features), dim + num_tail), np.nan, np.float32)
    out, tail = np.ascontiguousarray(both[..., :dim]), np.ascontiguousarray(both[..., dim:])
    flat = out.reshape(-1, dim), tail.reshape(-1, num_tail) if num_tail else np.empty((0, 0), np.float32)
    firsts = singles(batch)
    for begin, end in ((0, 2), (2, SIZE)):
        stitch(rows, 1, inverse, batch, modes, begin, end, *flat)
    both = np.concatenate([out, tail], axis=2)
    expected = pool(rows, 1, inverse, offsets, weights, SIZE, features, modes, dim + num_tail)
    np.testing.assert_allclose(both, expected, atol=1e-5)

    # The way back is the transpose: <pool(rows), g> = <rows, sum by key of g>.
    back = np.zeros((found, columns), np.float32)
    out[:], tail[:] = rng.normal(size=out.shape), rng.normal(size=tail.shape)
    places, middle = np.arange(len(features)), len(features) // 2
    for part in (slice(0, middle), slice(middle, None)):
        for first, last in ((0, found // 2), (found // 2, found)):
            gradient_kernels.scatter(
                *map(sealed, flat), 1, inverse, offsets, weights, SIZE, features[part], firsts[part], places[part], modes[part],
                len(features), first, last, back,
            )  # fmt: skip
    assert (back[:, [0, -1]] == 0).all()
    gradients = np.concatenate([out, tail], axis=2)
    assert np.vdot(both.astype(float), gradients) == pytest.approx(
        np.vdot(rows.astype(float), back), abs=1e-3
    )

    feature = int(features[0])
    start, end = int(offsets[feature * SIZE]), int(offsets[(feature + 1) * SIZE])
    whole = np.empty((end - start, dim), np.float32)
    pool_kernels.spread(addresses_in(rows), 2, inverse, start, whole)
    np.testing.assert_array_equal(whole, rows[inverse[start:end], 2 : 2 + dim])
    stitched, pass_ = np.full_like(whole, np.nan), np.array([[0, 1, 2, dim, 0, 1]], np.int64)
    for begin, stop in ((0, 2), (2, SIZE)):
        pool_kernels.stitch(
            addresses_in(rows), inverse, offsets, weights, SIZE, pass_, features, modes,
            np.array([[stitched.ctypes.data, 0]], np.int64), np.empty(1, np.int64), begin, stop,
        )  # fmt: skip
    np.testing.assert_array_equal(stitched, whole)
    total = rng.normal(size=(found, columns)).astype(np.float32)
    expected = total.astype(float)
    np.add.at(expected[:, 2 : 2 + dim], inverse[start:end], whole.astype(float))
    for first, last in ((0, found // 2), (found // 2, found)):
        gradient_kernels.scatter_whole(sealed(whole), 2, inverse, start, first, last, total)
    np.testing.assert_allclose(total, expected, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_sums_of_terms_are_what_scattering_gives(batch, num_shards, random):
    ids, offsets, features, _, weights = batch
    rng = np.random.default_rng(random.randrange(1 << 30))
    modes, firsts = rng.integers(0, 3, len(features)).astype(np.int8), singles(batch)
    gradient = rng.normal(size=(SIZE * len(features), 19)).astype(np.float32)
    nothing, scratch, base = np.empty((0, 0), np.float32), np.zeros(256, np.int32), 1
    for shard in range(num_shards):
        inverse = np.full(len(ids), -1, np.int32)
        pairs, counts, _ = deduped(batch, shard, num_shards, scratch, base, inverse, 100)
        base += len(pairs)
        back = np.zeros((100 + len(pairs), 19), np.float32)
        gradient_kernels.scatter(
            sealed(gradient), sealed(nothing), 0, inverse, offsets, weights, SIZE, features, firsts,
            np.arange(len(features)), modes, len(features), 100, 100 + len(pairs), back,
        )  # fmt: skip
        starts, order = np.zeros(len(pairs) + 1, np.int32), np.zeros(counts.sum(), np.int32)
        factors = np.zeros(len(order), np.float32)
        gradient_kernels.order_terms(
            inverse, offsets, weights, SIZE, features, firsts, modes, 100, counts, starts, order, factors
        )
        assert starts[-1] == len(order)
        sums = np.zeros((2, 19), np.float32)
        for key in range(len(pairs)):
            update.sum_terms(sums, 0, gradient, order, factors, starts[key], starts[key + 1])
            np.testing.assert_array_equal(
                sums[update.GRADIENT].view(np.uint32), back[100 + key].view(np.uint32)
            )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_largest_number_of_a_gradient(bad):
    gradient, tail = np.ones((5, 20), np.float32), np.full((5, 1), -3e38, np.float32)
    nothing = sealed(np.empty((0, 0), np.float32))
    assert of_bits(gradient_kernels.largest(sealed(gradient), nothing)) == 1
    assert of_bits(gradient_kernels.largest(sealed(gradient), sealed(tail))) == np.float32(3e38)
    gradient[3, 17] = bad
    assert not of_bits(gradient_kernels.largest(sealed(gradient), sealed(tail))) < 1e38


def of_bits(bits):
    return np.uint32(bits).view(np.float32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_key_that_is_not_finite(bad):
    totals = np.ones((5, 20), np.float32) * np.float32(3e38)
    assert gradient_kernels.first_nonfinite(0, 5, sealed(totals)) == -1
    totals[2, 18] = bad
    assert gradient_kernels.first_nonfinite(0, 5, sealed(totals)) == 2
    assert gradient_kernels.first_nonfinite(3, 5, sealed(totals)) == -1
    totals[1, 0] = bad
    assert gradient_kernels.first_nonfinite(0, 5, sealed(totals)) == 1


@pytest.mark.parametrize("dim", [1, 8, 16, 17, 48, 65])
def test_rows_sixteen_floats_at_a_time(dim):
    rng = np.random.default_rng(dim)
    source = rng.normal(size=(3, dim + 2)).astype(np.float32)
    target = rng.normal(size=(4, dim + 5)).astype(np.float32)
    expected = target.copy()
    vector.copy_row(target, 1, 3, source, 2, 1, dim)
    expected[1, 3 : 3 + dim] = source[2, 1 : 1 + dim]
    vector.add_row(target, 3, 2, source, 0, 2, dim)
    expected[3, 2 : 2 + dim] += source[0, 2 : 2 + dim]
    vector.add_scaled(target, 0, 0, source, 1, 0, dim, np.float32(0.3))
    expected[0, :dim] += np.float32(0.3) * source[1, :dim]
    numbers = np.array([9, 2, 0, 2, 9], np.int32)
    total = source[[2, 0], 1 : 1 + dim].sum(0) + source[2, 1 : 1 + dim]
    vector.sum_from(addresses_in(target)[2], addresses_in(source), 4, numbers, 1, 4, dim, np.float32(0.7))
    expected[2, :dim] = np.float32(0.7) * total
    np.testing.assert_array_equal(target, expected)
    vector.sum_rows(target, 0, 5, np.ascontiguousarray(source[:, 1 : 1 + dim]), numbers, 1, 4, dim)
    expected[0, 5 : 5 + dim] = total
    vector.copy_from(addresses_in(target)[3] + 4, addresses_in(source)[1] + 8, dim)
    expected[3, 1 : 1 + dim] = source[1, 2 : 2 + dim]
    weights = np.array([9, 0.5, -1.5, 2, 9], np.float32)
    vector.weigh_from(
        addresses_in(target)[1] + 12, addresses_in(source), 0, numbers, 1, 4, dim, weights, np.float32(0.3)
    )
    total = weights[1] * source[2, :dim] + weights[2] * source[0, :dim] + weights[3] * source[2, :dim]
    expected[1, 3 : 3 + dim] = np.float32(0.3) * total
    np.testing.assert_array_equal(target, expected)
