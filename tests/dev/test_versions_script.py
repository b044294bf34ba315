"""The script of `make test-newest` without a newer Python, and with words that it does not know."""

import os
import shutil
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


def test_it_fails_with_an_older_numpy(tmp_path):
    """An environment that is there already, with a pip that has nothing to do and a NumPy of yesterday."""
    shutil.copytree(SCRIPT.parent, tmp_path / "dev")
    for name in ("pyproject.toml", "constraints-newest.txt"):
        shutil.copy(SCRIPT.parents[1] / name, tmp_path)
    python = tmp_path / "bin" / "python3.12"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"\necho 2.4.6\n'
    )
    python.chmod(0o755)
    path = f"{python.parent}:/usr/bin:/bin"
    command = [sys.executable, str(tmp_path / "dev" / "versions.py"), "newest"]
    environment = os.environ | {"PATH": path, "PYENV_ROOT": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout.endswith("numpy 2.4.6\nnumba 2.4.6\npyarrow 2.4.6\n")
    assert found.stderr == "versions: NumPy is older than 2.5; run make test-newest NEWEST=1\n"


def test_unknown_words_are_one_line():
    for words in ((), ("new",), ("oldest", "--fresh")):
        found = run(*words)
        assert found.returncode == 2
        assert found.stderr.startswith("versions: got ")
        assert found.stderr.count("\n") == 1
