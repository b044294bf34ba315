"""Shows whether tests find small errors: changes one place of the library at a time and runs the tests of its room.

    python dev/mutants.py choose mutants.json [--before TREE] [--count 30] [--seed 43]
    python dev/mutants.py run mutants.json results.json [--tree TREE]
    python dev/mutants.py compare before.json after.json

``choose`` picks lines of ``src/girih`` and changes each in one way: another comparison, sign, number or condition. With
``--before`` it takes lines that both trees have once, so that both can be tested with the same errors. ``run`` tests
each in a copy of the tree and notes ``failed``, ``passed`` or ``timeout``. The tests are the fast ones of
``tests/ROOM``, where ROOM is the room of the file. ``compare`` lists mutants that failed before and pass now. Its status
is 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "recipes", "dev", "docs", "pyproject.toml", "README.md", "Makefile")
LIMIT_S = 1800
"""A mutant may hang. The tests count as failed then."""
LEFT_OUT = ("kernels", "cli")
"""Rooms that are not changed: errors in kernels may crash the interpreter, and commands mostly print."""
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
SIGNS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}


def places(text: str) -> Iterator[tuple[int, str]]:
    """Number and changed text of each line that can be changed within itself."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        start, end = node.col_offset, node.end_col_offset or 0
        changed: str | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            operator = COMPARISONS[type(node.ops[0])]
            changed = f"({ast.unparse(node.left)}) {operator} ({ast.unparse(node.comparators[0])})"
        elif isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            if not any(
                isinstance(side, (ast.Constant, ast.JoinedStr)) and not _is_number(side)
                for side in (node.left, node.right)
            ):
                changed = f"({ast.unparse(node.left)}) {SIGNS[type(node.op)]} ({ast.unparse(node.right)})"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            changed = f"bool({ast.unparse(node.operand)})"
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            operator = "or" if isinstance(node.op, ast.And) else "and"
            changed = f"(({ast.unparse(node.values[0])}) {operator} ({ast.unparse(node.values[1])}))"
        elif _is_number(node):
            changed = str(node.value + 1)  # type: ignore[attr-defined]
        if changed is not None:
            yield node.lineno, (line[:start] + changed.encode() + line[end:]).decode()


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def lines_of(tree: Path) -> dict[str, tuple[str, int]]:
    """File and number of each line that stands once in the tree's library, by the line's text without margin."""
    where: dict[str, tuple[str, int]] = {}
    counts: Counter[str] = Counter()
    for path in sorted((tree / "src" / "girih").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            counts[line.strip()] += 1
            where[line.strip()] = (str(path.relative_to(tree)), number)
    return {line: place for line, place in where.items() if counts[line] == 1}


def room_of(file: str) -> str:
    parts = Path(file).parts
    return parts[2] if len(parts) > 3 else ""


def choose(before: Path | None, count: int, seed: int) -> list[dict[str, object]]:
    """Mutants with ``old`` and ``new`` line; each file gives one at most."""
    known = lines_of(before) if before else None
    ours = lines_of(ROOT)
    candidates: dict[str, list[dict[str, object]]] = {}
    for path in sorted((ROOT / "src" / "girih").rglob("*.py")):
        file, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
        room = room_of(file)
        if room in LEFT_OUT or not (ROOT / "tests" / room).is_dir() or not room:
            continue
        for number, changed in places(path.read_text()):
            old = lines[number - 1].strip()
            if len(old) < 25 or old not in ours or (known is not None and old not in known):
                continue
            if "raise " in old or '"' in old or "TYPE_CHECKING" in old or "Error(" in old:
                continue
            if known is not None and not (before / "tests" / room_of(known[old][0])).is_dir():  # type: ignore[operator]
                continue
            candidates.setdefault(file, []).append({"old": old, "new": changed.strip()})
    dice = random.Random(seed)
    files = dice.sample(sorted(candidates), count)
    return [{"file": file, **dice.choice(candidates[file])} for file in files]


def run(tree: Path, mutants: list[dict[str, str]]) -> list[dict[str, str]]:
    """Tests each mutant in a copy of the tree beside it; returns the mutants with ``file`` in this tree and ``tests``."""
    copy = tree.parent / f"{tree.name}-mutants"
    results = []
    for mutant in mutants:
        for name in COPIED:
            shutil.rmtree(copy / name, ignore_errors=True)
            if (tree / name).is_dir():
                shutil.copytree(tree / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (tree / name).exists():
                shutil.copy2(tree / name, copy / name)
        file, number = lines_of(tree)[mutant["old"]]
        path = copy / file
        lines = path.read_text().splitlines()
        margin = lines[number - 1][: -len(lines[number - 1].lstrip())]
        lines[number - 1] = margin + mutant["new"]
        path.write_text("\n".join(lines) + "\n")
        tests = f"tests/{room_of(file)}"
        outcome, first = _test(copy, tests)
        results.append(
            {**mutant, "file": f"{file}:{number}", "tests": tests, "outcome": outcome, "first": first}
        )
        print(f"{outcome:8} {file}:{number}: {mutant['old']}  →  {mutant['new']}   {first}", flush=True)
    shutil.rmtree(copy)
    return results


def _test(copy: Path, tests: str) -> tuple[str, str]:
    """The outcome of the fast tests, and the first one that failed."""
    command = [sys.executable, "-m", "pytest", tests, "-x", "-q", "-m", "not slow and not heavy and not gpu", "--numprocesses", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]  # fmt: skip
    path = os.pathsep.join((str(copy / "src"), str(copy / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "GOMP_SPINCOUNT": "0"}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "passed" if done.returncode == 0 else "failed", failed[0][:120] if failed else ""


def compare(before: list[dict[str, str]], after: list[dict[str, str]]) -> int:
    found_before = {mutant["old"] for mutant in before if mutant["outcome"] != "passed"}
    found_after = {mutant["old"] for mutant in after if mutant["outcome"] != "passed"}
    print(f"found: {len(found_before)} of {len(before)} before, {len(found_after)} of {len(after)} after")
    for old in sorted(found_before - found_after):
        print(f"no longer found: {old}")
    return 1 if found_before - found_after else 0


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("choose")
    choosing.add_argument("out", type=Path)
    choosing.add_argument("--before", type=Path)
    choosing.add_argument("--count", type=int, default=30)
    choosing.add_argument("--seed", type=int, default=43)
    running = commands.add_parser("run")
    running.add_argument("mutants", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("--tree", type=Path, default=ROOT)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "choose":
        mutants = choose(options.before, options.count, options.seed)
        options.out.write_text(json.dumps(mutants, indent=1))
    elif options.command == "run":
        results = run(options.tree.resolve(), json.loads(options.mutants.read_text()))
        options.out.write_text(json.dumps(results, indent=1))
    else:
        raise SystemExit(compare(*(json.loads(path.read_text()) for path in (options.before, options.after))))


if __name__ == "__main__":
    main()
