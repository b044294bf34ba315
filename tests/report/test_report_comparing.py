"""``girih compare``, and the page of several runs."""

import csv
import io
import json

import pytest

from girih import cli
from girih.report.comparing import changed, compare
from report.test_report_page import Balanced, specs


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture
def two(log_directory):
    """A finished run, and one of other options that was stopped early and has no summary."""
    config = log_directory / "config.toml"
    assert run("train", config, "--run", log_directory / "a", "--set", "train.max_steps=8") == 0
    words = ("train.max_steps=6", "model={name='dnn'}", "sparse_optimizer.lr=0.5", "data.batch_size=64")
    words += ("train.evaluate_every_steps=3",)
    assert run("train", config, "--run", log_directory / "b", "--set", *words) == 0
    (log_directory / "b" / "summary.json").unlink()
    return log_directory / "a", log_directory / "b"


def test_options_that_differ_and_metrics(two, capsys, monkeypatch):
    a, b = two
    found = compare(two)
    assert found.options == {
        "data.batch_size": (128, 64),
        "model.name": ("deepfm", "dnn"),
        "model.hidden": ([16, 8], None),
        "model.dropout": (0.1, None),
        "sparse_optimizer.lr": (0.01, 0.5),
        "train.max_steps": (8, 6),
        "train.evaluate_every_steps": (None, 3),
    }
    summary = json.loads((a / "summary.json").read_text())
    evaluations = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    latest = [record for record in evaluations if record.get("split") == "valid"][-1]
    assert found.metrics["auc"] == (summary["auc"], latest["auc"])
    assert found.metrics["evaluated_on"] == ("test", "valid")
    assert found.metrics["steps"] == (8, 6)
    assert found.metrics["finished"] == ("yes", "no summary")

    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "200")
    assert run("compare", a, b) == 0
    shown = capsys.readouterr().out
    rows = {
        cells[1].strip(): [c.strip() for c in cells[2:4]]
        for line in shown.splitlines()
        if len(cells := line.split("│")) > 3
    }
    assert rows["model.hidden"] == ["[16, 8]", "not set"]
    assert rows["sparse_optimizer.lr"] == ["0.01", "0.5"]
    assert rows["AUC"] == [f"{summary['auc']:.5f}", f"{latest['auc']:.5f}"]
    assert run("compare", a, b, "--csv") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["run"] for line in lines] == [str(a), str(b)]
    assert [line["model.name"] for line in lines] == ["deepfm", "dnn"]
    assert float(lines[0]["auc"]) == summary["auc"]


def test_errors_are_told_in_full(tmp_path):
    runs = []
    for name, mae in (("a", 0.125), ("b", 0.375)):
        runs.append(tmp_path / name)
        runs[-1].mkdir()
        (runs[-1] / "config.toml").touch()
        summary = {"auc": None, "by_label": {"spent": {"mae": mae, "rmse": 2 * mae}}}
        (runs[-1] / "summary.json").write_text(json.dumps(summary))
    shown = dict(compare(runs).shown_metrics())
    assert "AUC" not in shown
    assert (shown["MAE"], shown["RMSE"]) == (["0.12500", "0.37500"], ["0.25000", "0.75000"])


def test_the_page_of_several_runs(two, tmp_path, capsys):
    a, b = two
    out = tmp_path / "both.html"
    assert run("report", a, b, "--out", out) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        str(a / "report.html"),
        str(b / "report.html"),
        str(out),
    ]
    page = out.read_text()
    shown = " ".join(Balanced(page).text)
    assert "2 runs" in shown
    assert "sparse_optimizer.lr" in shown
    charts = {json.dumps(spec) for spec in specs(page)}
    loss = next(text for text in charts if '"loss"' in text)
    assert f'"{a}"' in loss
    assert f'"{b}"' in loss
    auc = next(text for text in charts if '"auc"' in text)
    assert f"{b}, valid" in auc
    assert f"{a}, valid" not in auc  # it ended amid its first epoch
    assert f"{a}, test" in auc  # its one evaluation

    summary = json.loads((a / "summary.json").read_text())
    assert 0 < summary["features"]["user"]["unseen"] < 1
    unseen = page.partition("<h2>Unseen ids</h2>")[2].partition("</table>")[0]
    for name, each in summary["features"].items():
        assert f"<tr><td>{name}</td><td>{100 * each['unseen']:.1f} %</td><td>–</td></tr>" in unseen
    del summary["features"]  # as versions wrote it that did not count them
    (a / "summary.json").write_text(json.dumps(summary))
    assert run("report", a, b, "--out", out) == 0
    assert "Unseen ids" not in out.read_text()


def test_what_cannot_be_compared_is_one_sentence(two, tmp_path, capsys):
    a, _ = two
    for words, told in (
        (("compare", a, a), "compare: received 1 run; expected at least two different ones"),
        (("compare", a, tmp_path / "none"), "does not exist; give a run directory"),
        (("compare",), "Missing argument 'RUN...'"),
        (("report", a, two[1], "--out", tmp_path / "no" / "where.html"), "cannot be written"),
    ):
        capsys.readouterr()
        assert run(*words) == 2
        assert told in capsys.readouterr().err


def test_what_changed_of_a_config_is_told_without_secrets():
    before = {
        "data": {"train": "s3://key:hunter2@host/x", "batch_size": 256, "options": {"secret": 'hunter"3'}},
        "features": [{"name": "user", "dim": 4, "kind": "categorical"}],
        "strategy": {"name": "hybrid", "trainers": 2},
        "labels": {"names": ["a" * 100]},
    }
    now = {
        "data": {"train": "s3://key:hunter4@host/x", "batch_size": 1024, "options": {"secret": "hunter5"}},
        "features": [{"kind": "categorical", "name": "user", "dim": 8}],
        "strategy": {"name": "local"},
        "labels": {"names": ["b"]},
    }
    assert changed(before, before) == []
    assert changed(before, now) == [
        "data.batch_size 256 → 1024",
        "data.options.secret *** → ***",
        "data.train s3://key:***@host/x → s3://key:***@host/x",
        "features.user.dim 4 → 8",
        f"labels.names ['{'a' * 58}... → ['b']",
        "strategy.name hybrid → local",
        "strategy.trainers 2 → not set",
    ]
