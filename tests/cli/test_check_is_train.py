"""``girih check`` refuses what ``girih train`` refuses before its first step, and nothing else."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from girih import cli
from girih.errors import DataError

ROWS = 600
CONFIG = """
[data]
train = "a.parquet"
batch_size = 100
[defaults]
dim = 4
[[features]]
name = "user"
kind = "categorical"
[[features]]
name = "price"
kind = "numeric"
[labels]
names = ["click"]
[model]
name = "dnn"
hidden = [4]
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(5)
    table = {"user": rng.integers(0, 40, ROWS), "price": rng.random(ROWS), "click": rng.integers(0, 2, ROWS)}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    late = table | {"price": np.where(np.arange(ROWS) == 550, np.nan, table["price"])}
    pq.write_table(pa.table(late), tmp_path / "late.parquet", row_group_size=100)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def statuses(folder, capsys, *overrides):
    """The statuses of check and of train, and the lines that they end with."""
    sets = [word for override in overrides for word in ("--set", override)]
    found = []
    for command in (["check"], ["train", "--run", str(folder / "run")]):
        capsys.readouterr()
        words = [command[0], str(folder / "config.toml"), *command[1:], *sets, "--set", "train.max_steps=1"]
        status = cli.run(words)
        lines = capsys.readouterr().err.strip().splitlines()
        found.append((status, lines[-1] if status and lines else ""))
    return found


