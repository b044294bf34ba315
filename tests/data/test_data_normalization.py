"""Mean and deviation of features to be standardized."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih.data import NormalizationStats, read_libsvm, read_parquet
from girih.errors import ConfigError
from girih.schema import Categorical, Numeric, Schema

SCHEMA = Schema(
    [
        Numeric(name="plain"),
        Numeric(name="a", transform=("log1p", "standardize")),
        Categorical(name="c"),
        Numeric(name="b", transform="standardize"),
        Numeric(name="same", transform="standardize"),
        Numeric(name="none", transform="standardize"),
    ],
    "y",
)


@pytest.fixture
def dataset(tmp_path):
    rng = np.random.default_rng(1)
    size = 3000
    table = {
        "plain": rng.normal(size=size),
        "a": pa.array(rng.exponential(50, size), mask=rng.random(size) < 0.1),
        "c": rng.integers(0, 9, size),
        "b": pa.array(1e6 + rng.normal(size=size), mask=rng.random(size) < 0.3),
        "same": np.full(size, 7.0),
        "none": pa.nulls(size, pa.float64()),
        "y": rng.integers(0, 2, size),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=700)
    return read_parquet(tmp_path / "a.parquet", SCHEMA, batch_size=100, shuffle=True)


def test_moments_are_those_of_the_present_values(dataset):
    moments = NormalizationStats.of(dataset)
    (batch,) = list(dataset.in_order().with_batch_size(10_000))
    raw = batch.numeric.astype(np.float64)[:, [1, 2, 3]]
    assert moments.features == ("a", "b", "same", "none")
    np.testing.assert_allclose(moments.mean[:3], np.nanmean(raw, axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.std[:2], np.nanstd(raw[:, :2], axis=0), rtol=1e-9)
    assert moments.std[2:].tolist() == [1, 1]
    assert moments.count.tolist() == [*(~np.isnan(raw)).sum(axis=0), 0]


def test_standardized_features_have_mean_0_and_deviation_1_and_nulls_the_mean(dataset):
    moments = NormalizationStats.of(dataset)
    (batch,) = list(dataset.in_order().with_batch_size(10_000))
    done = moments.apply(batch)
    nulls = np.isnan(batch.numeric)
    assert not np.isnan(done.numeric).any()
    assert (done.numeric[nulls] == 0).all()
    for place in (1, 2):
        values = done.numeric[~nulls[:, place], place].astype(np.float64)
        assert abs(values.mean()) < 0.05
        assert abs(values.std() - 1) < 0.05
    np.testing.assert_array_equal(done.numeric[:, 0], batch.numeric[:, 0])
    assert (done.numeric[:, 3:] == 0).all()
    assert np.isnan(batch.numeric).any()  # the batch itself is left alone


def test_merging_is_measuring_all(dataset):
    moments = NormalizationStats.of(dataset)
    parts = NormalizationStats.empty(SCHEMA)
    for batch in dataset:
        parts = NormalizationStats.empty(SCHEMA).merge(parts.measured(batch)).merge(parts)
    np.testing.assert_allclose(parts.mean, moments.mean, rtol=1e-12)
    np.testing.assert_allclose(parts.std, moments.std, rtol=1e-9)


def test_they_survive_json_and_fit_only_their_schema(dataset):
    moments = NormalizationStats.of(dataset)
    back = NormalizationStats.from_dict(json.loads(json.dumps(moments.to_dict())), SCHEMA)
    for name in ("count", "mean", "squares"):
        np.testing.assert_array_equal(getattr(back, name), getattr(moments, name))
    with pytest.raises(ConfigError, match="the schema standardizes"):
        NormalizationStats.from_dict({"a": {}}, SCHEMA)
    with pytest.raises(ConfigError, match="'count' is missing"):
        NormalizationStats.from_dict({name: {} for name in moments.features}, SCHEMA)
    for wrong in (
        {"count": -1.0},
        {"mean": float("nan")},
        {"mean": 1e300},
        {"squares": -0.5},
        {"squares": float("inf")},
        {"mean": True},
    ):
        changed = {name: each | wrong for name, each in moments.to_dict().items()}
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = "):
            NormalizationStats.from_dict(changed, SCHEMA)


def test_nothing_to_standardize_reads_nothing(tmp_path):
    schema = Schema([Numeric(name="x")], "y")
    pq.write_table(pa.table({"x": [1.0], "y": [2.0]}), tmp_path / "a.parquet")  # a bad label, were it read
    moments = NormalizationStats.of(read_parquet(tmp_path / "a.parquet", schema))
    assert moments.to_dict() == {}
    (batch,) = list(read_parquet(tmp_path / "a.parquet", schema, with_labels=False))
    assert moments.apply(batch) is batch


def test_libsvm_features_keep_their_places(tmp_path):
    (tmp_path / "a.txt").write_text("1 5:1 9:10 9:1\n0 6:1 9:30 9:1\n")
    schema = Schema(
        [Categorical(name="c"), Numeric(name="x", transform="standardize"), Numeric(name="z")], "y"
    )
    assert NormalizationStats.of(read_libsvm(tmp_path / "a.txt", schema)).to_dict()["x"] == {
        "count": 2,
        "mean": 20,
        "squares": 200,
    }
