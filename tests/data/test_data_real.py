"""Smoke tests on real public data, where it lies beside the checkout or under $GIRIH_DATA."""

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from girih.data import NormalizationStats, read_criteo, read_csv, read_parquet
from girih.data.readers import CRITEO_COLUMNS
from girih.schema import Categorical, Labels, Numeric, Schema, Sequence

DATA = Path(os.environ.get("GIRIH_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def place(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not there; set GIRIH_DATA to the directory of the public data sets")
    return path


CRITEO = Schema(
    [Numeric(name=name, transform=("log1p", "standardize")) for name in CRITEO_COLUMNS[1:14]]
    + [Categorical(name=name) for name in CRITEO_COLUMNS[14:]],
    "label",
)


def test_criteo():
    dataset = read_criteo(f"{place('criteo_kaggle_8k')}/*.tsv.gz", CRITEO, batch_size=512, shuffle=True)
    batches = list(dataset)
    assert sum(batch.num_examples for batch in batches) == 8000
    assert np.mean(np.concatenate([batch.labels for batch in batches])) == pytest.approx(0.2155, abs=0.005)
    moments = NormalizationStats.of(dataset)
    standardized = np.concatenate([moments.apply(batch).numeric for batch in batches])
    assert np.abs(standardized.mean(axis=0)).max() < 1e-3


def test_criteo_with_a_header_and_commas():
    dataset = read_csv(place("criteo_kaggle_8k") / "deepctr_sample_200.csv.gz", CRITEO)
    assert [batch.num_examples for batch in dataset] == [200]


@pytest.mark.parametrize(("split", "rows", "rate"), [("train", 202_005, 0.335), ("test", 28_860, 0.330)])
def test_frappe(split, rows, rate):
    path = place("frappe_x1") / f"{split}.parquet"
    names = [name for name in pq.read_schema(path).names if name != "label"]
    dataset = read_parquet(path, Schema([Categorical(name=name) for name in names], "label"), shuffle=True)
    assert dataset.num_examples == rows
    seen, clicks, total = set(), 0.0, 0
    for batch in dataset:
        seen.update(batch.ids.tolist())
        clicks += batch.labels.sum()
        total += batch.num_examples
    assert total == rows
    assert clicks / total == pytest.approx(rate, abs=0.001)
    assert (min(seen), max(seen) < 5382) == (0, True)


def test_kuairand_histories():
    path = place("kuairand_pure") / "user_history_until_0424.parquet"
    schema = Schema(
        [Categorical(name="user_id"), Sequence(name="watch_seq", max_length=20), Sequence(name="like_seq")],
        Labels(names=("active",), derive={"active": "history_len >= 10"}),
    )
    table = pq.read_table(path)
    (batch,) = list(read_parquet(path, schema, batch_size=1 << 20))
    size = batch.num_examples
    watched = table["watch_seq"].to_pylist()
    for row in range(0, size, 97):
        first, last = batch.offsets[size + row], batch.offsets[size + row + 1]
        assert batch.ids[first:last].tolist() == watched[row][-20:]
    np.testing.assert_array_equal(batch.labels[:, 0], table["history_len"].to_numpy() >= 10)


def test_adult_without_a_header():
    names = ["age", "work", "weight", "education", "years", "marriage", "occupation", "relation", "race",
             "sex", "gain", "loss", "hours", "country", "income"]  # fmt: skip
    schema = Schema(
        [Categorical(name="occupation"), Numeric(name="age", transform="standardize")],
        Labels(names=("rich",), derive={"rich": "income in [' >50K', ' >50K.']"}),
    )
    rates = []
    for name in ("adult.data.gz", "adult.test.gz"):
        batches = list(read_csv(place("adult") / name, schema, columns=names))
        rates.append(
            (
                sum(batch.num_examples for batch in batches),
                np.mean(np.concatenate([b.labels for b in batches])),
            )
        )
    assert [rows for rows, _ in rates] == [32_561, 16_281]
    assert [rate for _, rate in rates] == [pytest.approx(0.241, abs=0.001), pytest.approx(0.236, abs=0.001)]


def test_movielens_columns_with_types_in_their_names():
    schema = Schema(
        [Categorical(name="user", column="user_id:token"), Categorical(name="item", column="item_id:token")],
        Labels(names=("liked",), derive={"liked": "rating:float >= 4"}),
    )
    batches = list(read_csv(place("ml-100k") / "ml-100k.inter.gz", schema, separator="\t"))
    assert np.mean(np.concatenate([batch.labels for batch in batches])) == pytest.approx(0.554, abs=0.001)
