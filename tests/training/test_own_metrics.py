"""Metrics of the user's own in runs: their values, what watches them, and who may name them."""

import json
import shutil
import sys

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

import girih
from girih import cli
from girih.config import read_toml, write_toml
from girih.config.class_record import RECORD
from girih.config.file import RunConfig
from girih.errors import ConfigError
from girih.report.comparing import compare
from girih.serving.opening import open_config

MINE = """
import numpy as np

def brier(labels, predictions, weights):
    return np.average((labels - predictions) ** 2, weights=weights)

def hidden(power):
    def metric(labels, predictions):
        return np.mean(np.abs(labels - predictions) ** power)
    return metric

cubed, plain = hidden(3), hidden(1)
"""
BRIER = "train.metrics=['mine.py:brier']"


def brier(labels, predictions, weights):
    return np.average((labels - predictions) ** 2, weights=weights)


@pytest.fixture
def mine(log_directory, monkeypatch):
    """The directory with ``mine.py`` in it; what was imported from there is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (log_directory / "mine.py").write_text(MINE)
    yield log_directory
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


def run(*words):
    return cli.run([str(word) for word in words])


def train(directory, *overrides, name="run", more=()):
    sets = [word for each in ("train.epochs=2", *overrides) for word in ("--set", each)]
    return run("train", directory / "config.toml", "--run", directory / name, *sets, *more)


def evaluations(run_directory, name="brier"):
    """Step and value of each evaluation on the validation data."""
    records = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [(each["step"], each.get(name)) for each in records if each.get("split") == "valid"]


def expected_brier(settings, trainer, split):
    data = settings.dataset(split)
    labels = np.concatenate([batch.labels for batch in data.in_order()])
    return brier_score_loss(labels[:, 0], trainer.predict(data)[:, 0])


def test_it_is_in_every_place_that_shows_metrics(mine, capsys):
    assert train(mine, "train.metrics=['mine.py:brier', 'mine.py:cubed', 'mine.py:plain']") == 0
    shown = capsys.readouterr()
    summary = json.loads((mine / "run" / "summary.json").read_text())
    custom = summary["by_label"]["click"]["custom"]
    assert list(custom) == ["brier", "cubed", "plain"]
    assert custom["cubed"] < custom["brier"] < custom["plain"]
    assert f"brier {evaluations(mine / 'run')[-1][1]:.5f}" in shown.err
    assert f"{custom['brier']:.5f}" in shown.out
    settings = open_config(mine / "run", own_metrics=True)
    with settings.trainer() as trainer:
        trainer.load(mine / "run", resume=False)
        assert trainer.evaluate(settings.dataset("test")).first.custom == custom
        assert custom["brier"] == pytest.approx(expected_brier(settings, trainer, "test"), rel=1e-6)
        assert evaluations(mine / "run")[-1][1] == pytest.approx(
            expected_brier(settings, trainer, "valid"), rel=1e-6
        )
    assert run("evaluate", mine / "run") == 0
    assert f"{custom['brier']:.5f}" in capsys.readouterr().out
    assert run("report", mine / "run") == 0
    page = (mine / "run" / "report.html").read_text()
    assert "<th>brier</th>" in page
    assert page.count(">cubed<") >= 2  # a column and a curve
    assert train(mine, name="other") == 0
    (mine / "other" / "summary.json").unlink()
    found = compare([mine / "run", mine / "other"])
    assert dict(found.shown_metrics())["brier"] == [f"{custom['brier']:.5f}", "–"]
    (mine / "run" / "summary.json").unlink()
    assert compare([mine / "run", mine / "other"]).metrics["brier"] == (
        evaluations(mine / "run")[-1][1],
        None,
    )


def stops_at(values, sign, patience):
    """The best step and the last one, by plain reading of the values."""
    best, bad = None, 0
    for step, value in values:
        if best is None or sign * (value - best[1]) > 0:
            best, bad = (step, value), 0
        else:
            bad += 1
        if bad > patience:
            return best[0], step
    return best[0], values[-1][0]


@pytest.mark.parametrize(("mode", "sign"), [("min", -1), ("max", 1)])
def test_early_stopping_keeps_the_best_weights_by_it(mine, mode, sign):
    often = (BRIER, "train.evaluate_every_steps=8", "sparse_optimizer.lr=0.1", "dense_optimizer.lr=0.02")
    assert train(mine, *often, name="all") == 0
    stopping = f"train.early_stopping={{metric='brier', mode='{mode}'}}"
    assert train(mine, *often, stopping) == 0
    best, last = stops_at(evaluations(mine / "all"), sign, 0)
    summary = json.loads((mine / "run" / "summary.json").read_text())
    assert (summary["checkpoint_step"], summary["steps"], summary["stopped_early"]) == (best, last, True)
    settings = open_config(mine / "run", own_metrics=True)
    with settings.trainer() as trainer:
        trainer.load(mine / "run", resume=False)
        value = trainer.evaluate(settings.dataset("valid")).first.value("brier")
    assert value == dict(evaluations(mine / "run"))[best]


@pytest.mark.parametrize("metric", ["recall@2", "ndcg@2"])
def test_early_stopping_keeps_the_best_weights_by_computed_metrics(mine, metric):
    often = (
        "train.gauc_by='user'",
        "train.rank_at=[2]",
        "train.evaluate_every_steps=8",
        "dense_optimizer.lr=0.02",
    )
    assert train(mine, *often, f"train.early_stopping={{metric='{metric}'}}") == 0
    values = evaluations(mine / "run", metric)
    best, last = stops_at(values, 1, 0)
    summary = json.loads((mine / "run" / "summary.json").read_text())
    assert (summary["checkpoint_step"], summary["steps"]) == (best, last)
    settings = open_config(mine / "run")
    with settings.trainer() as trainer:
        trainer.load(mine / "run", resume=False)
        assert trainer.evaluate(settings.dataset("valid")).first.value(metric) == dict(values)[best]


def test_functions_from_python_and_a_schedule_that_watches_one(mine):
    settings = RunConfig.load(mine / "config.toml")
    options = {"seed": 3, "epochs": 3, "metrics": [brier]}
    never = {"factor": 0.1, "patience": 0, "threshold": 1.0, "threshold_mode": "abs"}
    schedule = {"name": "ReduceLROnPlateau", "metric": "brier", **never}
    for change, told in (
        (
            {"lr_schedule": schedule},
            "lr_schedule: mode = None, but brier is your own: set mode to",
        ),
        (
            {"early_stopping": girih.EarlyStopping(metric="brier")},
            "early_stopping: mode = None, but brier is",
        ),
        ({"early_stopping": girih.EarlyStopping(metric="auc", mode="min")}, "auc is better when maximal"),
    ):
        with pytest.raises(ConfigError, match=told):
            girih.Trainer(settings.model(), options=girih.TrainOptions(**options, **change))
    options["lr_schedule"] = schedule | {"mode": "min"}
    with girih.Trainer(settings.model(), options=girih.TrainOptions(**options)) as trainer:
        trainer.fit(settings.dataset("train"), settings.dataset("valid"))
        assert trainer.learning_rate.scale() == pytest.approx(0.01)
        found = trainer.evaluate(settings.dataset("test")).first.value("brier")
        assert found == pytest.approx(expected_brier(settings, trainer, "test"), rel=1e-6)
    by_name = girih.TrainOptions(metrics=[f"{mine / 'mine.py'}:cubed", "girih.testing.click_log:click_log"])
    with pytest.raises(ConfigError, match="metric click_log of label 'click': "):
        girih.Trainer(settings.model(), options=by_name)


def test_a_function_given_to_a_trainer_of_a_config(mine):
    overrides = {"train.metrics": [brier, "mine.py:cubed"], "train.max_steps": 2}
    with girih.Trainer.from_config(
        mine / "config.toml", overrides, run=mine / "run", progress=False
    ) as trainer:
        trainer.fit()
        assert list(trainer.evaluate(trainer.data["test"]).first.custom) == ["brier", "cubed"]
    assert read_toml(mine / "run" / "config.toml")["train"]["metrics"] == [f"{mine / 'mine.py'}:cubed"]
    assert run("evaluate", mine / "run") == 0


def test_a_function_that_fails_later_does_not_end_the_run(mine, capsys):
    (mine / "mine.py").write_text(
        "calls = []\n\ndef brier(labels, predictions):\n    calls.append(1)\n"
        "    if len(calls) == 2:\n        raise ValueError('no such day')\n    return len(calls)\n"
    )
    stopping = "train.early_stopping={metric='brier', mode='max', patience=5}"
    assert train(mine, BRIER, stopping, "train.evaluate_every_steps=8") == 0
    told = capsys.readouterr().err
    assert "metric brier of label 'click': ValueError: no such day at " in told
    assert f"{mine / 'mine.py'}:6; this evaluation goes on without it" in told
    values = [value for _, value in evaluations(mine / "run")]
    assert values[:3] == [None, 3.0, 4.0]


def test_a_run_of_this_user_goes_on_and_one_of_a_stranger_runs_nothing(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert train(mine, BRIER, "train.early_stopping={metric='brier', mode='min', patience=9}") == 0
    folder = mine / "run"
    assert read_toml(folder / "config.toml")["train"]["metrics"] == [f"{mine / 'mine.py'}:brier"]
    assert set(json.loads((folder / RECORD).read_text())) == {"train"}
    assert not any(
        "brier" in path.read_text(errors="replace") for path in folder.glob("checkpoints/*/*.json")
    )
    assert run("evaluate", folder) == 0
    onward = ("train", folder / "config.toml", "--run", folder, "--resume", "--set", "train.epochs=3")
    assert run(*onward) == 0
    assert len(evaluations(folder)) == 3

    (mine / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + MINE)
    for names in (
        [f"{mine / 'evil.py'}:brier"],
        [f"{mine / 'mine.py'}:plain"],
        [f"{mine / 'mine.py'}:brier", "os:system"],
    ):
        settings = read_toml(folder / "config.toml")
        settings["train"]["metrics"] = names
        shutil.rmtree(tmp_path / "copied", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "copied")
        write_toml(tmp_path / "copied" / "config.toml", settings)
        for words in (("evaluate", tmp_path / "copied"), ("check", tmp_path / "copied" / "config.toml")):
            capsys.readouterr()
            assert run(*words) == 2
            told = capsys.readouterr().err
            assert told.count("\n") == 1
            assert (
                "a run directory may only name a function that your own config named (classes.json records"
                in told
            )
            assert (
                "give --set 'train.metrics=[\"file.py:function\"]' to girih train, or delete the key" in told
            )
        data = ("--data", mine / "test.parquet", "--out", tmp_path / "out.csv")
        assert run("predict", tmp_path / "copied", *data) == 0  # which computes no metric
    assert not (tmp_path / "ran").exists()
    onward = ("train", tmp_path / "copied" / "config.toml", "--run", tmp_path / "copied", "--resume")
    chosen = f"train.metrics=['{mine / 'mine.py'}:brier']"
    assert run(*onward, "--set", "train.epochs=4", "--set", chosen) == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of_another"))
    assert run("evaluate", folder) == 2
