"""Substitution against ``local``: every operator, model, optimizer and dense mode, on 1 to 4 trainers.

Dropout and batch norm are off. Partial results are sums of fewer numbers, summed up in another order, so float32
numbers differ in their last bits, and optimizers carry that along; tolerances are those of the other strategies.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest
import torch
from running import Running
from scenes import SIZE, STEPS, counted, log, play, play_all

from girih.checkpoint import Manifest, Storage
from girih.cli import run as girih
from runs import difference, latest

ROWS, DENSE = 2e-5, 3e-5
ROWS_OF = {"two_tower": 1e-4}
"""Where one number needs more: in a row of ``user`` the terms of a gradient cancel to 1.6e-9, sixteen times Adagrad's eps, so that their
rounding is in the step. All others of that run differ by 2e-7, and ``local`` from itself by 7e-5 when its batch is cut in two."""
TESTED = 501
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
FEATURES = {
    "user": ("user", "user"),
    "item": ("item", "item"),
    "history": ("history", "item"),
    "tags": ("tags", "tags"),
    "again": ("user", "again"),
}
"""The column and the table of each feature."""
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
    "xdeepfm": 'name = "xdeepfm", cin_layers = [4, 3], split_half = true, hidden = [8]',
    "two_tower": 'name = "two_tower", user = ["user", "x0", "tags", "again"], tower_dim = 4, hidden = [8]',
    "din": 'name = "din", hidden = [8], attention_hidden = [4], attention = {history = "user"}',
}
FIRST_ORDER = 'first_order_optimizer = {name = "ftrl"}'
OPTIMIZERS = {
    "sgd": ['sparse_optimizer = {name = "sgd", lr = 0.3, momentum = 0.9}'],
    "adagrad": ['sparse_optimizer = {name = "adagrad", lr = 0.05}', FIRST_ORDER],
    "rowwise_adagrad": ['sparse_optimizer = {name = "rowwise_adagrad", lr = 0.05}', FIRST_ORDER],
    "adam": ['sparse_optimizer = {name = "adam", lr = 0.01, l2 = 0.001}', FIRST_ORDER],
    "ftrl": ['sparse_optimizer = {name = "ftrl"}'],
}
OF_MODEL = dict(zip(MODELS, ("ftrl", "adagrad", "adam", "adam", "sgd", "adagrad", "rowwise_adagrad", "adagrad", "adam", "adam", "adagrad", "adam"), strict=True))  # fmt: skip


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
FEW_TRAINERS = 3
"""All fast tests train on these."""
QUICK = {("deepfm", "adam"), ("dlrm", "adagrad")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("substitution")
    start = 0
    for name, rows in (("train", STEPS * SIZE - 3), ("valid", 1001), ("test", TESTED)):
        pq.write_table(log(rows, start), directory / f"{name}.parquet", row_group_size=700)
        start += rows
    (directory / "wide.toml").write_text(CONFIG)
    play(directory, {**DENSE_ADAGRAD, "strategy": "local", "name": "dense-adagrad-local"})
    return directory


@pytest.fixture(scope="module")
def played(directory):
    """The summaries of some scenes on so many trainers, played once."""
    found = {}

    def on(num_trainers, quick):
        if (num_trainers, quick) not in found:
            for model, optimizer in PAIRS:
                if ((model, optimizer) in QUICK) == quick and not (
                    directory / f"{model}-{optimizer}-local"
                ).exists():
                    play(directory, scene(model, optimizer))
            scenes = [
                {**scene(m, o, dense), "name": f"{m}-{o}-{dense}-{num_trainers}"}
                for m, o in PAIRS
                for dense in DENSE_MODES
                if ((m, o) in QUICK) == quick and (num_trainers, m) != (4, "din")
            ]
            found[num_trainers, quick] = play_all(directory, scenes, num_trainers)
        return found[num_trainers, quick]

    return on


HEAVY = [pytest.mark.heavy, pytest.mark.timeout(1200)]  # the first of each number of trainers plays for all
CASES = [
    pytest.param(n, m, o, marks=[] if n == FEW_TRAINERS and (m, o) in QUICK else HEAVY)
    for n in (1, 2, 3, 4)
    for m, o in PAIRS
    if (n, m) != (4, "din")  # whose history and target join two of the four tables
]


@pytest.mark.parametrize("dense", DENSE_MODES)
@pytest.mark.parametrize(("num_trainers", "model", "optimizer"), CASES)
def test_substitution_equals_local(directory, played, num_trainers, model, optimizer, dense):
    name = f"{model}-{optimizer}-{dense}-{num_trainers}"
    summary = played(num_trainers, (model, optimizer) in QUICK)[name]
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] == 0
    assert summary["features"] == counted(directory, {name: FEATURES[name] for name in summary["features"]})
    assert summary["features"].keys() >= {"user", "item", "history", "again"}
    rows, parameters = difference(directory / f"{model}-{optimizer}-local", directory / name)
    assert rows < ROWS_OF.get(model, ROWS)
    assert parameters < DENSE


SHORT_STEPS = "train.max_steps = 20"
DROPOUT = [
    'model = {name = "deepfm", hidden = [16, 8], dropout = 0.5, batch_norm = true}',
    SHORT_STEPS,
]
DENSE_ADAGRAD = {
    "name": "dense-adagrad",
    "config": "wide",
    "strategy": "substitution",
    "overrides": [*overrides("fm", "adagrad"), 'dense_optimizer = {name = "adagrad", lr = 0.01}'],
}
LAMB = [*overrides("deepfm", "adam"), 'dense_optimizer = {name = "lamb", lr = 0.01}', SHORT_STEPS]
NORMED = [
    'model = {name = "deepfm", hidden = [16, 8], batch_norm = true}',
    'dense_optimizer = {name = "sgd", lr = 0.1}',
    "train.global_batch_norm = true",
    SHORT_STEPS,
]
FEW = [*overrides("dlrm", "adagrad"), "data.batch_size = 2", SHORT_STEPS]
SHORT = ("lr", "fm", "wide_deep")
THREE_TRAINERS = [
    DENSE_ADAGRAD,
    *(
        {**scene(m, OF_MODEL[m], dense), "name": f"short-{m}-{dense}", "overrides": [*overrides(m, OF_MODEL[m]), SHORT_STEPS]}
        for m in SHORT
        for dense in DENSE_MODES
    ),
    {**scene("dlrm", "adagrad", "split"), "name": "few", "overrides": FEW},
    *(
        {**scene("deepfm", "adam", dense), "name": f"{name}-{dense}", "overrides": words}
        for name, words in (("lamb", LAMB), ("normed", NORMED))
        for dense in DENSE_MODES
    ),
    {"name": "alike", "config": "wide", "strategy": "substitution", "overrides": DROPOUT, "tell": True,
     "options": ['dense="replicated"']},
    {**scene("dlrm", "adagrad", "split"), "name": "by-user", "tell": True,
     "overrides": [*overrides("dlrm", "adagrad"), "train.gauc_by = 'user'"]},
    {**scene("deepfm", "adagrad", "split"), "name": "halved",
     "options": ['dense="split"', 'wire_partials="bfloat16"']},
    {**scene("deepfm", "adagrad", "replicated"), "name": "halved-too",
     "options": ['dense="replicated"', 'wire_partials="bfloat16"', 'placement="modulo"']},
]  # fmt: skip


@pytest.fixture(scope="module")
def three(directory):
    return play_all(directory, THREE_TRAINERS, 3)


@pytest.mark.parametrize("model", SHORT)
def test_three_trainers_equal_local(directory, three, model):
    words = [*overrides(model, OF_MODEL[model]), SHORT_STEPS]
    local = play(directory, {"name": f"short-{model}", "config": "wide", "overrides": words})
    for dense in DENSE_MODES:
        assert three[f"short-{model}-{dense}"]["dense_parameters"] == local["dense_parameters"] > 0
        assert three[f"short-{model}-{dense}"]["steps"] == 20
        rows, parameters = difference(directory / f"short-{model}", directory / f"short-{model}-{dense}")
        assert rows < ROWS
        assert parameters < DENSE


def test_copies_of_the_upper_network_stay_equal_under_dropout(three):
    first, *others = (reported["shared"] for reported in three["alike"]["told"])
    assert others == [first, first]


def test_a_replicated_network_draws_the_masks_of_one_process(directory, three):
    play(directory, {"name": "alike-local", "config": "wide", "overrides": DROPOUT})
    rows, _ = difference(directory / "alike-local", directory / "alike")
    assert (
        rows < ROWS
    )  # of parameters, biases before batch norm have no gradient but noise, which Adam scales up


def test_split_parameters_take_their_part_of_initial_optimizer_state(directory, three):
    assert three["dense-adagrad"]["steps"] == STEPS
    rows, parameters = difference(directory / "dense-adagrad-local", directory / "dense-adagrad")
    assert rows < ROWS
    assert parameters < DENSE


def test_trainers_whose_share_is_empty_take_part(directory, three):
    play(directory, {**scene("dlrm", "adagrad"), "name": "few-local", "overrides": FEW})
    assert three["few"]["plan"]["dense"] == "split"
    rows, parameters = difference(directory / "few-local", directory / "few")
    assert rows < ROWS
    assert parameters < DENSE


@pytest.mark.parametrize(("name", "words"), [("lamb", LAMB), ("normed", NORMED)], ids=["lamb", "normed"])
def test_norms_of_whole_parameters_and_moments_of_whole_batches_are_those_of_local(
    directory, three, name, words
):
    play(directory, {"name": f"{name}-local", "config": "wide", "overrides": words})
    for dense in DENSE_MODES:
        assert three[f"{name}-{dense}"]["steps"] == 20
        rows, parameters = difference(directory / f"{name}-local", directory / f"{name}-{dense}")
        assert rows < ROWS
        assert parameters < DENSE


def test_every_column_is_read_by_one_trainer_and_all_predict_the_same(three):
    for name in ("alike", "by-user"):
        reported = three[name]["told"]
        columns = [column for each in reported for column in each["columns"]]
        assert sorted(columns) == sorted(["user", "x0", "item", "history", "tags", "again", "x1"])
        assert sum(each["rows"] for each in reported) == three[name]["num_rows"]
        assert reported[0]["predicted"] == reported[1]["predicted"] == reported[2]["predicted"]
        owners = three[name]["plan"]["owners"]
        assert owners["item"] == owners["history"]
        assert all(column in reported[owners[column]]["columns"] for column in columns)


def test_metrics_are_those_of_one_process(directory, three):
    local = play(directory, {**scene("dlrm", "adagrad"), "name": "by-user-local", "load": "by-user",
                             "overrides": [*overrides("dlrm", "adagrad"), "train.gauc_by = 'user'"]})  # fmt: skip
    compared = {k: v for k, v in local["by_label"]["click"].items() if isinstance(v, float | int)}
    assert {"auc", "logloss", "gauc", "calibration"} <= compared.keys()
    for name, value in compared.items():
        assert three["by-user"]["by_label"]["click"][name] == pytest.approx(value, abs=1e-6), name


def test_partial_results_in_half_precision_take_half_the_bytes_and_stay_close(directory, three):
    exact = play(directory, {**scene("deepfm", "adagrad"), "name": "exact"})
    for name in ("halved", "halved-too"):
        assert 0 < abs(three[name]["auc"] - exact["auc"]) < 0.005
        assert 0 < abs(three[name]["logloss"] - exact["logloss"]) < 0.005
        columns = 1 + (4 + 1) + 16  # first order, second order, first layer: each around a ring of three
        num_examples = three[name]["num_examples"] + TESTED
        assert three[name]["wire_bytes"]["partials"] == pytest.approx(
            3 * 2 * 2 / 3 * columns * 2 * num_examples, rel=1e-3
        )


@pytest.mark.slow
def test_bytes_on_the_wire_are_those_of_the_plan(played):
    """Of two trainers, whose shares are equal."""
    for model, optimizer in QUICK:
        for dense in DENSE_MODES:
            summary = played(2, True)[f"{model}-{optimizer}-{dense}-2"]
            planned, num_examples = summary["plan"]["bytes"], summary["num_examples"]
            partials = 2 * planned["partials"] / SIZE * (num_examples + TESTED)
            assert summary["wire_bytes"]["partials"] == pytest.approx(partials, rel=1e-3)
            assert summary["wire_bytes"]["dense"] == pytest.approx(2 * planned["dense"] * STEPS, rel=1e-3)
            assert (planned["dense"] > 0) == (dense == "split")


@pytest.mark.parametrize(
    ("strategy", "num_trainers"),
    [
        ("local", 1),
        ("substitution", 3),
        pytest.param("substitution", 2, marks=pytest.mark.slow),
        pytest.param("synchronous", 2, marks=pytest.mark.heavy),
    ],
)
def test_a_checkpoint_of_three_trainers_loads_under_any_strategy(directory, three, strategy, num_trainers):
    name = f"loaded-{strategy}-{num_trainers}"
    loaded = {**scene("dlrm", "adagrad"), "name": name, "load": "by-user", "strategy": strategy}
    if num_trainers == 1:
        play(directory, loaded)
    else:
        play_all(directory, [loaded], num_trainers)
    assert difference(directory / "by-user", directory / name) == (0, 0)


@pytest.mark.heavy
def test_a_run_resumes_after_a_killed_trainer_has_ended_it(directory, tmp_path):

    words = [
        "train.max_steps=60",
        "checkpoint.every_steps=10",
        "strategy.dense='split'",
        "strategy.trainers=2",
        *overrides("deepfm", "adam"),
    ]
    slow = [*words, "train.max_steps=1000000", "train.epochs=1000000", "cluster.max_restarts=0"]
    run = tmp_path / "killed"
    running = Running(in_wide(directory, run, *slow))
    running.until_it_trains()
    while not list((run / "checkpoints").glob("step-*")):
        time.sleep(0.05)
    victim = [p for p in json.loads((run / "processes.json").read_text()) if p["role"] == "trainer"][-1]
    os.kill(victim["pid"], signal.SIGKILL)
    reported = running.ends(1)
    assert "trainer 1 was killed by signal 9" in reported
    assert f"with: girih train {run}/config.toml --run {run} --resume" in reported
    assert not (run / "processes.json").exists()
    assert "Traceback" not in reported
    at = int(latest(run).name.removeprefix("step-"))
    last = [f"train.max_steps={at + 7}", "train.epochs=1000000"]
    whole = {**scene("deepfm", "adam", "split"), "name": "whole"}
    whole["overrides"] += last
    found = play_all(directory, [whole, {**whole, "name": "gone-on", "load": run}], 2)
    assert difference(directory / "gone-on", directory / "whole") == (0, 0)
    assert found["whole"]["plan"]["dense"] == "split"
    assert found["gone-on"]["wire_bytes"]["dense"] > 0


@pytest.mark.heavy
def test_a_resumed_run_keeps_the_choice_of_auto(directory, tmp_path):
    words = ["strategy.trainers=2", *overrides("deepfm", "adam"), "train.max_steps=3"]
    done = subprocess.run(in_wide(directory, tmp_path, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "features by trainer: 0 " in done.stderr
    first = json.loads((tmp_path / "summary.json").read_text())["plan"]
    place = Storage.at(latest(tmp_path))
    written = Manifest.read(place)
    plan = written.plan
    assert plan["schedule"]["upper_network"] == plan["predicted"]["dense"] == first["dense"]
    other = {"split": ("replicated", "alike"), "replicated": ("split", "per_rank")}[first["dense"]]
    plan["schedule"]["upper_network"], plan["seeds"]["dropout"] = (
        other  # what is kept decides, not another measurement
    )
    plan["predicted"]["dense"] = other[0]
    written.write(place)
    again = in_wide(directory, tmp_path, *words, "train.max_steps=6")
    done = subprocess.run([*again, "--resume"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    second = json.loads((tmp_path / "summary.json").read_text())["plan"]
    assert second["dense"] != first["dense"]
    assert second["owners"] == first["owners"]


def in_wide(directory, run, *words):
    made = [sys.executable, "-m", "girih", "train", str(directory / "wide.toml"), "--run", str(run)]
    return [*made, "--strategy", "substitution", *(word for each in words for word in ("--set", each))]


WRONG = [
    pytest.param(
        ['model = {name = "dcnv2"}'],
        "DCNv2: MatrixCross needs all columns of the layer before it",
        marks=pytest.mark.heavy,
    ),
    pytest.param(
        ["strategy.trainers = 5", 'model = {name = "lr"}'],
        "5 trainers, but 4 tables, which cannot be split",
        marks=pytest.mark.heavy,
    ),
    pytest.param(
        ["data.on_bad_row = 'skip'"],
        "each trainer reads only its own columns and does not know which rows others skip",
        marks=pytest.mark.slow,
    ),
    (
        ["strategy.dense = 'splitt'"],
        "[strategy] dense = 'splitt': expected one of 'auto', 'replicated', 'split'",
    ),
    pytest.param(["strategy.placement = 'best'"], "placement = 'best'", marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("change", "reported"), WRONG)
def test_options_that_cannot_be_substituted_are_refused(directory, tmp_path, change, reported):
    words = in_wide(directory, tmp_path / "run", "strategy.trainers = 2", *change)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert reported in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ('name = "dcnv2"', "DCNv2: MatrixCross needs all columns of the layer before it"),
        ('name = "dien", attention = {history = "user"}', "DIEN: it reads histories by layers that are not"),
    ],
)
def test_a_model_that_cannot_be_substituted_is_refused_on_one_trainer_too(
    directory, tmp_path, capsys, model, reason
):
    words = in_wide(directory, tmp_path / "run", f"model = {{{model}}}")
    assert girih(words[3:]) == 2
    reported = capsys.readouterr().err
    assert reason in reported
    assert len(reported.strip().splitlines()) == 1


def test_models_and_optimizers_that_need_whole_parameters_are_refused(directory):
    from girih import Categorical, Numeric, Schema, Substitution, Trainer
    from girih.errors import ConfigError
    from girih.models import CAN, LR, STAR

    schema = Schema([Categorical(name="item", dim=4)], "click")
    with pytest.raises(ConfigError, match="the dense optimizer LBFGS may need whole parameters"):
        Trainer(LR(schema), strategy=Substitution(), dense_optimizer=torch.optim.LBFGS)
    units = Schema(
        [Categorical(name="unit", dim=20), Categorical(name="item", dim=4), Numeric(name="scene")], "click"
    )
    can = CAN(units, co_action={"unit": ("item",)}, unit_layers=(4,))
    for model in (can, STAR(units, domain="scene", num_domains=2)):
        with pytest.raises(ConfigError, match=f"{type(model).__name__}: .*; use strategy 'synchronous'"):
            Trainer(model, strategy=Substitution())
    with pytest.raises(ConfigError, match="Linear has no substitutable operator"):
        Trainer(torch.nn.Linear(2, 1), schema=schema, strategy=Substitution())
