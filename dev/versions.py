"""Tests the rooms that need no torch with other versions of Python and packages. ``make test-newest``, ``make test-oldest``

    python dev/versions.py newest|oldest [--refresh]

``newest`` takes the newest Python on this machine, and the newest packages. ``oldest`` takes Python 3.11, and the lower bounds
in pyproject.toml. Both pin versions, in constraints-newest.txt and constraints-oldest.txt. ``--refresh`` writes that file
again. Each has an environment in the checkout, ``.venv-newest`` or ``.venv-oldest``, without torch: a test that imports it
fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("config", "data", "kernels", "store", "comm", "planner", "metrics", "checkpoint")
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "xxhash",
    "scipy",
    "scikit-learn",
    "pandas",
    "polars",
    "cryptography",
)
PRINTED = ("numpy", "numba", "pyarrow")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORTED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
"""Versions of Python that the classifiers name. All tests run with the first, so ``newest`` takes a later one."""
LEAST_NUMPY = (2, 5)
"""NumPy 2.5 broke 91 kernels of 92, so ``newest`` does not pass with an older one."""


def main(words: list[str]) -> int:
    if not words or words[0] not in ("newest", "oldest") or words[1:] not in ([], ["--refresh"]):
        text = " ".join(words) or "no word"
        print(f"versions: got {text}; expected newest or oldest, and --refresh or not", file=sys.stderr)
        return 2
    newest = words[0] == "newest"
    interpreter = find_python(SUPPORTED[1:] if newest else SUPPORTED[:1])
    if interpreter is None:
        print(f"skipped: no Python {'3.12 or later' if newest else '3.11'} on this machine")
        return 0
    try:
        python = make_environment(
            words[0], interpreter, list_packages(oldest=not newest), refresh=bool(words[1:])
        )
    except subprocess.CalledProcessError as error:
        print(f"versions: status {error.returncode} of {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    versions = {name: find_version(python, name) for name in PRINTED}
    for name, number in versions.items():
        print(f"{name} {number}", flush=True)
    if newest and tuple(map(int, versions["numpy"].split(".")[:2])) < LEAST_NUMPY:
        print("versions: NumPy is older than 2.5; run make test-newest NEWEST=1", file=sys.stderr)
        return 1
    return subprocess.run(
        [
            python, "-m", "pytest", "--numprocesses", os.environ.get("PROCESSES", "4"), "--dist", "loadfile",
            "-m", "not slow and not heavy and not gpu", *(f"tests/{room}" for room in ROOMS),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "GOMP_SPINCOUNT": "0"},
    ).returncode  # fmt: skip


def find_python(versions: list[str]) -> str | None:
    """The newest of some versions of Python that runs here, in PATH or installed by pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for name in (f"python{version}" for version in reversed(versions)):
        for directory in (*os.get_exec_path(), *sorted(pyenv.glob("3.*/bin"), reverse=True)):
            path = shutil.which(name, path=directory)
            # pyenv has a shim for each version, installed or not
            if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
                return path
    return None


def list_packages(*, oldest: bool) -> list[str]:
    """Girih's dependencies except torch, and the tests' tools."""
    packages = [need for need in PROJECT["dependencies"] if not need.startswith("torch")]
    return [*(re.sub(r">=([^,]+).*", r"==\1", need) if oldest else need for need in packages), *TOOLS]


def make_environment(name: str, interpreter: str, packages: list[str], *, refresh: bool) -> str:
    """The interpreter of an environment with some packages, made again if these changed."""
    place = ROOT / f".venv-{name}"
    pins, mark = ROOT / f"constraints-{name}.txt", place / "installed"
    pins.touch()
    python, wanted = str(place / "bin" / "python"), f"{interpreter}\n{packages}\n{pins.read_text()}"
    if refresh or not mark.is_file() or mark.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([interpreter, "-m", "venv", place], check=True)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        limits = () if refresh else ("--constraint", str(pins))
        subprocess.run([*pip, "install", "--quiet", *packages, *limits], check=True)
        if refresh:
            frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
            pins.write_text(f"# make test-{name} {name.upper()}=1 writes this file.\n{frozen}")
            wanted = f"{interpreter}\n{packages}\n{pins.read_text()}"
        mark.write_text(wanted)
    return python


def find_version(python: str, name: str) -> str:
    """The version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
