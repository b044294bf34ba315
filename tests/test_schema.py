import pytest

import girih
from girih.errors import ConfigError


def test_shared_table_takes_the_dim_that_one_feature_gives():
    schema = girih.Schema(
        [girih.Categorical(name="video", dim=8), girih.Sequence(name="history", table="video")],
        labels="click",
    )
    assert [t.name for t in schema.tables] == ["video"]
    assert [schema.dim_of(f) for f in schema.sparse] == [8, 8]


def test_default_dim_is_16():
    schema = girih.Schema([girih.Categorical(name="a")], labels=["y"])
    assert schema.dim_of(schema.sparse[0]) == 16


@pytest.mark.parametrize(
    ("features", "labels", "tables", "message"),
    [
        ([], "y", [], "at least one feature"),
        ([girih.Numeric(name="a"), girih.Numeric(name="a")], "y", [], "'a' is listed 2 times"),
        ([girih.Numeric(name="a")], [], [], "at least one label"),
        ([girih.Numeric(name="a")], ["y", "y"], [], "listed 2 times"),
        ([girih.Numeric(name="y")], "y", [], "the model would see the answer"),
        ([girih.Numeric(name="a", column="y")], "y", [], "the model would see the answer"),
        (["a"], "y", [], "not a Categorical"),
        (
            [girih.Categorical(name="a", dim=4, table="t"), girih.Categorical(name="b", dim=8, table="t")],
            "y",
            [],
            "table 't' has dim 4, feature 'b' has dim 8",
        ),
        ([girih.Categorical(name="user")], "y", [girih.Table(name="usr")], "did you mean 'user'"),
        ([girih.Categorical(name="user", dim=4)], "y", [girih.Table(name="user", dim=8)], "has dim 8"),
    ],
)
def test_contradictions_are_named(features, labels, tables, message):
    with pytest.raises(ConfigError, match=message):
        girih.Schema(features, labels, tables)


@pytest.mark.parametrize(
    "make",
    [
        lambda: girih.Categorical(name="a", pooling="max"),
        lambda: girih.Categorical(name="a", bucketize=(2.0, 1.0)),
        lambda: girih.Categorical(name="a", bucketize=()),
        lambda: girih.Categorical(name="a", max_length=0),
        lambda: girih.Categorical(name="a", separator=""),
        lambda: girih.Categorical(name="a", dim=True),
        lambda: girih.Numeric(name="a", transform="sqrt"),
        lambda: girih.Numeric(name="a", transform=("standardize", "log1p")),
        lambda: girih.Labels(names=("a",), derive={"b": "x > 1"}),
        lambda: girih.Table(name="t", dtype="int8"),
        lambda: girih.tables.LRU(max_rows=0),
        lambda: girih.tables.TTL(),
        lambda: girih.tables.TTL(steps=1, seconds=1),
        lambda: girih.tables.MinCount(count=0),
        lambda: girih.tables.Probability(p=0.0),
        lambda: girih.tables.Uniform(low=1.0, high=0.0),
        lambda: girih.tables.Normal(std=-1.0),
    ],
)
def test_impossible_values_are_refused(make):
    with pytest.raises(ConfigError, match=r"expected|boundaries|must be|is above|among|leave it out"):
        make()


def test_fingerprint_follows_what_rows_and_inputs_depend_on():
    def schema(**changes):
        return girih.Schema([girih.Categorical(name="a", **changes)], labels="y").fingerprint()

    assert schema() == schema(column="b")
    changes = [{}, {"dim": 8}, {"table": "b"}, {"pooling": "sum"}, {"bucketize": (1.0,)}, {"max_length": 3}]
    assert len({schema(**change) for change in changes}) == len(changes)
