"""Shows that nothing needs one strategy: removes it from a copy of the tree, runs lint, trains once with every other strategy.

    python dev/remove_strategy.py NAME [--keep]

These belong to a strategy NAME with class CLASS:

- its page, ``src/girih/strategies/NAME.py``;
- its room: modules that nothing imports once the page is gone, nor names as a string, and so on;
- its public names: lines of ``src/girih/__init__.py`` with its module or ``"CLASS"``;
- its tests and benchmarks: Python files of ``tests/``, ``benchmarks/`` and ``recipes/`` that contain ``CLASS``, ``"NAME"`` or one of these modules, and files that import them. Of ``tests/strategies/variants/`` it is ``NAME.py``.

Prints a line for each step. The status is 1 if a step fails. ``--keep`` leaves the copy in place.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "src",
    "tests",
    "benchmarks",
    "recipes",
    "dev",
    "docs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".mypy_cache",
)
CONFIG = """
[data]
format = "parquet"
train = "train.parquet"
test = "train.parquet"
batch_size = 64

[[features]]
name = "user"
kind = "categorical"
dim = 4

[[features]]
name = "item"
kind = "categorical"
dim = 4

[labels]
names = ["click"]

[model]
name = "deepfm"
hidden = [8]
"""
DATA = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
random = np.random.default_rng(0)
columns = {name: random.integers(0, 50, 512) for name in ("user", "item")}
pq.write_table(pa.table({**columns, "click": random.integers(0, 2, 512).astype(np.int8)}), "train.parquet")
"""
VARIANTS = """
from girih.strategies import BY_NAME
for name, kind in sorted(BY_NAME.items()):
    print(name, *("trainers" for each in kind.__dataclass_fields__ if each == "trainers"))
"""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("name")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(words)
    tree = Path(tempfile.mkdtemp(prefix=f"girih-without-{options.name}-"))
    try:
        for path in filter(Path.exists, map(ROOT.joinpath, COPIED)):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, tree / path.name)
        remove(tree, options.name)
        return 0 if all([lint(tree), *train(tree)]) else 1
    finally:
        if options.keep:
            print(f"the copy is {tree}")
        else:
            shutil.rmtree(tree)


def remove(tree: Path, name: str) -> None:
    """Removes a strategy from a copy of the tree."""
    source = tree / "src"
    page = source / "girih" / "strategies" / f"{name}.py"
    if not page.is_file():
        sys.exit(f"remove_strategy: no strategy {name!r}: there is no {page.relative_to(tree)}")
    kinds = [node for node in ast.parse(page.read_text()).body if isinstance(node, ast.ClassDef)]
    kind = next(
        node.name
        for node in kinds
        if f'name: ClassVar[str] = "{name}"' in ast.unparse(node).replace("'", '"')
    )
    module = f"girih.strategies.{name}"

    public = source / "girih" / "__init__.py"
    lines = public.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not re.search(rf'{re.escape(module)}\b|^\s*"{kind}",$', line)]
    public.write_text("".join(kept))
    room = [module, *orphans(source, module)]
    for each in room:
        file_of(source, each).unlink()
    print(f"removed modules: {', '.join(room)}")
    print(f"removed public names: {len(lines) - len(kept)} lines of girih/__init__.py")

    modules = "|".join(map(re.escape, room))
    named = re.compile(rf"""\b{kind}\b|["']{name}["']|\b({modules})\b""")
    folders = (tree / "tests", tree / "benchmarks", tree / "recipes")
    texts = {file: file.read_text() for folder in folders for file in folder.rglob("*.py")}
    variants = [file for file in texts if file.parent.name == "variants"]
    for file in variants:  # its own file alone: others may name it as what they equal
        if file.stem == name:
            file.unlink()
        del texts[file]
    count = 1 if variants else 0
    while files := [file for file, text in texts.items() if named.search(text)]:
        for file in files:
            file.unlink()
            del texts[file]
        count += len(files)
        stems = "|".join(re.escape(file.stem) for file in files)
        named = re.compile(rf"^\s*(from|import) ({stems})\b", re.MULTILINE)
    print(f"removed tests and benchmarks: {count} files")


def orphans(source: Path, removed: str) -> Iterator[str]:
    """Modules that only a removed module imports or names, each after those that need it."""
    users: dict[str, set[str]] = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        user = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for used in used_by(file):
            if used != user:
                users.setdefault(used, set()).add(user)
    modules = {used for used in users if file_of(source, used).is_file()}
    gone = [removed]
    for user in gone:
        for used in sorted(modules.difference(gone)):
            if user in users[used] and users[used].issubset(gone):
                gone.append(used)
                yield used


def used_by(file: Path) -> Iterator[str]:
    """Names of modules in a file: imported ones with their packages, and those in strings."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        for name in names:
            if name.startswith("girih."):
                parts = name.split(".")
                yield from (".".join(parts[:length]) for length in range(2, len(parts) + 1))


def file_of(source: Path, module: str) -> Path:
    """The file of a module or a package."""
    path = source.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def lint(tree: Path) -> bool:
    """Runs all of ``make lint`` but its ratchets."""
    python = sys.executable
    steps = {
        "ruff check": [python, "-m", "ruff", "check", "--quiet", "."],
        "mypy": [python, "-m", "mypy", "--no-error-summary"],
        "lint-imports": [str(Path(python).with_name("lint-imports"))],
    }
    passed = [step(tree, title, command) for title, command in steps.items()]
    return all(passed)


def train(tree: Path) -> Iterator[bool]:
    """Trains one epoch with each strategy that is left, with two trainers where the strategy has this option."""
    (tree / "config.toml").write_text(CONFIG)
    yield step(tree, "data", [sys.executable, "-c", DATA])
    listed = run(tree, [sys.executable, "-c", VARIANTS])
    if listed.returncode:
        yield step(tree, "strategies", [sys.executable, "-c", VARIANTS])
    for name, *fields in map(str.split, listed.stdout.splitlines()):
        counts = ["--set", "strategy.trainers=2"] if fields else []
        command = [sys.executable, "-m", "girih", "train", "config.toml", "--run", f"runs/{name}"]
        yield step(tree, f"train {name}", [*command, "--strategy", name, *counts])


def step(tree: Path, title: str, command: Sequence[str]) -> bool:
    """Runs a command in the copy; prints whether it passed, or else the end of its output."""
    done = run(tree, command)
    print(f"{title}: {'failed' if done.returncode else 'passed'}", flush=True)
    if done.returncode:
        print(f"{done.stdout[-3000:]}{done.stderr[-3000:]}", flush=True)
    return done.returncode == 0


def run(tree: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
