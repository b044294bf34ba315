"""A config's trainer in a program and in a real kernel of a notebook."""

import json

import pytest

import girih
from girih import cli
from girih.errors import ConfigError, RunDirectoryError

OVERRIDES = {"train.max_steps": 9, "model.hidden": (8, 4)}


def test_a_config_s_trainer_trains_as_the_command_line_does(log_directory, monkeypatch, capsys):
    config, path = log_directory / "config.toml", log_directory / "run"
    words = ["train", str(config), "--run", str(log_directory / "by_cli")]
    assert cli.run([*words, "--set", "train.max_steps=9", "model.hidden=[8,4]"]) == 0
    capsys.readouterr()
    with girih.Trainer.from_config(config, OVERRIDES, run=path) as trainer:
        trainer.fit()
        metrics = trainer.evaluate()
    assert "step 9  examples 1,152 of 1,152" in capsys.readouterr().err
    summary = json.loads((log_directory / "by_cli" / "summary.json").read_text())
    assert (metrics.auc, metrics.logloss) == (summary["auc"], summary["logloss"])
    assert cli.run(["evaluate", str(path)]) == 0
    captured = capsys.readouterr()
    assert f"{metrics.auc:.5f}" in captured.out
    assert "not finished" not in captured.err

    before = (path / "config.toml").read_bytes()
    with (
        girih.Trainer.from_config(config, ["train.epochs=2"], run=path, progress=False) as again,
        pytest.raises(RunDirectoryError, match="holds an earlier run"),
    ):
        again.fit()
    assert (path / "config.toml").read_bytes() == before
    assert capsys.readouterr().err == ""


def test_overrides_that_are_none(log_directory):
    config = log_directory / "config.toml"
    for overrides, told in (
        ("train.epochs=2", "expected a list or a mapping"),
        ({"epochs": 2}, "overrides: 'epochs': expected section.key=value"),
        ({"train.epoch": 2}, r"\[train\]: unknown key 'epoch'; did you mean 'epochs'"),
        (["train.epochs"], "--set 'train.epochs': expected section.key=value"),
    ):
        with pytest.raises(ConfigError, match=told):
            girih.Trainer.from_config(config, overrides)
    schema = girih.Schema.load(config)
    with girih.Trainer(girih.models.FM(schema)) as trainer:
        with pytest.raises(ConfigError, match="no train data: give a Dataset"):
            trainer.fit()
        with pytest.raises(ConfigError, match="no test or valid data"):
            trainer.evaluate()


@pytest.mark.heavy
def test_a_bar_in_a_notebook(log_directory):
    client = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    from nbformat import v4

    code = "import girih\ntrainer = girih.Trainer.from_config('config.toml')\ntrainer.fit()\nNone"
    notebook = v4.new_notebook(cells=[v4.new_code_cell(code), v4.new_code_cell("trainer.close()")])
    resources = {"metadata": {"path": str(log_directory)}}
    client.NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    pages = [output.data["text/html"] for output in notebook.cells[0].outputs if "data" in output]
    bars = [page for page in pages if page.startswith("<progress")]
    assert len(bars) == 1  # it replaces itself
    assert 'max="3000" value="3000"></progress> 100 %' in bars[0]
    assert "loss" in bars[0]
