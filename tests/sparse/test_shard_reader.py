"""Rows that several ask for, against a plain sum; and routing of keys to places, against plain twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import girih
from girih.checkpoint import Storage
from girih.checkpoint.parts import PartReader
from girih.errors import ConfigError
from girih.kernels.cpu import dedup as dedup_kernels
from girih.kernels.cpu import routing
from girih.kernels.cpu.arrays import sealed
from girih.sparse.groups.local_shards import LocalShards
from girih.sparse.options import StoreOptions
from girih.sparse.routing.shard_reader import ShardReader
from girih.store import GroupSpec, Segment, Store, TableSpec, shard_of
from girih.tables import Normal
from remote_site import spec_of
from support.twins import shard_of_key


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_keys_are_routed_to_the_places_that_own_them(data, num_places, shards_each, num_tables):
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=num_tables, max_size=num_tables))
    tables = np.repeat(np.arange(num_tables, dtype=np.int32), sizes)
    keys = np.array([data.draw(st.integers(-(2**63), 2**63 - 1)) for _ in tables], np.int64)
    counts = np.arange(1, len(keys) + 1, dtype=np.int32)
    places, numbers, out_counts = (np.zeros(len(keys), np.int32) for _ in range(3))
    out, ends = np.zeros(len(keys), np.int64), np.zeros((num_places, num_tables), np.int64)
    num_shards = num_places * shards_each
    routing.places_of(keys, tables, num_shards, shards_each, places, ends)
    kept = ends.copy()
    routing.route(keys, tables, counts, places, ends, numbers, out, out_counts)
    np.testing.assert_array_equal(ends, kept)
    expected = [
        shard_of_key(int(k), int(t), num_shards) // shards_each for k, t in zip(keys, tables, strict=True)
    ]
    assert places.tolist() == expected
    order = sorted(range(len(keys)), key=lambda k: (expected[k], tables[k], k))
    np.testing.assert_array_equal(out, keys[order])
    np.testing.assert_array_equal(out_counts, counts[order])
    assert [order[n] for n in numbers] == list(range(len(keys)))
    for p in range(num_places):
        for t in range(num_tables):
            assert ends[p, t] == sum((expected[k], tables[k]) <= (p, t) for k in range(len(keys)))


def test_renumbering_touches_the_given_features_alone():
    inverse, numbers = np.array([0, 1, 2, 0, 1], np.int32), np.array([7, 8, 9], np.int32)
    offsets = np.array([0, 1, 2, 3, 4, 4, 5], np.int32)  # three features of two examples
    routing.renumber(inverse, sealed(offsets), 2, np.array([2, 0], np.int64), numbers)
    assert inverse.tolist() == [7, 8, 2, 0, 8]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=30),
    st.integers(0, 9),
    st.integers(0, 5),
)
def test_counts_are_summed_by_key(pairs, first, size):
    inverse, counts = (np.array([p[i] for p in pairs], np.int32) for i in (0, 1))
    out = np.full(size, 99, np.int32)
    dedup_kernels.sum_counts(inverse, sealed(counts), first, out)
    assert out.tolist() == [sum(c for n, c in pairs if n == first + k) for k in range(size)]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("num_askers", [1, 2, 5])
def test_several_askers_get_their_rows_and_their_gradients_are_summed(num_askers, shards):
    spec = spec_of(optimizer=girih.optim.SGD(lr=1.0))
    holding = LocalShards(spec.groups(), StoreOptions(shards=shards))
    (stores,) = holding.stores
    owner, rng = ShardReader(stores, holding.pool), np.random.default_rng(num_askers)
    asked = [[rng.permutation(20)[: rng.integers(0, 20)] for _ in range(2)] for _ in range(num_askers)]
    keys = np.concatenate([k for each in asked for k in each]).astype(np.int64)
    tables = np.concatenate([np.full(len(k), t) for each in asked for t, k in enumerate(each)])
    lengths = np.array([[len(k) for k in each] for each in asked], np.int64)
    counts = rng.integers(1, 4, len(keys)).astype(np.int32)
    served, values = owner.read(keys, counts, lengths, 1, train=True)
    values = values.copy()
    gradients = rng.normal(size=values.shape).astype(np.float32)
    totals, bad = owner.sum_gradients(served, [gradients])
    assert bad is None
    assert owner.apply(served, totals, 1, 1.0) == 0
    _, after = owner.read(keys, counts, lengths, 2, train=False)
    pairs = list(zip(tables.tolist(), keys.tolist(), strict=True))
    assert holding.counters()["rows"] == len(set(pairs))
    for k, pair in enumerate(pairs):
        same = [n for n, other in enumerate(pairs) if other == pair]
        np.testing.assert_array_equal(values[k], values[same[0]])
        np.testing.assert_allclose(values[k] - after[k], gradients[same].sum(axis=0), atol=1e-5)
    owner.apply(served, totals, 2, -1.0)  # back
    _, back = owner.read(keys, counts, lengths, 3, train=False)
    np.testing.assert_allclose(back, values, atol=1e-5)
    if len(keys):
        gradients[-1, 0] = np.inf
        assert owner.sum_gradients(served, [gradients])[1] == ("user", "item")[tables[-1]]
    holding.close()


@pytest.mark.parametrize(("before", "after"), [(n, m) for n in (1, 2, 3, 8) for m in (1, 2, 3, 8)])
def test_shards_of_n_places_load_on_m(tmp_path, before, after):
    spec, rng = spec_of(optimizer=girih.optim.Adam(lr=0.1)), np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 300)
    tables, counts = np.repeat(np.array([0, 1], np.int32), 150), np.ones(300, np.int32)
    lengths = np.array([[150, 150]])

    def each(num_places):
        return [
            LocalShards(spec.groups(), StoreOptions(shards=1), place=p, num_places=num_places)
            for p in range(num_places)
        ]

    def mine(place, num_places):
        own = np.array(
            [shard_of_key(int(k), int(t), num_places) == place for k, t in zip(keys, tables, strict=True)],
            bool,
        )
        return keys[own], counts[own], np.array([[own[:150].sum(), own[150:].sum()]]), own

    files, values = {}, np.zeros((300, 4), np.float32)
    for place, holding in enumerate(each(before)):
        owner = ShardReader(holding.stores[0], holding.pool)
        own_keys, own_counts, own_lengths, own = mine(place, before)
        for step in (1, 2):
            served, _ = owner.read(own_keys, own_counts, own_lengths, step, train=True)
            totals, _ = owner.sum_gradients(
                served, [np.sin(own_keys / 1e18)[:, None].repeat(4, 1).astype(np.float32)]
            )
            owner.apply(served, totals, step, 1.0)
        _, values[own] = owner.read(own_keys, own_counts, own_lengths, 3, train=False)
        save = holding.begin_save(Storage.at(tmp_path))
        files |= save.write()
        save.close()
        holding.close()
    assert len(files) == before
    assert lengths.sum() == 300
    total = 0
    for place, holding in enumerate(each(after)):
        holding.load(PartReader(Storage.at(tmp_path), files))
        owner = ShardReader(holding.stores[0], holding.pool)
        own_keys, own_counts, own_lengths, own = mine(place, after)
        _, found = owner.read(own_keys, own_counts, own_lengths, 3, train=False)
        np.testing.assert_array_equal(found, values[own])
        total += sum(holding.rows().values())
        holding.close()
    assert total == 300


def test_keys_that_belong_elsewhere_are_refused():
    spec = GroupSpec("g", (TableSpec("t", (Normal(),)),), (Segment("embedding", 4, girih.optim.SGD(lr=0.1)),))
    store = Store(spec, shard=0, num_shards=2)
    owner = ShardReader([store], None)
    ids = np.arange(64, dtype=np.int64)
    mine = shard_of(ids, np.zeros(64, np.int32), 2) == 0
    keys, ones = ids[mine], np.ones(mine.sum(), np.int32)
    assert len(owner.read(keys, ones, np.array([[len(keys)]]), 1, train=True)[1]) == len(keys)
    for asked, counts, lengths in (
        (ids, np.ones(64, np.int32), [[64]]),
        (keys, ones, [[len(keys) + 1]]),
        (keys, ones[1:], [[len(keys)]]),
        (keys, ones.astype(np.int64), [[len(keys)]]),
    ):
        with pytest.raises(ConfigError, match=r"belongs to another process|expected int64, int32"):
            owner.read(asked, counts, np.array(lengths), 2, train=True)
    store.close()
