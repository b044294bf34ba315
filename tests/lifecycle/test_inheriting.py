"""``girih train --init-from``: what a run takes of an earlier one, and what it leaves."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import cli
from girih.checkpoint import Storage
from girih.checkpoint.load import load
from girih.data import NormalizationStats
from girih.errors import ConfigError
from strategies.runs import columns_of, latest, train

TABLES = ("user", "item", "tags")


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture(scope="module")
def parent(log_source, tmp_path_factory):
    """A finished run with Adagrad, and its metrics; only read."""
    path = tmp_path_factory.mktemp("parent") / "run"
    words = (
        "train.max_steps=12",
        "sparse_optimizer.name=adagrad",
        "sparse_optimizer.lr=0.2",
        "store.shards=2",
    )
    assert run("train", log_source / "config.toml", "--run", path, "--set", *words) == 0
    return path


def test_the_same_model_begins_where_the_other_ended(parent, log_source, tmp_path):
    before = json.loads((parent / "summary.json").read_text())
    overrides = {"sparse_optimizer": {"name": "adagrad", "lr": 0.2}, "train.max_steps": 1}
    with girih.Trainer.from_config(
        log_source / "config.toml", overrides, run=tmp_path / "run", progress=False
    ) as child:
        found = child.init_from(parent)
        metrics = child.evaluate()
        assert (metrics.auc, metrics.logloss) == (before["auc"], before["logloss"])
        assert found.rows == {name: len(columns_of(latest(parent))[name, "embedding"][0]) for name in TABLES}
        assert (found.left, found.fresh, found.begun, found.normalized) == ({}, [], {}, ["x0"])
        saved = child.save(tmp_path / "saved")
        for key, (ids, values) in columns_of(latest(parent)).items():
            np.testing.assert_array_equal(columns_of(saved)[key][0], ids)
            np.testing.assert_array_equal(columns_of(saved)[key][1], values)
        child.fit()  # a run of its own: from step 1 on
        assert child.state.step == 1
        with pytest.raises(ConfigError, match="init_from: this trainer is at step 1"):
            child.init_from(parent)


def test_other_features_dims_and_models_take_what_fits(parent, log_source, tmp_path):
    text = (log_source / "config.toml").read_text()
    text = text.replace(
        'name = "item"\nkind = "categorical"\ndim = 4', 'name = "item"\nkind = "categorical"\ndim = 8'
    )
    text = text.replace(
        'name = "tags"\nkind = "categorical"', 'name = "visitor"\ncolumn = "user"\nkind = "categorical"'
    )
    text = text.replace('name = "deepfm"', 'name = "dnn"').replace("data]\n", "data]\n")
    for name in ("train", "valid", "test"):
        text = text.replace(f'"{name}.parquet"', f'"{log_source / name}.parquet"')
    config = tmp_path / "config.toml"
    config.write_text(text)
    with girih.Trainer.from_config(config, {"sparse_optimizer.name": "adagrad"}, progress=False) as child:
        found = child.init_from(parent, train=child.data["train"])
        assert list(found.rows) == ["user"]
        assert found.begun == {}
        assert found.left["table item"] == "dim 4 there, 8 here"
        assert found.left["table tags"] == "this model has no such table"
        assert "table visitor" in found.fresh
        changed = [name for name, why in found.left.items() if why.endswith(" here") and "table" not in name]
        assert len(changed) == 1  # the first layer, whose input is wider
        assert found.parameters
        lines = "\n".join(found.lines())
        assert "rows of user (" in lines
        assert "left: table item (dim 4 there, 8 here)" in lines
        ids, rows = columns_of(latest(parent))["user", "embedding"]
    with girih.Trainer.from_config(
        config, {"sparse_optimizer.name": "adagrad"}, run=tmp_path / "run"
    ) as child:
        child.init_from(parent, train=child.data["train"])
        np.testing.assert_array_equal(child.sparse.peek_rows("user", ids), rows)
        child.fit()


@pytest.mark.parametrize("given", [True, False], ids=["train", ""])
def test_moments_stay_and_those_of_new_features_are_measured(parent, log_source, tmp_path, given):
    text = (log_source / "config.toml").read_text()
    for name in ("train", "valid", "test"):
        text = text.replace(f'"{name}.parquet"', f'"{log_source / name}.parquet"')
    new = '[[features]]\nname = "age"\ncolumn = "item"\nkind = "numeric"\ntransform = ["standardize"]\n'
    (tmp_path / "config.toml").write_text(text.replace("[labels]", f"{new}[labels]"))
    overrides = {"data.train": str(log_source / "valid.parquet"), "train.max_steps": 1}
    with girih.Trainer.from_config(tmp_path / "config.toml", overrides, progress=False) as child:
        train = child.data["train"]
        found = child.init_from(parent, train=train if given else None)
        assert found.normalized == ["x0"]
        assert (child._run.trainer_state.normalizing.stats is not None) == given
        child.fit()
        moments = child._run.trainer_state.normalizing.stats.to_dict()
    measured = NormalizationStats.of(train).to_dict()
    assert moments == {
        "x0": load(Storage.at(latest(parent)), None).normalization.to_dict()["x0"],
        "age": measured["age"],
    }
    assert moments["x0"] != measured["x0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tiers", [("dram",), ("dram", "ssd")], ids=["dram", "ssd"])
def test_segments_that_are_missing_there_begin_at_their_initial_values(log_source, tmp_path, dtype, tiers):
    schema = girih.Schema(
        [girih.Categorical(name="user", dim=5), girih.Categorical(name="item", dim=5)],
        "click",
        [girih.Table(name="user", dtype=dtype)],
    )
    data = girih.read_parquet(log_source / "valid.parquet", schema, batch_size=250)
    with girih.Trainer(girih.models.DNN(schema, hidden=(4,)), run=tmp_path / "run") as plain:
        plain.fit(data)
    store = girih.StoreOptions(
        tiers=tiers, shards=2, **({"hot_rows": 9, "ssd_dir": str(tmp_path)} if "ssd" in tiers else {})
    )
    ftrl = girih.optim.FTRL(lr=0.1)
    with girih.Trainer(
        girih.models.DeepFM(schema, hidden=(4,)), first_order_optimizer=ftrl, store=store
    ) as child:
        found = child.init_from(tmp_path / "run")
        assert found.begun == {}
        assert {"first_order of table user", "first_order of table item"} <= set(found.fresh)
        saved = columns_of(child.save(tmp_path / "saved"))
    before = columns_of(latest(tmp_path / "run"))
    for table in ("user", "item"):
        for column in ("embedding", "embedding.sum"):
            np.testing.assert_array_equal(saved[table, column][1], before[table, column][1])
        assert not saved[table, "first_order"][1].any()
        assert not saved[table, "first_order.z"][1].any()
    with girih.Trainer(
        girih.models.DeepFM(schema, hidden=(4,)), sparse_optimizer=girih.optim.Adam()
    ) as other:
        assert set(other.init_from(tmp_path / "run").begun.values()) == {"adagrad there, adam here"}


def test_what_the_command_tells_and_writes(parent, log_directory, capsys):
    path = log_directory / "child"
    words = (
        "train",
        log_directory / "config.toml",
        "--run",
        path,
        "--init-from",
        parent,
        "--set",
        "train.max_steps=3",
    )
    assert run(*words) == 0
    told = capsys.readouterr().err
    assert f"begins with {parent}/checkpoints/step-00000012: rows of user (" in told
    assert "optimizers of rows start again: user, item, tags (adagrad there, adam here)" in told
    assert json.loads((path / "summary.json").read_text())["init_from"].endswith("step-00000012")
    assert run(*words[:-1], "train.max_steps=5", "--resume") == 0  # what is there is gone on with
    told = capsys.readouterr().err
    assert "resumed from step-00000003" in told
    assert "begins with" not in told
    for words, message in (
        (
            ("--run", path, "--init-from", path),
            f"--init-from {path}: is the run itself; use --resume, or another --run",
        ),
        (
            ("--run", log_directory / "new", "--init-from", log_directory / "none"),
            "no such run or checkpoint directory",
        ),
        (("--run", log_directory / "new", "--init-from", log_directory), "holds no complete checkpoint"),
    ):
        assert run("train", log_directory / "config.toml", *words) == 2
        assert message in capsys.readouterr().err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        ("local", ()),
        ("synchronous", ("strategy.trainers=2",)),
        ("substitution", ("strategy.trainers=2",)),
        ("hybrid", ("strategy.trainers=2", "strategy.embedding_servers=2")),
        ("asynchronous", ("strategy.trainers=2",)),
        ("hierarchical", ("strategy.groups=2", "strategy.servers_per_group=1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_under_every_strategy(parent, log_directory, strategy, overrides):
    before = json.loads((parent / "summary.json").read_text())
    overrides += ("train.epochs=0", "sparse_optimizer.name=adagrad")
    path = log_directory / "child"
    summary = train(log_directory, strategy, path, *overrides, more=["--init-from", str(parent)])
    assert summary["strategy"] == strategy
    assert summary["auc"] == pytest.approx(before["auc"], abs=1e-6)
    assert summary["logloss"] == pytest.approx(before["logloss"], rel=1e-6)
    assert summary["num_rows"] == before["num_rows"]
    for key, (ids, values) in columns_of(latest(parent)).items():
        found = columns_of(latest(path))[key]
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_array_equal(found[1], values)


def day(number, rows=640):
    """Clicks of one day: some users come every day, others on this one alone."""
    rng = np.random.default_rng(number)
    user = np.where(np.arange(rows) % 2 == 0, rng.integers(0, 40, rows), 1000 * number + np.arange(rows) % 60)
    item = rng.integers(0, 30, rows)
    click = (rng.random(rows) < 0.1 + 0.8 * ((user + item) % 2 == 0)).astype(np.int64)
    return pa.table({"user": user, "item": item, "click": click})


def test_daily_training(tmp_path, capsys):
    """A file a day: new ids get rows, those that nobody has seen for longer than the TTL leave, over runs."""
    (tmp_path / "config.toml").write_text(
        """
