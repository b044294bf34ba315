"""Progressive validation of a local run beside a loop written by hand, which scores each batch before its update."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import girih
from girih import optim
from girih.metrics import Scores
from girih.models import LR
from girih.runs.directory import TRAINED, TrainedMark

SIZE, NUM, RATE = 32, 1000, 0.5
SCHEMA = girih.Schema(
    [girih.Categorical(name="user"), girih.Categorical(name="item"), girih.Numeric(name="price")], "click"
)


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(4)
    user, item = rng.integers(0, 30, NUM), rng.integers(0, 10, NUM)
    click = rng.random(NUM) < 0.2 + 0.5 * (user % 2)
    return {"user": user, "item": item, "price": rng.random(NUM), "click": click.astype(np.int8)}


@pytest.fixture
def data(columns, tmp_path):
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    return girih.read_parquet(tmp_path / "train.parquet", SCHEMA, batch_size=SIZE)


def trainer_in(run, **schedule):
    return girih.Trainer(
        LR(SCHEMA),
        sparse_optimizer=optim.SGD(lr=RATE),
        dense_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        options=girih.TrainOptions(progressive_validation=True, log_every_steps=4),
        schedule=girih.ScheduleOptions(**schedule),
        run=run,
    )


def by_hand(columns):
    """Logits [NUM] of a logistic regression by SGD, each batch's before its update."""
    weights = {"user": np.zeros(30), "item": np.zeros(10)}
    bias, slope, logits = 0.0, 0.0, []
    for begin in range(0, NUM, SIZE):
        batch = {name: values[begin : begin + SIZE] for name, values in columns.items()}
        logit = bias + slope * batch["price"] + sum(weights[name][batch[name]] for name in weights)
        logits.append(logit)
        gradient = (1 / (1 + np.exp(-logit)) - batch["click"]) / len(logit)
        bias -= RATE * gradient.sum()
        slope -= RATE * gradient @ batch["price"]
        for name, values in weights.items():
            np.subtract.at(values, batch[name], RATE * gradient)
    return np.concatenate(logits)


def exact(columns, num_examples=NUM):
    scores = Scores()
    scores.add(by_hand(columns)[:num_examples].astype(np.float32), columns["click"][:num_examples])
    return scores.result(["click"])


def records_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record.get("split") == "progressive"]


@pytest.mark.parametrize("micro_batches", [1, 2, "auto"])
def test_scores_are_those_of_a_loop_by_hand_and_passes_that_measure_count_nothing(
    columns, data, tmp_path, micro_batches
):
    with trainer_in(tmp_path / "run", micro_batches=micro_batches) as trainer:
        trainer.fit(data)
        told = trainer.summary(None, duration_s=0.0)["progressive"]["click"]
    expected = exact(columns)
    assert 0.6 < expected.auc < 0.9
    assert abs(told["auc"] - expected.auc) <= told["auc_error"] < 0.01
    assert told["logloss"] == pytest.approx(expected.logloss, rel=1e-5)
    assert told["num_examples"] == told["num_examples_last_hour"] == NUM
    records = records_of(tmp_path / "run")
    assert [record["num_examples"] for record in records] == [*range(4 * SIZE, NUM, 4 * SIZE), NUM]
    for record in records:
        so_far = exact(columns, record["num_examples"])
        assert abs(record["auc"] - so_far.auc) <= record["auc_error"]
        assert record["logloss"] == pytest.approx(so_far.logloss, rel=1e-5)


def test_a_resumed_run_goes_on_with_the_counts_of_the_whole_and_begins_the_hour_anew(columns, data, tmp_path):
    with trainer_in(tmp_path / "run") as trainer:
        trainer.fit(data)
    with trainer_in(tmp_path / "run") as trainer:
        trainer.load(tmp_path / "run")
        trainer.fit(data)
        told = trainer.summary(None, duration_s=0.0)["progressive"]["click"]
    assert (told["num_examples"], told["num_examples_last_hour"]) == (2 * NUM, NUM)


def test_examples_read_again_are_counted_once_however_often_a_run_begins_again(data, tmp_path):
    run = tmp_path / "run"
    with trainer_in(run) as trainer:
        trainer.fit(data)
    mark = TrainedMark(run / TRAINED)  # as a crash would leave it, 500 examples behind the checkpoint
    mark.write(NUM + 500, 0)
    mark.close()
    for _ in range(2):
        with trainer_in(run) as trainer:
            trainer.load(run)
            trainer.fit(data, epochs=0)
            assert trainer.summary(None, duration_s=0.0)["repeated_examples"] == 500
