"""The generated click log: reproducible in any pieces, and as difficult as it says."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih.data import NormalizationStats, read_parquet
from girih.data.click_log import click_log, click_log_schema
from girih.errors import ConfigError


def test_pieces_make_the_whole():
    whole, p = click_log(3000, seed=5)
    pieces = [click_log(1000, seed=5, start=start) for start in (0, 1000, 2000)]
    assert pa.concat_tables([table for table, _ in pieces]).equals(whole)
    np.testing.assert_array_equal(np.concatenate([part for _, part in pieces]), p)
    other, _ = click_log(3000, seed=6)
    assert not other.equals(whole)


def test_the_log_is_the_same_for_ever():
    table, p = click_log(2, seed=0)
    row = table.slice(0, 1).to_pylist()[0]
    assert row["user"] == GOLDEN["user"]
    assert row["context"] == GOLDEN["context"]
    assert row["tags"] == GOLDEN["tags"]
    assert p[0] == pytest.approx(GOLDEN["p"], rel=1e-9)


GOLDEN = {
    "user": -6917752564788650762,
    "context": "desktop/work/night",
    "tags": [63, 136, 160, 376, 293],
    "p": 0.18862857339636288,
}


def test_columns_ids_and_nulls():
    table, p = click_log(20_000, num_features=5, num_numeric=3, cardinality=1_000_000)
    assert table.column_names == ["user", "item", "context", "f3", "f4", "tags", "x0", "x1", "x2", "click"]
    users = table["user"].to_numpy()
    assert users.min() < 0 < users.max()
    _, counts = np.unique(users, return_counts=True)
    assert counts.max() > 0.1 * len(users)  # the head of a Zipf distribution
    assert (counts == 1).sum() > 1000  # and its tail
    for name in ("tags", "x0", "x1", "x2"):
        assert 0.03 < table[name].null_count / len(users) < 0.07
    assert ((p > 0) & (p < 1)).all()


def test_labels_are_drawn_from_the_probabilities():
    table, p = click_log(100_000)
    clicks = table["click"].to_numpy()
    assert abs(clicks.mean() - p.mean()) < 0.005
    for low, high in ((0.1, 0.2), (0.4, 0.5), (0.7, 0.8)):
        chosen = (p > low) & (p < high)
        assert abs(clicks[chosen].mean() - p[chosen].mean()) < 0.02


def test_the_ceiling_is_well_above_what_a_linear_model_of_the_numbers_reaches(tmp_path):
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    table, p = click_log(30_000)
    pq.write_table(table, tmp_path / "a.parquet")
    dataset = read_parquet(tmp_path / "a.parquet", click_log_schema(), batch_size=30_000)
    (batch,) = list(dataset)
    numeric = NormalizationStats.of(dataset).apply(batch).numeric
    labels = batch.labels[:, 0]
    linear = LogisticRegression().fit(numeric, labels).predict_proba(numeric)[:, 1]
    ceiling = roc_auc_score(labels, p)
    assert 0.78 < ceiling < 0.86
    assert 0.55 < roc_auc_score(labels, linear) < ceiling - 0.1


@pytest.mark.parametrize(
    "options", [{"num_features": 2}, {"num_numeric": -1}, {"start": -1}, {"zipf": 0}, {"cardinality": 0}]
)
def test_arguments_that_make_no_log(options):
    with pytest.raises(ConfigError):
        click_log(10, **options)
    with pytest.raises(ConfigError):
        click_log(0)


def test_zipf_of_one_and_tiny_cardinalities():
    for options in ({"zipf": 1.0}, {"cardinality": 1}, {"cardinality": 3, "zipf": 0.5}):
        table, _ = click_log(500, **options)
        assert len(np.unique(table["user"].to_numpy())) <= options.get("cardinality", 500)