[data]
train = "day-1.parquet"
test = "test.parquet"
batch_size = 64
shuffle = false
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[tables]]
name = "user"
eviction = { name = "ttl", steps = 14 }
[labels]
names = ["click"]
[model]
name = "fm"
[sparse_optimizer]
lr = 0.3
"""
    )
    pq.write_table(day(9), tmp_path / "test.parquet")
    aucs, users = [], []
    for number in (1, 2, 3):
        pq.write_table(day(number), tmp_path / f"day-{number}.parquet")
        words = ["train", tmp_path / "config.toml", "--run", tmp_path / f"run-{number}"]
        words += ["--init-from", tmp_path / f"run-{number - 1}"] if number > 1 else []
        assert run(*words, "--set", f"data.train=day-{number}.parquet") == 0
        aucs.append(json.loads((tmp_path / f"run-{number}" / "summary.json").read_text())["auc"])
        with girih.load(tmp_path / f"run-{number}") as model:
            users.append(set(model.table("user").ids.tolist()))
    every_day = set(range(40))
    of_day = [{1000 * number + n for n in range(60) if n % 2} for number in (1, 2, 3)]
    assert users[0] == every_day | of_day[0]
    assert users[1] == every_day | of_day[0] | of_day[1]  # 10 steps a day: day 1 is young enough
    assert users[2] == every_day | of_day[1] | of_day[2]  # and 20 steps old at the end of day 3
    assert aucs[0] < aucs[1] < aucs[2]

    assert (
        run("prune", tmp_path / "run-3", "--out", tmp_path / "small", "--max-age", 9, "--table", "user") == 0
    )
    with girih.load(tmp_path / "small") as model:
        assert set(model.table("user").ids.tolist()) == every_day | of_day[2]
