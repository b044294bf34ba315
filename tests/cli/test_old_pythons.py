"""``python -m girih`` on a Python that is too old: one line, whatever its syntax."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import girih

SOURCE = Path(girih.__file__).parents[1]


def python(version):
    """A Python of a version that can start; None where there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for path in (*root.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")):
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return str(path)
    return None


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9", "3.10"])
def test_it_names_the_python_that_it_needs(version):
    path = python(version)
    if path is None:
        pytest.skip(f"Python {version} is not installed")
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [path, "-m", "girih", "info"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"girih: needs Python 3.11 or later; {path} is Python {version}.")
    assert done.stderr.count("\n") == 1
