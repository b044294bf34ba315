"""Substitution against ``local``: every operator, model, optimizer and dense mode, 200 steps on 1 to 4 trainers.

Dropout and batch norm are off. Partial results are sums of fewer numbers, summed up in another order, so float32
numbers differ in their last bits, and optimizers carry that along; tolerances as of the other strategies.
"""

import pyarrow.parquet as pq
import pytest
from runs import difference
from scenes import SIZE, STEPS, log, play, play_all

ROWS, DENSE = 5e-6, 3e-5

CONFIG = f"""
[data]
train = "train.parquet"
valid = "valid.parquet"
test = "test.parquet"
batch_size = {SIZE}
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "x0"
kind = "numeric"
transform = ["log1p", "standardize"]
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[features]]
name = "history"
kind = "sequence"
table = "item"
pooling = "sum"
[[features]]
name = "tags"
kind = "categorical"
dim = 4
pooling = "mean"
[[features]]
name = "again"
kind = "categorical"
column = "user"
dim = 4
[[features]]
name = "x1"
kind = "numeric"
transform = "standardize"
[labels]
names = ["click"]
weight = "importance"
[model]
name = "dnn"
[dense_optimizer]
name = "adam"
lr = 0.003
[store]
shards = 2
[train]
seed = 3
clip_norm = 0.5
log_every_steps = 20
"""

MODELS = {
    "lr": 'name = "lr"',
    "fm": 'name = "fm"',
    "wide_deep": 'name = "wide_deep", hidden = [8]',
    "deepfm": 'name = "deepfm", hidden = [16, 8]',
    "dnn": 'name = "dnn", hidden = [8]',
    "dcn": 'name = "dcn", cross_layers = 3, hidden = [8]',
    "crosses": 'name = "dcn", cross_layers = 2, hidden = []',
    "dlrm": 'name = "dlrm", hidden = [8], bottom_hidden = [6]',
    "mmoe": 'name = "mmoe", expert_hidden = [8], tower_hidden = [4]',
}
FIRST_ORDER = 'first_order_optimizer = {name = "ftrl"}'
OPTIMIZERS = {
    "sgd": ['sparse_optimizer = {name = "sgd", lr = 0.3, momentum = 0.9}'],
    "adagrad": ['sparse_optimizer = {name = "adagrad", lr = 0.05}', FIRST_ORDER],
    "rowwise_adagrad": ['sparse_optimizer = {name = "rowwise_adagrad", lr = 0.05}', FIRST_ORDER],
    "adam": ['sparse_optimizer = {name = "adam", lr = 0.01, l2 = 0.001}', FIRST_ORDER],
    "ftrl": ['sparse_optimizer = {name = "ftrl"}'],
}
OF_MODEL = dict(zip(MODELS, ("ftrl", "adagrad", "adam", "adam", "sgd", "adagrad", "rowwise_adagrad", "adagrad", "adam"), strict=True))  # fmt: skip
OF_OPTIMIZER = {name: name for name in OPTIMIZERS}


def overrides(model, optimizer):
    return [f"model = {{{MODELS[model]}}}", *OPTIMIZERS[optimizer]]


def scene(model, optimizer, dense=None, **more):
    name = f"{model}-{optimizer}-{dense or 'local'}"
    made = {"name": name, "config": "wide", "overrides": overrides(model, optimizer), **more}
    if dense is not None:
        made |= {"strategy": "substitution", "options": [f'dense="{dense}"']}
    return made


PAIRS = list(OF_MODEL.items()) + [("deepfm", name) for name in OPTIMIZERS if name != "adam"]
DENSE_MODES = ("replicated", "split")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("substitution")
    start = 0
    for name, rows in (("train", STEPS * SIZE - 3), ("valid", 1001), ("test", 1001)):
        pq.write_table(log(rows, start), directory / f"{name}.parquet", row_group_size=700)
        start += rows
    (directory / "wide.toml").write_text(CONFIG)
    for model, optimizer in PAIRS:
        play(directory, scene(model, optimizer))
    return directory


@pytest.fixture(scope="module")
def played(directory):
    found = {}

    def on(num_trainers):
        if num_trainers not in found:
            scenes = [
                {**scene(m, o, dense), "name": f"{m}-{o}-{dense}-{num_trainers}"}
                for m, o in PAIRS
                for dense in DENSE_MODES
            ]
            found[num_trainers] = play_all(directory, scenes, num_trainers)
        return found[num_trainers]

    return on


@pytest.mark.parametrize("dense", DENSE_MODES)
@pytest.mark.parametrize(("model", "optimizer"), PAIRS)
@pytest.mark.parametrize(
    "num_trainers", [pytest.param(1, marks=pytest.mark.heavy), 2, pytest.param(3, marks=pytest.mark.heavy), 4]
)
def test_substitution_equals_local(directory, played, num_trainers, model, optimizer, dense):
    name = f"{model}-{optimizer}-{dense}-{num_trainers}"
    summary = played(num_trainers)[name]
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] == 0
    rows, parameters = difference(directory / f"{model}-{optimizer}-local", directory / name)
    assert rows < ROWS
    assert parameters < DENSE
