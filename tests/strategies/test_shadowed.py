"""Runs where the user works beside files that have names of Python's own modules."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import write

import girih
from companions import ran
from girih.config import user_code
from girih.dense.graph.runnable import is_importable
from runs import command

pytestmark = pytest.mark.slow

SOURCE = Path(girih.__file__).resolve().parents[1]
SHADOWS = ("http", "queue", "token", "socket", "select", "numbers", "code")
"""Not ``types``, which Python itself imports for ``-m`` before girih begins."""
MODEL = '''
import torch
from torch import nn


class Looking(nn.Linear):
    """One operator, since its code looks into data: whoever computes it has to find this class."""

    def forward(self, values):
        return super().forward(values if float(values.sum()) < 1e30 else -values)


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), Looking(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numeric, embeddings):
        return self.layers(torch.cat([embeddings[name] for name in ("user", "item", "tags")], dim=1))


def cross_entropy(labels, predictions):
    labels, predictions = torch.from_numpy(labels), torch.from_numpy(predictions)
    return float(nn.functional.binary_cross_entropy(predictions, labels))
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shadowed"), num_examples=321)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("synchronous", ["strategy.trainers=2"], marks=pytest.mark.heavy),
        pytest.param("hybrid", ["strategy.trainers=2"], marks=pytest.mark.heavy),
        ("hierarchical", ["strategy.trainers_per_group=2", "strategy.servers_per_group=1"]),
    ],
)
def test_files_of_the_working_directory_hide_no_module_and_models_there_are_found(
    directory, tmp_path, strategy, options
):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported in place of {name}')\n")
    (tmp_path / "mine.py").write_text(MODEL)
    mine = ("train.max_steps=4", "model={name='mine:Mine'}", "train.metrics=['mine:cross_entropy']")
    done = subprocess.run(
        command(directory, strategy, tmp_path / "run", *options, *mine),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},  # an empty entry in it would be the working directory
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 4
    metrics = summary["by_label"]["click"]  # of the examples of both trainers
    assert (metrics["num_examples"], metrics["custom"]) == (
        101,
        {"cross_entropy": pytest.approx(metrics["logloss"])},
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert strategy != "hierarchical" or plan["tagging"]["devices"]["layers.1"] == "server 0"


@pytest.mark.parametrize("name", ["mine:Mine", "mine.py:Mine"])
def test_other_processes_find_a_module_where_the_user_works_and_no_file_and_none_beside_a_config(
    tmp_path, monkeypatch, name
):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in user_code._BESIDE])
    monkeypatch.setattr(user_code, "_BESIDE", set())
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = user_code.load_object(name, "[model].name", tmp_path, accepts=callable, expected="a class")
    try:
        assert not is_importable(found)
        monkeypatch.chdir(tmp_path)
        assert is_importable(found) == (name == "mine:Mine")
    finally:
        del sys.modules[found.__module__]


@pytest.mark.parametrize("model", ["mine:Mine", pytest.param("mine.py:Mine", marks=pytest.mark.heavy)])
def test_parameters_of_a_class_that_group_servers_cannot_import_are_refused_before_the_run(
    directory, tmp_path, model
):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "mine.py").write_text(MODEL)
    for name in ("elsewhere", "program"):
        (tmp_path / name).mkdir()
    program = tmp_path / "program" / "train.py"
    program.write_text("import sys\nfrom girih import cli\n\nsys.exit(cli.run(sys.argv[1:]))\n")
    options = ["strategy.trainers_per_group=1", "strategy.servers_per_group=1", "train.max_steps=4"]
    words = command(tmp_path, "hierarchical", tmp_path / "run", *options, f"model={{name='{model}'}}")
    done = ran(program, *words[3:], cwd=tmp_path / "elsewhere")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "operator 'layers.1' has a parameter, 'layers.1.weight', and stays on the trainers" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_function_makes_the_command_of_every_process():
    """Who writes ``python -m`` out would leave the working directory in front of the import path."""
    writers = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.glob("girih/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value == "-m"
    }
    assert writers == {"girih/cluster/command.py"}