TRAINS = {
    "as it is": [],
    "numbers alone": ["features=[{name='price', kind='numeric'}]"],
    "standardized numbers alone": ["features=[{name='price', kind='numeric', transform='standardize'}]"],
    "numbers alone, deepfm": [
        "features=[{name='price', kind='numeric'}]",
        "model={name='deepfm', hidden=[4]}",
    ],
    "fm of numbers": ["features=[{name='price', kind='numeric'}]", "model={name='fm'}"],
    "values on an SSD": ["store={tiers=['dram', 'ssd'], hot_rows=10}"],
    "a bad row that is skipped": ["data.train='late.parquet'", "data.on_bad_row='skip'"],
    "validation": ["data.valid='a.parquet'", "train.early_stopping={metric='auc', patience=1}"],
    "micro-batches": ["schedule.micro_batches=2"],
    "a schedule": ["train.lr_schedule={name='StepLR', step_size=1}"],
    "ftrl": ["sparse_optimizer={name='ftrl', lr=0.1}"],
}
REFUSED = {
    "nothing to stop by": ["train.early_stopping={metric='auc', patience=1}"],
    "another metric": ["data.valid='a.parquet'", "train.early_stopping={metric='mae', patience=1}"],
    "groups of no feature": ["train.gauc_by='nobody'"],
    "negatives without a loss for them": [
        "negatives={items='a.parquet', features=['user'], per_step=4}"
    ],
    "a bad row at the end of what is standardized": [
        "data.train='late.parquet'", "data.shuffle=false", "features.price.transform='standardize'"
    ],
    "a bad row in the first window": ["data.train='late.parquet'"],
    "a schedule that torch does not know": ["train.lr_schedule={name='StepsLR'}"],
    "a schedule without its option": ["train.lr_schedule={name='StepLR'}"],
    "an optimizer's option": ["dense_optimizer={name='adam', beta=0.5}"],
    "an SSD that is a file": ["store={tiers=['dram', 'ssd'], ssd_dir='a.parquet', hot_rows=10}"],
    "a label that is none": ["labels.names=['price2']"],
    "validation without a column": ["data.valid='b.parquet'"],
    "din without sequences": ["model={name='din', hidden=[4], attention={user='user'}}"],
    "integers in the forward pass with bfloat16": ["train.dense_forward='int8'", "train.precision='bfloat16'"],
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINS)
def test_what_trains_passes(folder, capsys, name):
    assert statuses(folder, capsys, *TRAINS[name]) == [(0, ""), (0, "")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_first_step_is_refused_alike(folder, capsys, name):
    (status, told), (of_train, told_by_train) = statuses(folder, capsys, *REFUSED[name])
    assert status == of_train == 2, (told, told_by_train)
    assert told == told_by_train


def test_several_processes_are_checked_as_far_as_one_can(folder, capsys):
    for strategy in ("hybrid", "synchronous"):
        assert cli.run(["check", str(folder / "config.toml"), "--strategy", strategy]) == 0
    capsys.readouterr()
    bad = ["--set", "data.train='late.parquet'", "--set", "features.price.transform='standardize'"]
    assert cli.run(["check", str(folder / "config.toml"), "--strategy", "hybrid", *bad]) == 2
    assert "late.parquet, row 551" in capsys.readouterr().err


def test_check_writes_nothing(folder, capsys):
    before = sorted(folder.rglob("*"))
    assert cli.run(["check", str(folder / "config.toml"), "--set", "train.tensorboard=true"]) == 0
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(("batch_size", "steps"), [(100, 6), (90, 7), (599, 2), (600, 1)])
def test_steps_of_an_epoch_are_counted_to_the_last(folder, capsys, batch_size, steps):
    assert cli.run(["check", str(folder / "config.toml"), "--set", f"data.batch_size={batch_size}"]) == 0
    assert re.search(rf"an epoch has about {steps} steps?:", capsys.readouterr().out)


def test_raw_large_numbers_are_noted(folder, capsys):
    table = pq.read_table(folder / "a.parquet").drop_columns("price")
    pq.write_table(table.append_column("price", pa.array([1.6e9] * ROWS)), folder / "a.parquet")
    assert cli.run(["check", str(folder / "config.toml")]) == 0
    assert "feature 'price' reaches 1.6e+09: transform = " in capsys.readouterr().out


def test_a_value_where_a_sequence_belongs_is_refused_by_predict(folder):
    import girih

    table = pa.table({"hist": [[1, 2], [3]] * 40, "user": [1, 2] * 40, "click": [0, 1] * 40})
    features = [girih.Sequence(name="hist", dim=4), girih.Categorical(name="user", dim=4)]
    schema = girih.Schema(features, "click")
    with girih.Trainer(girih.models.create("dnn", schema, {"hidden": [4]}), run=folder / "run") as trainer:
        trainer.fit(girih.read_arrow(table, schema), epochs=1)
    with girih.load(folder / "run") as model:
        assert model.predict({"hist": [1, 2], "user": 1}).shape == (1,)
        assert model.predict({"hist": [[1], []], "user": [1, 2]}).shape == (2,)
        assert model.predict({"hist": None, "user": 1}).shape == (1,)
        for value in ("1 2", 3, ["1 2", "3"]):
            with pytest.raises(DataError, match=r"feature 'hist' is a sequence; expected a list of ids"):
                model.predict({"hist": value, "user": [1] * len(value) if isinstance(value, list) else 1})


def test_a_letter_cut_in_two_is_an_id_for_check_too(folder, capsys):
    words = ["红".encode(), "红".encode()[:-1]] * 100
    lines = [b"user,click\n", *(word + b",%d\n" % (place % 3 == 0) for place, word in enumerate(words))]
    (folder / "a.csv").write_bytes(b"".join(lines))
    sets = ["data.format='csv'", "data.train='a.csv'", "features=[{name='user', kind='categorical'}]"]
    assert statuses(folder, capsys, *sets) == [(0, ""), (0, "")]


def test_one_missing_time_is_counted_as_one(folder, capsys):
    times = ["", *map(str, range(1_700_000_000, 1_700_000_199))]
    (folder / "a.csv").write_text(
        "user,t,click\n" + "".join(f"{place % 7},{t},{place % 2}\n" for place, t in enumerate(times))
    )
    sets = ["data.format='csv'", "data.train='a.csv'", "features=[{name='user', kind='categorical'}]"]
    (status, told), (of_train, of_told) = statuses(folder, capsys, *sets, "data.split={by='t', valid=0.1}")
    assert (status, told) == (of_train, of_told)
    assert "1 of 200 rows read together have no number or time" in told
