"""A whole host dies: a node of a Ray cluster loses its link, and all its processes are killed.

Three hosts (network namespaces) are nodes of a cluster. The run needs two of them, and the third is a spare. A host has its own shared memory, so
that its rows are lost with it. The launcher and the head of the cluster are on a host that survives. If ``girih train`` ends, the
same command with ``--resume`` continues on the other two hosts, as a user would. Nothing else helps the run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import network
import pages
import ray_runs
from run_files import recorded, summary

from girih.app.run_config import RunConfig
from girih.cluster.roles import HostSpec

sys.path.append(str(harness.ROOT / "tests" / "strategies"))  # for the comparison of two runs

HOSTS, RATE = ("one", "two", "tre"), "1gbit"
"""The first one has the head and the launcher."""
OWN_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
"""A prefix of a command that gives it, and the processes that it starts, their own shared memory."""
POLL_S = 0.02
LATER_S = 0.5
LIMIT_S = 900.0
TITLE = "a host lost during a run"
COLUMNS = {
    "strategy": "{}", "round": "{}", "lost": "{}", "at step": "{}", "first message s": "{:.1f}", "girih train": "{}", "ended s": "{:.1f}", "further s": "{:.1f}",
    "steps repeated": "{}", "restarts": "{}", "lost updates": "{}", "auc": "{:.4f}", "of undisturbed": "{:+.4f}",
    "rows differ by": "{:.1e}", "parameters differ by": "{:.1e}", "message": "{}",
}  # fmt: skip
"""Seconds count from the loss. ``further`` is the first recorded step beyond all steps before the loss, ``--resume`` included."""


def missing(report: harness.Report) -> bool:
    """True if no host can be lost here. The report then has the reason."""
    reason = network.missing()
    if reason is not None:
        report.skip("all", reason)
    return reason is not None or report.peer("ray", "pip install girih[cluster] does") is None


def add_rows(
    table: harness.ResultTable, options: argparse.Namespace, strategy: str, words: Sequence[str]
) -> None:
    """Adds a row for each round to a table with :data:`COLUMNS`. The undisturbed run is round 0.

    Args:
        words: of ``girih train``, without the run directory.
    """
    moments = random.Random(options.seed)
    num_cpus = -(-_num_processes(words) // 2)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        with network.network(HOSTS, RATE) as hosts, ray_runs.cluster(nodes(hosts), num_cpus) as address:
            undisturbed = Running(hosts.places[HOSTS[0]], [*words, "--run", str(whole), "--cluster", address])
            undisturbed.until(lambda: False)
        found = undisturbed.checked(whole)
        key = {"strategy": strategy, "round": 0}
        if not table.has(key):
            table.row({**key, "lost": "nothing", "auc": found["auc"], "lost updates": found["lost_updates"]})
        for number in range(1, 1 + options.rounds):
            step, later_s = round(found["steps"] * moments.uniform(0.2, 0.8)), moments.uniform(0, LATER_S)
            key = {"strategy": strategy, "round": number}
            if not table.has(key):
                run = Path(folder, f"{number}")
                row = lose_one(words, run, step, later_s, num_cpus)
                table.row(
                    {**key, **row, "of undisturbed": row["auc"] - found["auc"], **differences(run, whole)}
                )


def nodes(hosts: network.Hosts) -> list[HostSpec]:
    """The hosts, each with its own shared memory."""
    return [replace(host, command=(*host.command, *OWN_MEMORY)) for host in hosts.places.values()]


def lose_one(
    words: Sequence[str], directory: Path, at_step: int, later_s: float, num_cpus: int
) -> dict[str, Any]:
    """Trains, takes a host away some time after a step is recorded, and returns columns of the table.

    Raises:
        RuntimeError: the run ended before the loss, or did not continue.
    """
    with network.network(HOSTS, RATE) as hosts, ray_runs.cluster(nodes(hosts), num_cpus) as address:
        head = hosts.places[HOSTS[0]]
        command = [*words, "--run", str(directory), "--cluster", address]
        run = Running(head, command)
        if not run.until(lambda: recorded(directory) >= at_step):
            raise RuntimeError(f"the run ended before step {at_step}: {run.text}")
        time.sleep(later_s)
        victim, titles = _victim(directory)
        furthest, checkpoint = recorded(directory), _newest_step(directory)
        lost_s = time.perf_counter()
        network.lose(hosts, victim)
        row: dict[str, Any] = {
            "lost": ", ".join(titles),
            "at step": furthest,
            "steps repeated": furthest - checkpoint,
        }
        row["girih train"] = "goes on"
        is_further = run.until(lambda: recorded(directory) > furthest)
        messages = [(said_s - lost_s, line) for said_s, line in run.lines if said_s > lost_s and line.strip()]
        if messages:
            row["first message s"], row["message"] = messages[0][0], messages[-1][1][:200]
        if not is_further:
            row["girih train"], row["ended s"] = (
                f"ends with {run.process.returncode}",
                time.perf_counter() - lost_s,
            )
            run = Running(head, [*command, "--resume"])
            run.until(lambda: recorded(directory) > furthest)
        row["further s"] = time.perf_counter() - lost_s
        run.until(lambda: False)
    found = run.checked(directory)
    return row | {key: found[key] for key in ("auc",)} | {
        "restarts": sum(found["restarts"].values()), "lost updates": found["lost_updates"],
    }  # fmt: skip


def differences(run: Path, other: Path) -> dict[str, float]:
    """The largest relative difference of rows, and of parameters, at the ends of two runs."""
    from runs import difference

    rows, parameters = difference(run, other)
    return {"rows differ by": float(rows), "parameters differ by": float(parameters)}


class Running:
    """A ``girih train`` on a host.

    Attributes:
        lines: the time and the text of each line that it printed.
    """

    def __init__(self, host: HostSpec, words: Sequence[str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [*host.command, sys.executable, "-m", "girih", "train", *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **host.environment},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """The end of its output."""
        return "".join(line for _, line in self.lines)[-2000:]

    def until(self, happened: Callable[[], bool]) -> bool:
        """Waits for a condition, or for the end of the process. Returns whether the condition came first.

        Raises:
            TimeoutError: neither came.
        """
        limit_s = time.perf_counter() + LIMIT_S
        while not happened():
            if time.perf_counter() > limit_s:
                self.process.kill()
                raise TimeoutError(f"girih train did not continue or end within {LIMIT_S:.0f} s: {self.text}")
            if self.process.poll() is not None:
                self._reader.join()
                return False
            time.sleep(POLL_S)
        return True

    def checked(self, directory: Path) -> dict[str, Any]:
        """The summary of the run.

        Raises:
            RuntimeError: the run failed.
        """
        found = summary(directory)
        if self.process.wait() or found is None:
            raise RuntimeError(f"girih train ended with status {self.process.returncode}: {self.text}")
        return found

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.perf_counter(), line))


def page_parts(results: Mapping[str, Any]) -> dict[str, str | None]:
    """The table of ``docs/scale.md``."""
    lines = [
        [
            row["strategy"], row["lost"], pages.shown(row.get("at step")), pages.shown(row.get("first message s"), "{:.1f}"),
            pages.shown(row.get("girih train")), pages.shown(row.get("further s"), "{:.1f}"), pages.shown(row.get("steps repeated")),
            pages.shown(row.get("lost updates")), f"{row['auc']:.4f}", pages.shown(row.get("of undisturbed"), "{:+.4f}"),
            pages.shown(row.get("rows differ by"), "{:.1g}"), pages.shown(row.get("parameters differ by"), "{:.1g}"),
        ]
        for row in pages.rows(results, TITLE)
    ]  # fmt: skip
    header = (
        "strategy", "processes of the lost host", "at step", "first message, s", "`girih train`", "further than before, s", "steps repeated",
        "lost updates", "AUC", "minus undisturbed", "rows differ by", "parameters differ by",
    )  # fmt: skip
    table = pages.table(header, lines)
    return {"hosts": pages.paragraphs(f"{pages.measured(results)}.", table) if table else None}


def _victim(directory: Path) -> tuple[str, list[str]]:
    """The name of the host with most processes of the run, except the first host, and the titles of these processes."""
    processes = json.loads((directory / "processes.json").read_text())
    titles = {}
    for name in HOSTS[1:]:
        pids = network.pids(name)
        titles[name] = [f"{each['role']} {each['index']}" for each in processes if each["pid"] in pids]
    victim = max(titles, key=lambda name: len(titles[name]))
    if not titles[victim]:
        raise RuntimeError(f"all processes are on the host of the launcher: {processes}")
    return victim, titles[victim]


def _newest_step(directory: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    found = [file.parent.name for file in (directory / "checkpoints").glob("step-*/manifest.json")]
    return max((int(name.removeprefix("step-")) for name in found), default=0)


def _num_processes(words: Sequence[str]) -> int:
    config, _, name, *sets = words
    strategy = RunConfig.load(Path(config), overrides=sets[1::2], strategy=name).strategy
    return strategy.trainers + sum(strategy.roles.values())
