"""What is probably not meant is said in one line, and the run goes on; or it is refused where it cannot be meant."""

import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih import cli
from girih.errors import RunDirectoryError
from girih.report.text import fraction


@pytest.fixture
def train(log_directory, capfd):
    """Trains into ``run`` and returns the status and what was said."""

    def train(*more, run="run"):
        words = ["train", str(log_directory / "config.toml"), "--run", str(log_directory / run), *more]
        status = cli.run(words)
        shown = capfd.readouterr()
        return status, shown.out + shown.err

    return train


def rewrite(path, **columns):
    table = pq.read_table(path)
    for name, make in columns.items():
        column = pa.array(make(table.num_rows), table.schema.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, path)


def test_labels_that_never_change(train, log_directory):
    for name in ("train", "valid"):
        rewrite(log_directory / f"{name}.parquet", click=lambda rows: [0] * rows)
    status, said = train("--set", "train.epochs=2")
    assert status == 0
    assert said.count("label 'click' is 0 in all 3,000 training examples: there is nothing to learn\n") == 1
    valid = log_directory / "valid.parquet"
    assert said.count(f"label 'click' is 0 in all 1,000 examples of {valid}: AUC is not defined\n") == 1
    assert "test.parquet: AUC" not in said


def test_an_epoch_of_one_step(train):
    status, said = train("--set", "data.batch_size=5000")
    assert status == 0
    assert "batch_size = 5,000: an epoch is one step; smaller steps learn more\n" in said


def test_a_usual_run_says_nothing(train):
    status, said = train()
    assert status == 0
    for word in ("nothing to learn", "not defined", "one step", "have no row", "nothing to resume"):
        assert word not in said


TWO = ("--strategy", "synchronous", "--set", "strategy.trainers=2")


@pytest.mark.parametrize("more", [(), pytest.param(TWO, marks=pytest.mark.heavy)])
def test_ids_that_were_not_trained(train, log_directory, more):
    rewrite(log_directory / "test.parquet", user=lambda rows: range(10**12, 10**12 + rows))
    status, said = train(*more)
    assert status == 0
    lines = [line for line in said.splitlines() if "have no row" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{log_directory / 'test.parquet'}: ")
    assert (
        "% of the ids have no row and read initial values; are they new, or encoded differently" in lines[0]
    )


def test_a_feature_that_holds_the_label(train, log_directory):
    for path in log_directory.glob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.append_column("rating", table["click"]), path)
    text = (log_directory / "config.toml").read_text()
    leak = '[[features]]\nname = "leak"\nkind = "numeric"\ncolumn = "rating"\n\n[labels]'
    (log_directory / "config.toml").write_text(text.replace("[labels]", leak))
    status, said = train("--set", "dense_optimizer.lr=0.1", "--set", "train.epochs=5")
    assert status == 0, said
    assert len(re.findall(r"AUC (0\.999|1\.0)\d+: does a feature hold the label", said)) == 1


def test_scripts_get_them_as_warnings_of_a_logger(log_directory, caplog):
    schema = girih.Schema.load(log_directory / "config.toml")
    data = girih.read_parquet(log_directory / "train.parquet", schema, batch_size=4096)
    with girih.Trainer(girih.models.LR(schema)) as trainer:
        trainer.fit(data)
    records = [r for r in caplog.records if r.name.startswith("girih.") and "kernels" not in r.getMessage()]
    assert [(r.levelno, r.getMessage().partition(":")[0]) for r in records] == [
        (logging.WARNING, "batch_size = 4,096")
    ]


def test_resume_without_a_checkpoint(train, log_directory):
    status, said = train("--resume", run="none")
    assert status == 0
    assert f"nothing to resume in {log_directory / 'none'}; starting afresh\n" in said


def test_a_finished_run_with_other_options(train):
    assert train()[0] == 0
    assert "other options" not in train("--resume")[1]
    status, said = train("--resume", "--set", "model.hidden=[3]", "--set", "sparse_optimizer.lr=0.5")
    assert status == 0
    line = next(line for line in said.splitlines() if "without effect on a finished run: " in line)
    assert line.partition("run: ")[2].startswith("model.hidden ")
    assert " → [3], sparse_optimizer.lr " in line
    assert line.endswith(" → 0.5")


