"""Kills one role after another, or a whole host: seconds until a run is further than before, lost updates, AUC of an undisturbed run.

    KUAIRAND=DIRECTORY girih bench faults [--strategy hybrid] [--roles loader trainer] [--rounds 5] [--seed 0]
    KUAIRAND=DIRECTORY girih bench faults --host [--strategy hybrid]      # as root: a node of a Ray cluster dies

The run is an epoch of the KuaiRand recipe (``recipes/kuairand/prepare.py`` makes DIRECTORY), or of ``--config FILE``. The process of a role with the
highest number is killed at a moment that ``--seed`` draws, between a tenth and nine tenths of the run. ``stalled s`` is the longest time after that from one record to
the next that is further than all before; it and ``auc`` are medians over rounds, the others sums and the farthest. ``--host``: see ``lost_host``.
"""

from __future__ import annotations

import argparse
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
import lost_host
import pages
from run_files import last_of, recorded, summary

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
    """Prints a row for the undisturbed run and for each role, or for each host that is lost."""
    parser = harness.parser("faults", __doc__, resumes=True)
    pages.add_option(parser, lost_host.page_parts)
    parser.add_argument("--strategy", nargs="+", choices=list(SHAPES), default=["hybrid"])
    parser.add_argument("--roles", nargs="+", choices=sorted(set().union(*ROLES.values())))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each role")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument(
        "--save-every-steps", type=int, default=10, help="steps from checkpoint to checkpoint"
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--host", action="store_true", help="a whole host dies, and not a process of each role"
    )
    options = parser.parse_args()
    if options.config == RECIPE and "KUAIRAND" not in os.environ:
        parser.error(f"KUAIRAND names no data; python {RECIPE.parent / 'prepare.py'} DIRECTORY makes them")
    for strategy in options.strategy:
        unknown = set(options.roles or ()) - set(ROLES[strategy])
        if unknown:
            parser.error(f"--roles {' '.join(sorted(unknown))}: {strategy} has {', '.join(ROLES[strategy])}")
    report = harness.Report("faults", options)
    if options.host and lost_host.missing(report):
        report.finish()
        return
    hosts = report.table(lost_host.TITLE, lost_host.COLUMNS) if options.host else None
    for strategy in options.strategy:
        words = [str(options.config), "--strategy", strategy]
        sets = [f"strategy.{each}" for each in SHAPES[strategy]]
        sets += [
            f"train.epochs={options.epochs}", f"train.log_every_steps={EVERY_STEPS}",
            f"checkpoint.every_steps={options.save_every_steps}",
        ]  # fmt: skip
        words += [word for each in sets for word in ("--set", each)]
        if hosts is not None:
            lost_host.add_rows(hosts, options, strategy, words)
        else:
            add_rows(report, options, strategy, words)
    report.finish()


def add_rows(
    report: harness.Report, options: argparse.Namespace, strategy: str, words: Sequence[str]
) -> None:
    """Adds a table with a row for the undisturbed run and for each role.

    Args:
        words: of ``girih train``, without the run directory.
    """
    table = report.table(
        f"one process killed amid a run of {strategy}",
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
        for role in options.roles or ROLES[strategy]:
            runs = []
            for number in range(options.rounds):
                step = round(whole[0]["steps"] * moments.uniform(0.1, 0.9))
                runs.append(
                    run(words, Path(folder, f"{role}-{number}"), role, step, moments.uniform(0, LATER_S))
                )
            row(table, role, runs, auc)


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


if __name__ == "__main__":
    main()
