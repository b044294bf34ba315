"""Who owns which features: those of one table together, every rank something, heavy tables apart."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih import Categorical, Numeric, Schema, Sequence
from girih.errors import ConfigError
from girih.planner.placement import balanced, modulo


def schema_of(num_tables, num_numeric=0):
    features = [Categorical(name=f"c{i}", dim=4) for i in range(num_tables)]
    return Schema([*features, *(Numeric(name=f"x{i}") for i in range(num_numeric))], "click")


def loads_of(placement, num_ranks, of_features):
    """The load of each rank."""
    total = [0.0] * num_ranks
    for name, load in of_features.items():
        total[placement.owners[name]] += load
    return total


def test_modulo_is_the_papers():
    placement = modulo(schema_of(5, 3), 2)
    assert placement.owners == {"c0": 0, "c1": 1, "c2": 0, "c3": 1, "c4": 0, "x0": 0, "x1": 1, "x2": 0}


def test_features_of_one_table_stay_together():
    schema = Schema(
        [
            Categorical(name="item", dim=4),
            Categorical(name="user", dim=4),
            Sequence(name="seen", table="item"),
            Categorical(name="shop", dim=4),
        ],
        "click",
    )
    for placement in (modulo(schema, 2), balanced(schema, 2, {"item": 1.0, "user": 9.0, "shop": 3.0})):
        assert placement.owners["item"] == placement.owners["seen"]
        parts = [placement.schema_of(rank, schema) for rank in range(2)]
        assert sorted(f.name for part in parts for f in part.features) == ["item", "seen", "shop", "user"]
        assert all(table in schema.tables for part in parts for table in part.tables)


def test_what_must_be_together_is_whatever_its_tables():
    schema = schema_of(5)
    together = [("c0", "c3"), ("c3", "c4")]
    assert modulo(schema, 3, together).owners == {"c0": 0, "c1": 1, "c2": 2, "c3": 0, "c4": 0}
    loads = {"c0": 5.0, "c1": 9.0, "c2": 1.0, "c3": 1.0, "c4": 1.0}
    assert balanced(schema, 2, loads, together).owners == {"c0": 1, "c1": 0, "c2": 1, "c3": 1, "c4": 1}
    with pytest.raises(ConfigError, match="4 trainers, but 3 tables"):
        modulo(schema, 4, together)


@settings(deadline=None)
@given(
    loads=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    num_ranks=st.integers(1, 8),
    num_numeric=st.integers(0, 5),
)
def test_every_rank_gets_a_table_and_none_more_than_grahams_bound(loads, num_ranks, num_numeric):
    schema = schema_of(len(loads), num_numeric)
    by_name = {f"c{i}": load for i, load in enumerate(loads)}
    if len(loads) < num_ranks:
        with pytest.raises(ConfigError, match=f"{num_ranks} trainers, but {len(loads)} tables"):
            balanced(schema, num_ranks, by_name)
        return
    placement = balanced(schema, num_ranks, by_name)
    assert set(placement.owners) == {feature.name for feature in schema.features}
    found = loads_of(placement, num_ranks, by_name | {f"x{i}": 0.0 for i in range(num_numeric)})
    best = max(max(loads), sum(loads) / num_ranks)  # no placement can be better
    assert max(found) <= 2 * best + 1e-6
    assert all(placement.schema_of(rank, schema).tables for rank in range(num_ranks))


def test_balanced_beats_modulo_where_loads_are_skewed():
    rng = np.random.default_rng(0)
    for num_ranks in (2, 4, 8):
        loads = {f"c{i}": float(load) for i, load in enumerate(rng.zipf(1.5, 26).clip(max=10_000))}
        schema = schema_of(26)
        worst = [
            max(loads_of(place, num_ranks, loads))
            for place in (balanced(schema, num_ranks, loads), modulo(schema, num_ranks))
        ]
        assert worst[0] < worst[1]


def test_a_thousand_tables_are_placed_over_64_shards_in_no_time():
    """Loads by a Zipf law, as those of features are; 4/3 of the least possible is Graham's bound for the largest first."""
    schema = schema_of(1000)
    loads = {f"c{number}": 1e6 / (1 + number) ** 0.8 for number in range(1000)}
    started = time.process_time()
    placement = balanced(schema, 64, loads)
    assert time.process_time() - started < 5
    found = loads_of(placement, 64, loads)
    assert max(found) <= 4 / 3 * max(*loads.values(), sum(loads.values()) / 64)
    assert min(found) > 0
