"""How work on the way back is partition."""

from types import SimpleNamespace

import numpy as np
import pytest

import girih
from girih.sparse.groups.bags import partition, passes
from girih.sparse.groups.pack import pack

EMBEDDING, FIRST_ORDER, SEQUENCE = "embedding", "first_order", "sequence"


def group_of(num_tables, *, features_of_each=1, needs=(EMBEDDING,)):
    features = [
        girih.Categorical(name=f"f{t}-{f}", dim=4, table=f"t{t}" if features_of_each > 1 else None)
        for t in range(num_tables)
        for f in range(features_of_each)
    ]
    schema = girih.Schema(features, "y")
    (group,) = pack(schema, {f.name: frozenset(needs) for f in features}, girih.optim.SGD(lr=1.0))
    return group


@pytest.mark.parametrize(("num_tables", "features_of_each"), [(1, 1), (2, 1), (3, 2), (7, 3), (26, 1)])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_every_key_has_one_part(num_tables, features_of_each, num_shards):
    group = group_of(num_tables, features_of_each=features_of_each)
    parts = partition(group, num_shards)
    assert 1 <= len(parts) <= num_shards
    rng = np.random.default_rng(num_tables)
    first_keys, shards, seen = 0, [], []
    for shard in range(num_shards):
        of_table = rng.integers(0, 5, num_tables)
        ends = np.cumsum(of_table)[group.tables]  # keys of a table stand behind its last feature's, or before
        shards.append(SimpleNamespace(first=first_keys, ends=ends))
        ranges = [part.key_ranges(shards)[shard] for part in parts]
        seen += [key for first, last in ranges for key in range(first, last)]
        assert sorted(seen) == list(range(first_keys + int(of_table.sum())))
        first_keys += int(of_table.sum())
    for part in parts:
        inside = {int(f) for f in group.features[part.first : part.last]}
        assert {int(f) for members in part.members for f in members.features} == inside
        for output, members in zip(group.outputs, part.members, strict=True):
            np.testing.assert_array_equal(output.features[members.places], members.features)


def test_a_table_alone_is_cut_by_shards():
    assert [part.shards for part in partition(group_of(1), 3)] == [(0, 3), (1, 3), (2, 3)]
    assert [part.shards for part in partition(group_of(5), 3)] == [None] * 3


def test_first_order_weights_are_pooled_with_their_embeddings():
    assert passes(group_of(3, needs=(EMBEDDING, FIRST_ORDER)).outputs) == [(0, 1)]
    assert passes(group_of(3).outputs) == [(0,)]


def test_outputs_of_other_features_are_pooled_apart():
    features = [girih.Categorical(name="a", dim=4, table="t"), girih.Categorical(name="b", dim=4, table="t")]
    needs = {"a": frozenset({EMBEDDING, FIRST_ORDER}), "b": frozenset({EMBEDDING})}
    (group,) = pack(girih.Schema(features, "y"), needs, girih.optim.SGD(lr=1.0))
    assert passes(group.outputs) == [(0,), (1,)]
