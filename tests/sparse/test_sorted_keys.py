"""Keys of a request that are sorted by shard: what is refused, and sums of several askers against a plain sum."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import girih
from girih.errors import NonFiniteError, WireError
from girih.sparse.routing.key_router import KeyRouter
from girih.sparse.routing.sorted_keys import GradientSums, SortedKeys
from girih.store import Keys, Store
from remote_site import batch_of, spec_of
from support.twins import shard_of_key

SPEC = spec_of(optimizer=girih.optim.SGD(lr=1.0))
(GROUP,) = SPEC.groups()


def asked_of(users, items, place, num_places, shards_each):
    router = KeyRouter(GROUP, num_places, shards_each, by_shard=True)
    return router.ask(batch_of(users, items)).of_place(place)


@pytest.fixture
def stores():
    made = []

    def make(place, num_places, shards_each):
        first, behind = place * shards_each, (place + 1) * shards_each
        made.extend(
            Store(GROUP.spec, shard=shard, num_shards=num_places * shards_each)
            for shard in range(first, behind)
        )
        return made[-shards_each:]

    yield make
    for store in made:
        store.close()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), max_size=12),
    st.integers(1, 3),
    st.integers(1, 5),
)
def test_workers_sort_keys_by_server_shard_and_table(pairs, num_places, shards_each):
    users, items = [u for u, _ in pairs], [i for _, i in pairs]
    num_shards, found = num_places * shards_each, []
    for place in range(num_places):
        lengths, keys, counts = asked_of(users, items, place, num_places, shards_each)
        tables = np.repeat(np.tile([0, 1], shards_each), lengths)
        shards = np.repeat(np.arange(shards_each) + place * shards_each, lengths.reshape(-1, 2).sum(axis=1))
        for key, table, shard in zip(keys.tolist(), tables.tolist(), shards.tolist(), strict=True):
            assert shard == shard_of_key(key, table, num_shards)
        for key, table, count in zip(keys.tolist(), tables.tolist(), counts.tolist(), strict=True):
            assert count == (users, items)[table].count(key)
        found += zip(keys.tolist(), tables.tolist(), strict=True)
    assert sorted(found) == sorted({(u, 0) for u in users} | {(i, 1) for i in items})


def test_requests_that_do_not_fit_the_shards_are_refused(stores):
    own = stores(1, 2, 3)
    lengths, keys, counts = asked_of(range(40), range(40), 1, 2, 3)
    assert SortedKeys.received(own, lengths, keys, counts).starts[-1] == len(keys)
    more, less = lengths.copy(), lengths.copy()
    more[0] += 1
    less[:2] += [-len(keys), len(keys)]
    for misfit in (
        (lengths[:-1], keys, counts),
        (more, keys, counts),
        (less, keys, counts),
        (lengths.astype(np.int32), keys, counts),
        (lengths, keys[1:], counts),
        (lengths, keys, counts[1:]),
        (lengths, keys, counts.astype(np.int64)),
        (lengths, keys.reshape(1, -1), counts),
    ):
        with pytest.raises(WireError, match="expected int64 lengths of 2 tables in 3 shards"):
            SortedKeys.received(own, *misfit)
    swapped = keys.copy()
    swapped[[0, -1]] = keys[[-1, 0]]
    with pytest.raises(WireError, match=re.escape(f"key {keys[-1]} belongs to another shard than 3")):
        SortedKeys.received(own, lengths, swapped, counts)
    with pytest.raises(WireError, match="do all processes have the same number of shards"):
        SortedKeys.received(own, *asked_of(range(40), range(40), 0, 2, 3))


@pytest.mark.parametrize("num_askers", [1, 2, 5])
@pytest.mark.parametrize("cuts", [[0, 1], [0, 4], [0, 1, 4], [0, 1, 2, 3, 4]])
def test_gradients_of_several_askers_are_summed_once_for_each_key(stores, num_askers, cuts):
    shards_each = cuts[-1]
    own, rng = stores(0, 1, shards_each), np.random.default_rng(num_askers)
    parts, expected = [], {}
    for _ in range(num_askers):
        users, items = (rng.permutation(30)[:20] for _ in range(2))
        asked = SortedKeys.received(own, *asked_of(users, items, 0, 1, shards_each))
        rows = np.empty((len(asked.keys), GROUP.spec.dim), np.float32)
        asked.read(own, range(shards_each), 1, rows, train=True)
        gradient = rng.normal(size=rows.shape).astype(np.float32)
        parts.append((asked, gradient))
        for key, table, row, part in zip(asked.keys, asked.tables, rows, gradient, strict=True):
            before, total = expected.get((int(key), int(table)), (row, 0))
            np.testing.assert_array_equal(before, row)
            expected[int(key), int(table)] = row, total + part
    for first, behind in pairwise(cuts):
        shards = range(first, behind)
        GradientSums().sum(own, shards, parts).apply(own, shards, 1, 1.0, None)
    for (key, table), (row, total) in expected.items():
        store = own[shard_of_key(key, table, shards_each)]
        out = np.empty((1, GROUP.spec.dim), np.float32)
        assert store.peek(Keys(np.array([key]), np.array([table], np.int32)), out) >= 0
        np.testing.assert_allclose(row - out[0], total, atol=1e-5)
    assert sum(store.counters()["updates"] for store in own) == len(expected)


@pytest.mark.parametrize("num_askers", [1, 2])
def test_a_sum_that_is_not_finite_names_the_table_and_only_its_shards_refuse(stores, num_askers):
    own = stores(0, 1, 4)
    asked = SortedKeys.received(own, *asked_of(range(40), range(40), 0, 1, 4))
    gradient = np.ones((len(asked.keys), GROUP.spec.dim), np.float32)
    bad = int(np.flatnonzero(asked.tables == 1)[-1])
    gradient[bad, 2] = np.inf
    parts = [(asked, gradient)] * num_askers
    shard = shard_of_key(int(asked.keys[bad]), 1, 4)
    for s in range(4):
        if s != shard:
            GradientSums().sum(own, range(s, s + 1), parts)
    with pytest.raises(NonFiniteError, match="table 'item' is NaN or infinite"):
        GradientSums().sum(own, range(shard, shard + 1), parts)
