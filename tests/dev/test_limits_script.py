"""Limits of size and prose fall, and rise only in commits that name an issue: in a real repository, by the real script."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEV = Path(__file__).parents[2] / "dev"
CODE = "import sys, limits; sys.exit(limits.compare({'lines': {'store': int(sys.argv.pop())}}))"


@pytest.fixture
def place(tmp_path):
    """A repository with the script and a limit of 10 lines."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    shutil.copy(DEV / "limits.py", tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path, 10, "Begin")
    return tmp_path


def git(place, *words):
    user = ("-c", "user.name=any", "-c", "user.email=any@example.org")
    subprocess.run(["git", *user, *words], cwd=place, check=True)


def commit(place, limit, message):
    (place / "limits.json").write_text(json.dumps({"lines": {"store": limit}}))
    git(place, "add", ".")
    git(place, "commit", "-qm", message)


def compared(place, lines, *options):
    command = [sys.executable, "-c", CODE, *options, str(lines)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True)


def test_a_number_above_its_limit_fails_and_one_below_does_not(place):
    assert compared(place, 10).returncode == 0
    above = compared(place, 11)
    assert above.returncode == 1
    assert "lines of store: 11 exceeds the limit of 10" in above.stderr
    below = compared(place, 8)
    assert below.returncode == 0
    assert "by 2.0" in below.stdout


def test_lower_takes_limits_down_and_never_up(place):
    assert compared(place, 8, "--lower").returncode == 0
    assert json.loads((place / "limits.json").read_text()) == {"lines": {"store": 8}}
    assert compared(place, 12, "--lower").returncode == 1
    assert json.loads((place / "limits.json").read_text()) == {"lines": {"store": 8}}


def test_a_limit_rises_only_in_a_commit_that_names_an_issue(place):
    commit(place, 12, "Raise a limit, as issue 7 allows")
    assert compared(place, 12).returncode == 0
    commit(place, 15, "Raise a limit")
    found = compared(place, 12)
    assert found.returncode == 1
    assert "raises lines of store to 15 and names no issue" in found.stderr
    commit(place, 12, "Lower it again")
    assert compared(place, 12).returncode == 0


def test_branches_that_each_lower_a_limit_merge(place):
    git(place, "checkout", "-qb", "other")
    commit(place, 8, "Lower it")
    git(place, "checkout", "-q", "-")
    commit(place, 7, "Lower it more")
    git(place, "merge", "-q", "-s", "ours", "--no-edit", "other")
    assert compared(place, 7).returncode == 0
    commit(place, 8, "Take the other branch's limit")
    assert compared(place, 7).returncode == 1
