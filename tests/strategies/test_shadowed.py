"""Runs where the user works beside files that have names of Python's own modules."""

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest
from scenes import write

import girih
from runs import command

SOURCE = Path(girih.__file__).resolve().parents[1]
SHADOWS = ("http", "queue", "token", "socket", "select", "types", "numbers", "code")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shadowed"), num_examples=321)


@pytest.mark.parametrize("strategy", ["synchronous", "hybrid"])
def test_files_of_the_working_directory_hide_no_module_and_models_there_are_found(
    directory, tmp_path, strategy
):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported in place of {name}')\n")
    (tmp_path / "mine.py").write_text("from girih.models import DeepFM\n\n\nclass Mine(DeepFM): ...\n")
    first, _, _, *words = command(
        directory,
        strategy,
        tmp_path / "run",
        "strategy.trainers=2",
        "train.max_steps=4",
        "model={name='mine:Mine'}",
    )
    done = subprocess.run(
        [first, "-P", "-m", "girih", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},  # an empty entry in it would be the working directory
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


def test_one_function_makes_the_command_of_every_process():
    """Who writes ``python -m`` out would leave the working directory in front of the import path."""
    writers = set()
    for file in SOURCE.glob("girih/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.List) and any(
                isinstance(each, ast.Constant) and each.value == "-m" for each in node.elts
            ):
                writers.add(file.relative_to(SOURCE).as_posix())
    assert writers == {"girih/cluster/command.py"}
