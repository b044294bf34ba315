import re

import pytest

import girih
from girih.errors import ConfigError
from girih.sparse.groups.pack import pack


def needs(schema, *kinds):
    return {feature.name: frozenset(kinds) for feature in schema.sparse}


def test_tables_of_equal_rows_are_one_group():
    schema = girih.Schema([girih.Categorical(name=f"f{i}", dim=8) for i in range(26)], "y")
    (group,) = pack(schema, needs(schema, "embedding", "first_order"), girih.optim.Adagrad())
    assert group.spec.dim == 9
    assert [s.name for s in group.spec.segments] == ["embedding", "first_order"]
    assert group.outputs[0].names == tuple(f"f{i}" for i in range(26))
    assert len(group.outputs) == 2


def test_dim_optimizer_and_dtype_split_groups_with_names_of_their_own():
    schema = girih.Schema(
        [girih.Categorical(name=name, dim=4 if name == "d" else 8) for name in "abcd"],
        "y",
        [
            girih.Table(name="b", optimizer=girih.optim.Adagrad(lr=0.5)),
            girih.Table(name="c", dtype="bfloat16"),
        ],
    )
    groups = pack(schema, needs(schema, "embedding"), girih.optim.Adagrad())
    assert len(groups) == 4
    assert len({group.spec.name for group in groups}) == 4


def test_features_of_one_table_stand_together_and_come_out_in_schema_order():
    schema = girih.Schema(
        [
            girih.Categorical(name="video", dim=4),
            girih.Categorical(name="user", dim=4),
            girih.Sequence(name="history", table="video"),
            girih.Categorical(name="liked", table="video"),
        ],
        "y",
    )
    wanted = needs(schema, "embedding") | {"history": frozenset({"sequence"})}
    (group,) = pack(schema, wanted, girih.optim.SGD())
    assert [t.name for t in group.spec.tables] == ["video", "user"]
    assert group.features.tolist() == [0, 2, 3, 1]
    assert group.tables.tolist() == [0, 0, 0, 1]
    pooled, whole = group.outputs
    assert pooled.names == ("video", "user", "liked")
    assert (whole.names, whole.whole) == (("history",), True)


def test_features_that_are_not_read_have_no_table():
    schema = girih.Schema([girih.Categorical(name="a"), girih.Categorical(name="b")], "y")
    (group,) = pack(schema, {"a": frozenset({"first_order"})}, girih.optim.FTRL())
    assert [t.name for t in group.spec.tables] == ["a"]
    assert group.spec.dim == 1


def test_first_order_takes_its_own_optimizer_unless_the_table_has_one():
    schema = girih.Schema(
        [girih.Categorical(name="a"), girih.Categorical(name="b")],
        "y",
        [girih.Table(name="b", optimizer=girih.optim.SGD())],
    )
    groups = pack(schema, needs(schema, "embedding", "first_order"), girih.optim.Adam(), girih.optim.FTRL())
    assert [[s.optimizer.name for s in g.spec.segments] for g in groups] == [["adam", "ftrl"], ["sgd", "sgd"]]


LAYOUTS = girih.Schema(
    [girih.Categorical(name=name, dim=8 if name == "d" else 4) for name in "abcd"],
    "y",
    [girih.Table(name="c", optimizer=girih.optim.Adagrad(lr=0.5))],
)


def packed_as(partition):
    return pack(LAYOUTS, needs(LAYOUTS, "embedding"), girih.optim.Adagrad(), partition=partition)


def test_a_partition_is_followed_in_its_order():
    groups = packed_as({"last": ("d",), "two": ("b", "a"), "own": ("c",)})
    assert [g.spec.name for g in groups] == ["last", "two", "own"]
    assert [[t.name for t in g.spec.tables] for g in groups] == [["d"], ["b", "a"], ["c"]]
    two = groups[1]
    assert two.features.tolist() == [1, 0]
    assert two.tables.tolist() == [0, 1]
    assert two.outputs[0].names == ("a", "b")


@pytest.mark.parametrize(
    ("partition", "told"),
    [
        ({"x": "ab", "y": "c"}, "table 'd' is in 0 groups, expected one"),
        ({"x": "ab", "y": "cb", "z": "d"}, "table 'b' is in 2 groups"),
        ({"x": "ab", "y": "c", "z": "de"}, "reads no table 'e'; valid: a, b, c, d"),
        ({"x": "ac", "y": "b", "z": "d"}, "tables 'a' and 'c' of group 'x' differ in dim, optimizer"),
        ({"x": "ab", "y": "c", "z": "d", "nil": ""}, "group 'nil' has no table"),
        ({"x": "ab", "../y": "c", "z": "d"}, "expected a name of letters"),
    ],
)
def test_what_is_no_packing_of_the_tables_is_refused(partition, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        packed_as(partition)
