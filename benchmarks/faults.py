"""Kills one role after another amid a run: seconds until it is further than before, lost updates, AUC beside an undisturbed run.

    KUAIRAND=DIRECTORY girih bench faults [--strategy hybrid] [--roles loader trainer] [--rounds 5] [--seed 0]

The run is an epoch of the KuaiRand recipe (``recipes/kuairand/prepare.py`` makes DIRECTORY), or of ``--config FILE``. The process of a role with the
highest number is killed at a moment that ``--seed`` draws, between a tenth and nine tenths of the run. ``stalled s`` is the longest time after that from one record to
the next that is further than all before; it and ``auc`` are medians over rounds, the others sums and the farthest.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

RECIPE = Path(__file__).parent.parent / "recipes" / "kuairand" / "kuairand.toml"
SHAPES = {
    "hybrid": ["trainers=2", "embedding_servers=2", "embedding_workers=2"],
    "asynchronous": ["trainers=2", "embedding_servers=2", "embedding_workers=2"],
    "hierarchical": ["groups=2", "servers_per_group=1"],
    "synchronous": ["trainers=2"],
    "substitution": ["trainers=2"],
}
SERVED = ("embedding-server", "embedding-worker", "loader", "trainer")
ROLES = {
    "hybrid": SERVED,
    "asynchronous": SERVED,
    "hierarchical": (*SERVED, "group-server", "dense-server"),
    "synchronous": ("trainer",),
    "substitution": ("trainer",),
}
EVERY_STEPS = 5
POLL_S = 0.01
LATER_S = 0.5
"""A kill comes up to so long after its step: amid whatever a process does."""


def main() -> None:
    """Prints a row for the undisturbed run and for each role."""
    parser = harness.parser("faults", __doc__)
    parser.add_argument("--strategy", choices=list(SHAPES), default="hybrid")
    parser.add_argument("--roles", nargs="+", choices=sorted(set().union(*ROLES.values())))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each role")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument(
        "--save-every-steps", type=int, default=10, help="steps from checkpoint to checkpoint"
    )
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    if options.config == RECIPE and "KUAIRAND" not in os.environ:
        parser.error(f"KUAIRAND names no data; python {RECIPE.parent / 'prepare.py'} DIRECTORY makes them")
    unknown = set(options.roles or ()) - set(ROLES[options.strategy])
    if unknown:
        parser.error(
            f"--roles {' '.join(sorted(unknown))}: {options.strategy} has {', '.join(ROLES[options.strategy])}"
        )
    report = harness.Report("faults", options)
    words = [str(options.config), "--strategy", options.strategy]
    sets = [f"strategy.{each}" for each in SHAPES[options.strategy]]
    sets += [
        f"train.epochs={options.epochs}", f"train.log_every_steps={EVERY_STEPS}",
        f"checkpoint.every_steps={options.save_every_steps}",
    ]  # fmt: skip
    words += [word for each in sets for word in ("--set", each)]
    table = report.table(
        f"one process killed amid a run of {options.strategy}",
        {
            "killed": "{}", "runs": "{}", "stalled s": "{:.1f}", "longest s": "{:.1f}", "restarts": "{}", "lost updates": "{}",
            "auc": "{:.4f}", "farthest of undisturbed": "{:+.4f}",
        },
    )  # fmt: skip
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole = [run(words, Path(folder, f"whole-{n}"), None) for n in range(options.rounds)]
        auc = statistics.median(each["auc"] for each in whole)
        row(table, "nobody", whole, auc)
        for role in options.roles or ROLES[options.strategy]:
            runs = []
            for number in range(options.rounds):
                step = round(whole[0]["steps"] * moments.uniform(0.1, 0.9))
                runs.append(
                    run(words, Path(folder, f"{role}-{number}"), role, step, moments.uniform(0, LATER_S))
                )
            row(table, role, runs, auc)
    report.finish()


def row(table: harness.ResultTable, killed: str, runs: Sequence[dict[str, Any]], auc: float) -> None:
    """Adds what came of some runs."""
    stalled_s, aucs = [each["stalled_s"] for each in runs], [each["auc"] for each in runs]
    table.row(
        {
            "killed": killed, "runs": len(runs), "stalled s": statistics.median(stalled_s), "longest s": max(stalled_s),
            "restarts": sum(each["restarts"] for each in runs), "lost updates": sum(each["lost_updates"] for each in runs),
            "auc": statistics.median(aucs), "farthest of undisturbed": max((each - auc for each in aucs), key=abs),
        }
    )  # fmt: skip


def run(
    words: Sequence[str], directory: Path, role: str | None, at_step: int = 0, later_s: float = 0.0
) -> dict[str, Any]:
    """Trains, and kills the last process of a role some time after so many steps are recorded; returns what came of it.

    Raises:
        RuntimeError: the run failed, or ended before it could be killed.
    """
    command = [sys.executable, "-m", "girih", "train", *words, "--run", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        furthest, since_s, stalled_s, is_killed = 0, 0.0, 0.0, False
        while process.poll() is None:
            now = time.perf_counter()
            step = recorded(directory)
            if step > furthest:
                if furthest and (is_killed or role is None):
                    stalled_s = max(stalled_s, now - since_s)
                furthest, since_s = step, now
            if role is not None and not is_killed and step >= at_step:
                time.sleep(later_s)
                os.kill(last_of(directory, role), signal.SIGKILL)
                is_killed, since_s = True, time.perf_counter()
            time.sleep(POLL_S)
        told = process.communicate()[0]
    found = summary(directory)
    if process.returncode or found is None or is_killed != (role is not None):
        raise RuntimeError(
            f"{' '.join(command)}: status {process.returncode}, {role} killed: {is_killed}\n{told}"
        )
    return {
        "auc": found["auc"], "steps": found["steps"], "lost_updates": found["lost_updates"],
        "restarts": sum(found["restarts"].values()), "stalled_s": stalled_s,
    }  # fmt: skip


def recorded(directory: Path) -> int:
    """The last step that is recorded; 0 before the first one."""
    file = directory / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    steps = [json.loads(line).get("step", 0) for line in lines[-1:] if line.endswith(b"}")]
    return steps[0] if steps else 0


def last_of(directory: Path, role: str) -> int:
    """The pid of the process of a role that has the highest index."""
    processes = json.loads((directory / "processes.json").read_text())
    pids: list[int] = [each["pid"] for each in processes if each["role"] == role]
    return pids[-1]


def summary(directory: Path) -> dict[str, Any] | None:
    """``summary.json``; None before the end."""
    file = directory / "summary.json"
    return json.loads(file.read_text()) if file.exists() else None


if __name__ == "__main__":
    main()