def test_a_run_that_is_resumed_with_other_options_names_them_on_a_line(train):
    assert train("--set", "data.batch_size=250", "train.epochs=1")[0] == 0
    status, said = train("--resume", "--set", "data.batch_size=500", "train.epochs=2")
    assert status == 0
    told = "resumed with other options: data.batch_size 250 → 500, train.epochs 1 → 2\n"
    assert said.count("resumed with other options") == said.count(told) == 1
    assert "other options" not in train("--resume", "--set", "data.batch_size=500", "train.epochs=2")[1]


def test_no_epochs_are_told(train):
    status, said = train("--set", "train.epochs=0")
    assert status == 0
    assert "train.epochs = 0: nothing is trained; metrics are those of its initial weights\n" in said
    assert "train.epochs = 0" not in train(run="other")[1]


@pytest.mark.parametrize("address", ["memory://runs/a", "s3://bucket/run"])
def test_a_run_directory_is_local(log_directory, capsys, monkeypatch, address):
    monkeypatch.chdir(log_directory)
    before = sorted(log_directory.iterdir())
    assert cli.run(["train", "config.toml", "--run", address]) == 2
    told = capsys.readouterr().err
    scheme = address.partition(":")[0]
    assert (
        f"girih: {scheme}://…: a run directory is local; name one, and set checkpoint.dir to an address"
        in told
    )
    schema = girih.Schema.load(log_directory / "config.toml")
    with pytest.raises(RunDirectoryError, match="a run directory is local"):
        girih.Trainer(girih.models.LR(schema), run=address)
    assert sorted(log_directory.iterdir()) == before


def test_labels_that_are_words(train, log_directory):
    table = pq.read_table(log_directory / "train.parquet", columns=["user", "item", "click"])
    lines = [f"{row['user']},{row['item']},{'yes' if row['click'] else 'no'}" for row in table.to_pylist()]
    (log_directory / "words.csv").write_text("\n".join(["user,item,click", *lines]) + "\n")
    (log_directory / "config.toml").write_text(
        'data = { format = "csv", train = "words.csv", batch_size = 128 }\nmodel = { name = "lr" }\n'
        'features = [{ name = "user", kind = "categorical" }, { name = "item", kind = "categorical" }]\n'
        '[labels]\nnames = ["click"]\n'
    )
    status, said = train()
    assert status == 2
    hint = """derive = { click = "click == 'yes'" }"""
    assert said.rstrip().endswith(f": expected a label in [0, 1]; derive it, as in {hint}")
    with (log_directory / "config.toml").open("a") as config:
        config.write(f"{hint}\n")
    assert train()[0] == 0


@pytest.mark.parametrize("weight", [1.0, 1e38])
def test_weights_whose_sum_float32_cannot_hold(log_directory, weight):
    path = log_directory / "train.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("importance", pa.array([weight] * table.num_rows)), path)
    schema = girih.Schema.load(log_directory / "config.toml")
    labels = girih.Labels(names=("click",), weight="importance")
    losses = []

    class Losses(girih.Callback):
        def on_metrics(self, record):
            losses.append(record["loss"])

    options = girih.TrainOptions(epochs=2, log_every_steps=8)
    schema = girih.Schema(schema.features, labels)
    with girih.Trainer(
        girih.models.LR(schema),
        sparse_optimizer=girih.optim.Adagrad(lr=0.1),
        options=options,
        callbacks=[Losses()],
    ) as trainer:
        trainer.fit(girih.read_parquet(path, schema, batch_size=256))
    assert losses[-1] < losses[0] - 0.005


def test_large_losses_are_short():
    assert fraction(3481557479680824921242776519124713472.0) == "3.5e36"
    assert fraction(-1e6) == "-1.0e6"
    assert fraction(123456.7) == "123456.70000"
