"""The script of `make test-newest` without a newer Python, and with words that it does not know."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "dev" / "versions.py"


def run(*words, **environment):
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_without_a_newer_python_it_skips(tmp_path):
    (tmp_path / "python3.12").write_text("#!/bin/sh\nexit 127\n")  # a shim of a version that is not installed
    (tmp_path / "python3.12").chmod(0o755)
    found = run("newest", PATH=str(tmp_path), PYENV_ROOT=str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert found.stdout == "skipped: no Python 3.12 or later on this machine\n"


def test_unknown_words_are_one_line():
    for words in ((), ("new",), ("oldest", "--fresh")):
        found = run(*words)
        assert found.returncode == 2
        assert found.stderr.startswith("versions: got ")
        assert found.stderr.count("\n") == 1
