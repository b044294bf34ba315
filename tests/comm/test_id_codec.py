"""The lossless codec of ids, against a plain twin, and against arrays that lie."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.comm.codecs.rows import pack, unpack
from girih.errors import WireError


def plain_pack(bags, pooled):
    """Of each feature, the form that is smaller: (unique ids, counts, examples), or the bags."""
    packed = []
    for feature, is_pooled in zip(bags, pooled, strict=True):
        found = {}
        for example, bag in enumerate(feature):
            for id_ in bag:
                found.setdefault(id_, []).append(example)
        n = sum(map(len, feature))
        plain_bytes = 8 * n + (0 if all(len(bag) == 1 for bag in feature) else 4 * len(feature))
        if is_pooled and 12 * len(found) + 2 * n <= plain_bytes:
            packed.append((list(found), [len(at) for at in found.values()], list(chain(*found.values()))))
        else:
            packed.append(feature)
    return packed


def flat(bags):
    ids = np.array([id_ for feature in bags for bag in feature for id_ in bag], np.int64)
    sizes = [len(bag) for feature in bags for bag in feature]
    return ids, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


@st.composite
def batches(draw):
    num_examples = draw(st.integers(0, 12))
    ids = st.sampled_from([0, -1, 5, 7, 2**63 - 1, -(2**63)])
    bag = st.one_of(st.lists(ids, min_size=1, max_size=1), st.lists(ids, max_size=6))
    column = st.lists(bag, min_size=num_examples, max_size=num_examples)
    bags = draw(st.lists(column, min_size=0, max_size=4))
    pooled = draw(st.lists(st.booleans(), min_size=len(bags), max_size=len(bags)))
    return bags, np.array(pooled, bool), num_examples


@settings(deadline=None, max_examples=200)
@given(batches(), st.booleans())
def test_bags_come_back(batch, weighted):
    bags, pooled, num_examples = batch
    ids, offsets = flat(bags)
    weights = np.random.default_rng(0).random(len(ids), np.float32) if weighted else None
    arrays = pack(ids, offsets, num_examples, pooled, weights)
    got = unpack(arrays)
    np.testing.assert_array_equal(got.offsets, offsets)
    assert (got.weights is None) == (weights is None)
    carried = weights if weighted else np.zeros(len(ids), np.float32)
    returned = got.weights if weighted else carried
    for bag, (start, end) in enumerate(pairwise(offsets)):
        want = list(zip(ids[start:end].tolist(), carried[start:end].tolist(), strict=True))
        have = list(zip(got.ids[start:end].tolist(), returned[start:end].tolist(), strict=True))
        assert Counter(want) == Counter(have)
        if not pooled[bag // num_examples]:
            assert want == have

    numbers, counts, examples, plain = [], [], [], plain_pack(bags, pooled)
    for form in plain:
        if isinstance(form, tuple):
            for whole, part in zip((numbers, counts, examples), form, strict=True):
                whole.extend(part)
        else:
            numbers.extend(id_ for bag in form for id_ in bag)
            if any(len(bag) != 1 for bag in form):
                counts.extend(map(len, form))
    assert [a.tolist() for a in arrays[1:4]] == [numbers, counts, examples]


@pytest.mark.parametrize(("num_examples", "dtype"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_examples_take_as_many_bytes_as_they_must(num_examples, dtype):
    ids = np.arange(num_examples, dtype=np.int64) % 3
    ids[-1] = 9
    offsets = np.arange(num_examples + 1, dtype=np.int32)
    arrays = pack(ids, offsets, num_examples, np.array([True]))
    assert arrays[3].dtype == dtype
    assert arrays[3][-1] == num_examples - 1
    got = unpack(arrays)
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_array_equal(got.offsets, offsets)


def test_an_id_more_often_than_uint16_counts():
    ids = np.zeros(70_000, np.int64)
    offsets = np.array([0, 69_000, 70_000], np.int32)
    arrays = pack(ids, offsets, 2, np.array([True]))
    assert arrays[2].tolist() == [70_000]
    np.testing.assert_array_equal(unpack(arrays).offsets, offsets)


def test_popular_ids_travel_in_a_third_and_rare_ones_do_not_grow():
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 40_001, 10, dtype=np.int32)
    popular = rng.integers(0, 100, 40_000)
    assert sum(a.nbytes for a in pack(popular, offsets, 4000, np.array([True]))) < popular.nbytes / 3
    rare = rng.integers(0, 2**60, 40_000)
    assert sum(a.nbytes for a in pack(rare, offsets, 4000, np.array([True]))) < rare.nbytes + offsets.nbytes


def good():
    ids, offsets = flat([[[1, 1], [1], [1, 2], [1]] * 4, [[3], [4, 5], [], [6]] * 4, [[7]] * 16])
    weights = np.ones(len(ids), np.float32)
    return [a.copy() for a in pack(ids, offsets, 16, np.array([True, False, False]), weights)]


def test_the_batch_that_is_spoilt_below_is_good():
    arrays = good()
    unpack(tuple(arrays))
    assert arrays[0].tolist() == [16, 1, 24, 2, 16, -1, 16, -2]


@pytest.mark.parametrize("value", [-1, 0, 1, 15, 17, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -3, -(2**63)])
@pytest.mark.parametrize("position", range(8))
def test_sizes_that_lie(position, value):
    arrays = good()
    if arrays[0][position] == value or (position == 1 and value in (0, 1)):
        return
    arrays[0][position] = value
    with pytest.raises(WireError):
        unpack(tuple(arrays))


@pytest.mark.parametrize(("array", "position", "value"), [
    (2, 0, 24), (2, 0, 0), (2, 1, 65_535), (2, 2, 65_535), (2, 5, 3), (3, 0, 16), (3, 23, 65_535),
])  # fmt: skip
def test_counts_and_examples_that_lie(array, position, value):
    arrays = good()
    arrays[array][position] = value
    with pytest.raises(WireError):
        unpack(tuple(arrays))


@pytest.mark.parametrize("array", range(5))
def test_arrays_of_other_lengths_and_dtypes(array):
    for change in (
        lambda a: a[:-1],
        lambda a: np.append(a, a[:1]),
        lambda a: a.astype(np.int8),
        lambda a: a[None],
    ):
        arrays = good()
        arrays[array] = change(arrays[array])
        with pytest.raises(WireError):
            unpack(tuple(arrays))
    with pytest.raises(WireError):
        unpack(tuple(good()[:-1]))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(-3, 30), min_size=2, max_size=8), st.integers(0, 2**32), st.integers(0, 40))
def test_any_sizes_raise_or_are_true(sizes, seed, length):
    rng = np.random.default_rng(seed)
    arrays = (
        np.array(sizes, np.int64),
        rng.integers(0, 9, length),
        rng.integers(0, 4, length // 2).astype(np.uint16),
        rng.integers(0, 4, length // 3).astype(np.uint16),
        np.zeros(0, np.float32),
    )
    try:
        got = unpack(arrays)
    except WireError:
        return
    assert got.offsets[0] == 0
    assert (np.diff(got.offsets) >= 0).all()
    assert got.offsets[-1] == len(got.ids)
