"""Seconds from the command to the first step, by phase, and processor time of all processes of a run of one step.

    girih bench start                                      # this checkout
    girih bench start --trees BEFORE AFTER --rounds 7      # two checkouts, in turns

Kernels are compiled before. Phases are seen from outside: ``children`` when the launcher has started a process,
``trainer`` when trainer 0 has loaded what it needs and read the config, ``group`` when the trainers have met,
``roles`` when all other processes listen, ``step`` when the first step is in ``metrics.jsonl``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import pages
import pyarrow.parquet as pq
from two_versions import CONFIG, STRATEGIES

from girih.data.click_log import click_log

PHASES = ("children", "trainer", "group", "roles", "step")
LOOK_S = 0.005
MEASURED = ("version", *STRATEGIES)


def main() -> None:
    """Prints a row for each checkout and strategy."""
    parser = harness.parser("start", __doc__, resumes=True)
    pages.add_option(parser, page_parts)
    parser.add_argument("--trees", type=Path, nargs="+", default=[harness.ROOT])
    parser.add_argument("--strategies", nargs="+", choices=MEASURED, default=["version", "local", "hybrid"])
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = harness.Report("start", options)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows, _ = click_log(20_000, start=0, cardinality=2_000)
        pq.write_table(rows, place / "train.parquet")
        (place / "config.toml").write_text(f"{CONFIG}max_steps = 1\nlog_every_steps = 1\n")
        titles = ("seconds until", *PHASES, "end", "processor time")
        table = report.table("start", {"tree": "{}", "what": "{}", **dict.fromkeys(titles[1:], "{:.2f}")})
        for strategy in options.strategies:
            if table.has({"what": strategy}):
                continue
            command = _command(strategy, options.trainers)
            contestants = {_name(tree): _contestant(tree.resolve(), command, place) for tree in options.trees}
            times = harness.alternate(contestants, options.rounds, warmup=1)
            with report.group():
                for tree, measured in times.items():
                    medians = [harness.median_part(measured, part) for part in range(len(titles) - 1)]
                    values = [None if value != value else value for value in medians]
                    table.row({"tree": tree, "what": strategy, **dict(zip(titles[1:], values, strict=True))})
    report.finish()


def _name(tree: Path) -> str:
    return "this checkout" if tree == harness.ROOT else str(tree)


def _command(strategy: str, trainers: int) -> list[str]:
    if strategy == "version":
        return ["--version"]
    several = [] if strategy == "local" else ["--set", f"strategy.trainers={trainers}"]
    return ["train", "config.toml", "--strategy", strategy, *several]


def _contestant(tree: Path, command: Sequence[str], place: Path) -> Callable[[int], Sequence[float]]:
    return lambda number: _run(tree, command, place / f"{time.monotonic_ns()}")


def _run(tree: Path, command: Sequence[str], run: Path) -> list[float]:
    """Runs once; returns seconds until each phase (NaN for one that was not seen) and the end, and processor time."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    places = ["--run", str(run)] if command[0] == "train" else []
    before, start = _children_s(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "girih", *command, *places],
        cwd=run.parent,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    seen: dict[str, float] = {}
    while process.poll() is None:
        for phase in PHASES:
            if phase not in seen and _reached(phase, run, process.pid):
                seen[phase] = time.perf_counter() - start
        time.sleep(LOOK_S)
    whole = time.perf_counter() - start
    error = b"" if process.stderr is None else process.stderr.read()
    if process.returncode:
        raise SystemExit(f"{tree}: status {process.returncode}: {error.decode()}")
    return [*(seen.get(phase, float("nan")) for phase in PHASES), whole, _children_s() - before]


def _reached(phase: str, run: Path, pid: int) -> bool:
    match phase:
        case "children":
            return bool(_read(Path(f"/proc/{pid}/task/{pid}/children")))
        case "trainer":
            return (run / ".lock").exists()
        case "group":
            return (run / "config.toml").exists()
        case "roles":
            return '"loader"' in _read(run / "processes.json")
        case _:
            return bool(_read(run / "metrics.jsonl"))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _children_s() -> float:
    """Processor time of children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The parts of pages."""
    columns = (*PHASES, "end", "processor time")
    lines = [
        [row["tree"], row["what"], *(pages.shown(row.get(name), "{:.2f}") for name in columns)]
        for row in pages.rows(results, "start")
    ]
    table = pages.table(("", "command", *columns), lines)
    return {"seconds": pages.paragraphs(f"{pages.measured(results)}. Seconds until:", table)}


if __name__ == "__main__":
    main()
