"""Items of a catalogue drawn into each batch."""

import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import cli
from girih.errors import ConfigError, DataError

TOWERS = {"user": ("user", "price"), "item_id": "item", "tower_dim": 4, "hidden": (4,)}


@pytest.fixture
def log(tmp_path):
    rng = np.random.default_rng(1)
    rows = 90
    columns = {
        "user": rng.integers(0, 9, rows),
        "tags": [rng.integers(0, 5, n).tolist() for n in rng.integers(0, 3, rows)],
        "item": rng.integers(0, 4, rows),
        "price": rng.random(rows),
        "age": rng.random(rows),
        "seen": np.ones(rows, np.int8),
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    items = {"tags": [[i, i + 50] for i in range(40)], "item": range(100, 140), "age": np.arange(40) / 40}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    features = [girih.Categorical(name=name, dim=4) for name in ("user", "tags", "item")]
    numeric = [girih.Numeric(name=name) for name in ("price", "age")]
    schema = girih.Schema([*features, *numeric], "seen")
    own = schema.narrowed(["tags", "item", "age"])
    items = girih.read_parquet(tmp_path / "items.parquet", own, with_labels=False)
    return girih.read_parquet(tmp_path / "log.parquet", schema, batch_size=40, shuffle=True), items


def test_each_batch_has_as_many_more_items_and_they_are_drawn_evenly(log):
    data, items = log
    plain, more = list(data), list(data.with_negatives(items, 300))
    drawn = Counter()
    for before, after in zip(plain, more, strict=True):
        size = before.num_examples
        assert after.num_examples == size + 300
        assert np.array_equal(after.labels[:size], before.labels)
        assert not after.labels[size:].any()
        for feature in range(3):  # what was there is there, in order
            own = slice(feature * (size + 300), feature * (size + 300) + size + 1)
            bounds, wanted = after.offsets[own], before.offsets[feature * size : (feature + 1) * size + 1]
            assert np.array_equal(np.diff(bounds), np.diff(wanted))
            assert np.array_equal(after.ids[bounds[0] : bounds[-1]], before.ids[wanted[0] : wanted[-1]])
        ids = after.first_ids(2)[size:]
        assert np.array_equal(after.first_ids(1)[size:], ids - 100)
        assert np.array_equal(
            after.numeric[size:], np.stack([0 * ids, (ids - 100) / 40], axis=1).astype(np.float32)
        )
        assert not np.diff(after.offsets)[size : size + 300].any()  # no user
        drawn.update(ids.tolist())
    assert len(drawn) == 40
    assert max(drawn.values()) < 50 > 2 * min(drawn.values())
    again = list(data.with_negatives(items, 300))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(more, again, strict=True))
    assert [batch.num_examples for batch in data.with_negatives(items, 300).in_order()] == [40, 40, 10]


@pytest.mark.usefixtures("torch")
def test_rows_of_drawn_items_are_trained_and_other_models_refuse_them(log):
    data, items = log
    with_items = data.with_negatives(items, 64)
    with girih.Trainer(girih.models.Retrieval(data.schema, **TOWERS)) as trainer:
        trainer.fit(with_items, epochs=2)
        assert trainer.sparse.stats().counters["rows"] > 44 + 40
    plain = girih.models.TwoTower(data.schema, user=("user", "price"), hidden=(4,))
    with (
        girih.Trainer(plain) as trainer,
        pytest.raises(ConfigError, match="negatives: the loss of TwoTower does not compare"),
    ):
        trainer.fit(with_items)


CONFIG = """
[data]
train = "log.parquet"
batch_size = 40
[negatives]
items = "items.parquet"
features = ["tags", "item", "age"]
per_step = 64
[[features]]
name = "user"
kind = "categorical"
[[features]]
name = "tags"
kind = "categorical"
[[features]]
name = "item"
kind = "categorical"
[[features]]
name = "price"
kind = "numeric"
[[features]]
name = "age"
kind = "numeric"
[labels]
names = ["seen"]
[model]
name = "retrieval"
user = ["user", "price"]
item_id = "item"
tower_dim = 4
hidden = [4]
[train]
epochs = 2
log_every_steps = 1
"""


@pytest.mark.usefixtures("torch")
def test_the_bar_s_total_has_the_drawn_items_too(log, tmp_path, capsys):
    data, items = log
    with_items = data.with_negatives(items, 64)
    an_epoch = sum(batch.num_examples for batch in with_items)
    assert an_epoch == with_items.num_epoch_examples == 90 + 3 * 64
    assert data.num_epoch_examples == data.num_examples == with_items.num_examples == 90
    (tmp_path / "config.toml").write_text(CONFIG)
    with girih.Trainer.from_config(tmp_path / "config.toml") as trainer:
        trainer.fit()
    assert cli.run(["train", str(tmp_path / "config.toml"), "--run", str(tmp_path / "run")]) == 0
    told = re.findall(r"^step (\d)  examples (\d+) of (\d+) \((.*?) %\)", capsys.readouterr().err, re.M)
    total = str(2 * an_epoch)
    assert told == 2 * [("1", "104", total, "18.4"), ("6", total, total, "100.0")]


def test_a_catalogue_that_does_not_fit_is_refused(log, tmp_path):
    data, items = log
    pq.write_table(pq.read_table(tmp_path / "items.parquet").slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none\.parquet: no rows in the file"):
        data.with_negatives(girih.read_parquet(tmp_path / "none.parquet", items.schema, with_labels=False), 5)
    other = girih.Schema([girih.Categorical(name="thing")], "seen")
    pq.write_table(pa.table({"thing": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="negatives: features: no feature 'thing'"):
        data.with_negatives(girih.read_parquet(tmp_path / "other.parquet", other, with_labels=False), 5)
