"""`make api` passes for the code, and reports each change of a public name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path):
    """A copy of the script, its file and the library, without the history of git."""
    (tmp_path / "dev").mkdir()
    for name in ("api.py", "api.txt"):
        shutil.copy(ROOT / "dev" / name, tmp_path / "dev")
    shutil.copytree(ROOT / "src" / "girih", tmp_path / "src" / "girih", ignore=lambda *_: ["__pycache__"])
    return tmp_path


def run(place, *words):
    command = [sys.executable, place / "dev" / "api.py", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_change_of_a_public_name_is_reported_once(place):
    assert run(place).stderr == ""
    replace(
        place / "src/girih/models/loss.py",
        "bce_with_logits(logits: Tensor",
        "bce_with_logits(outputs: Tensor",
    )
    replace(place / "src/girih/optim.py", "    momentum: Fraction = 0.0\n", "")
    replace(place / "src/girih/tables.py", "class Zeros(_Initializer):", "class Ones(_Initializer):")
    replace(place / "src/girih/data/readers.py", "    quoted_line_breaks: bool\n", "    line_breaks: bool\n")
    found = run(place)
    assert found.returncode == 1
    *changes, _, _, _, _ = found.stderr.splitlines()
    arguments = "labels: Tensor, weights: Tensor | None = None) -> Tensor"
    assert changes == [
        f"changed: girih.models.bce_with_logits(logits: Tensor, {arguments}",
        f"     to: girih.models.bce_with_logits(outputs: Tensor, {arguments}",
        "removed: girih.optim.SGD.momentum: Fraction = 0.0",
        "added: girih.read_csv.line_breaks: bool",
        "removed: girih.read_csv.quoted_line_breaks: bool",
        "added: girih.tables.Ones(_Initializer)",
        "removed: girih.tables.Zeros(_Initializer)",
    ]
    assert run(place, "--write").returncode == 0
    assert run(place).returncode == 0


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, path
    path.write_text(text.replace(old, new))
