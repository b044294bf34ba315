"""An hour of training with a fault every minute: memory, descriptors and threads by role, AUC beside an undisturbed run.

    KUAIRAND=DIRECTORY girih bench soak [--minutes 60] [--every-s 60] [--passes 200] [--svg docs/soak.svg]

The run is the KuaiRand recipe (``recipes/kuairand/prepare.py`` makes DIRECTORY), or ``--config FILE``, under ``hybrid`` at τ = 4 with two
trainers, servers and workers, for as many passes as take ``--minutes`` undisturbed. Role after role is killed, at a random moment of each
minute, but not before training has gone on after the last fault; every fifth fault stops a process for ten seconds instead. So many
passes would be learnt by heart: learning rates are the config's times ``--rates``.

**Flat** is a role whose resident memory, descriptors and threads grow by no more than 2 % in the second half of the run: Theil and Sen's
slope, over the length of that half. A process counts from 30 s of age on, and is compared with those of its role that have seen
as many steps (to 250, up to 2,000 steps), so that a fresh one, which holds less, is no fall, and one that fills up no growth. The undisturbed
run, whose processes are as old as itself, says whether a process grows by age; there the sum of all processes' shares of memory (PSS) counts too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import tomllib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import harness
import numpy as np
from census import LAUNCHER, OTHER, Census, Held
from faults import POLL_S, RECIPE, ROLES, SHAPES
from pictures import Chart, write_picture
from run_files import summary

STRATEGY = "hybrid"
STOP_EVERY = 5
SAMPLE_S = 5.0
WARM_S = 30.0
FILLING_STEPS, ALIKE_STEPS = 2000, 250
MOST_GROWTH = 0.02
LEAST_PAIRS = 50
TAIL_BYTES = 1 << 16
LAST_FAULT_AT = 0.97
WHAT = {"rss_bytes": "RSS MB", "descriptors": "descriptors", "threads": "threads"}
CALIBRATING = 3
WHOLE = "all, PSS"

Sample = tuple[float, int, float, int]
"""Seconds, steps that the process has seen, what it held, and its pid."""


@dataclass
class Fault:
    """Something that was done to a process: "kill", or "stop" for a while.

    Attributes:
        furthest: the last step that was recorded by then.
        stalled_s: from the fault to the record of a later step; None where there was none.
    """

    at_s: float
    kind: str
    role: str
    index: int
    furthest: int
    stalled_s: float | None = None


@dataclass
class Soaked:
    """A run that was watched.

    Attributes:
        passes_s: moments at which an evaluation was seen.
        steps_s: moments at which a step beyond those before was seen, and which.
        aucs: on validation data, by pass.
    """

    census: Census
    begun_s: float = 0.0
    ended_s: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    passes_s: list[float] = field(default_factory=list)
    steps_s: list[tuple[float, int]] = field(default_factory=list)
    aucs: dict[int, float] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def step_at(self, at_s: float) -> int:
        """The furthest step at a moment."""
        seen = bisect_right(self.steps_s, (at_s, sys.maxsize))
        return self.steps_s[seen - 1][1] if seen else 0

    def samples(self, held: Iterable[Held], what: str) -> Iterator[Sample]:
        """Holdings of one kind, of processes that are warm; steps that are made again after a restart count once."""
        for each in held:
            if each.age_s >= WARM_S:
                steps = self.step_at(each.at_s) - self.step_at(each.at_s - each.age_s)
                yield each.at_s, steps, getattr(each, what), each.pid


def main() -> None:
    """Trains without faults, then with; prints what was flat, and what came of both."""
    parser = harness.parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="from fault to fault")
    parser.add_argument("--faults", type=int, help="at most; default: until the run is nearly over")
    parser.add_argument("--stopped-s", type=float, default=10.0, help="a process that is stopped")
    parser.add_argument("--passes", type=int, help="over the data; default: as many as the minutes allow")
    parser.add_argument("--rates", type=float, default=0.01, help="learning rates, of the config's")
    parser.add_argument("--save-every-steps", type=int, default=20, help="from checkpoint to checkpoint")
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=Path, help="the picture, docs/soak.svg")
    options = parser.parse_args()
    if options.config == RECIPE and "KUAIRAND" not in os.environ:
        parser.error(f"KUAIRAND names no data; python {RECIPE.parent / 'prepare.py'} DIRECTORY makes them")
    report = harness.Report("soak", options)
    sets = settings(options)
    with tempfile.TemporaryDirectory(prefix="girih-soak-") as folder:
        passes = options.passes or passes_of(options, [*sets, f"train.epochs={CALIBRATING}"], Path(folder))
        sets.append(f"train.epochs={passes}")
        usual = soak(options, sets, Path(folder, "undisturbed"))
        most = int(LAST_FAULT_AT * usual.summary["steps"])
        runs = {
            "faults": soak(options, sets, Path(folder, "faults"), faults_of(options), most),
            "undisturbed": usual,
        }
    came_of(report, runs, passes)
    holdings(report, runs)
    stalls(report, runs["faults"])
    by_minute = {name: minutes_of(run) for name, run in runs.items()}
    by_minute_file = options.json.with_suffix(".minutes.json")
    if options.svg is not None:
        draw(options.svg, runs, by_minute["faults"])
    report.finish()
    by_minute_file.write_text(json.dumps(by_minute, indent=1) + "\n")
    if any(run.left for run in runs.values()):
        sys.exit(f"left behind: {[run.left for run in runs.values()]}")


def settings(options: argparse.Namespace) -> list[str]:
    """Overrides of the config."""
    config = tomllib.loads(options.config.read_text())
    sets = [f"strategy.{each}" for each in SHAPES[STRATEGY]]
    sets += [
        "strategy.staleness=4", "train.log_every_steps=5", "cluster.max_restarts=1000000",
        f"checkpoint.every_steps={options.save_every_steps}",
    ]  # fmt: skip
    for section in ("sparse_optimizer", "first_order_optimizer", "dense_optimizer"):
        if "lr" in config.get(section, {}):
            sets.append(f"{section}.lr={config[section]['lr'] * options.rates}")
    if "early_stopping" in config.get("train", {}):
        sets.append("train.early_stopping.patience=1000000")
    return sets


def passes_of(options: argparse.Namespace, sets: Sequence[str], folder: Path) -> int:
    """As many passes as take the minutes, by how long the last one of a short run took."""
    tried = soak(options, sets, folder / "calibrating")
    if len(tried.passes_s) < 2:
        raise RuntimeError("passes are too short to be timed; give --passes")
    pass_s = (tried.passes_s[-1] - tried.passes_s[0]) / (len(tried.passes_s) - 1)
    passes = max(2, math.ceil(60 * options.minutes / pass_s))
    print(f"a pass takes {pass_s:.1f} s: {passes} passes", file=sys.stderr, flush=True)
    return passes


def faults_of(options: argparse.Namespace) -> Iterator[tuple[float, str, str, int]]:
    """(seconds since training began, kind, role, a number to choose one of its processes by)."""
    dice, roles = random.Random(options.seed), ROLES[STRATEGY]
    for number in count() if options.faults is None else range(options.faults):
        kind = "stop" if number % STOP_EVERY == STOP_EVERY - 1 else "kill"
        at_s = options.every_s * (number + dice.uniform(0.5, 1.0))
        yield at_s, kind, roles[number % len(roles)], dice.randrange(1 << 16)


def soak(
    options: argparse.Namespace,
    sets: Sequence[str],
    directory: Path,
    faults: Iterator[tuple[float, str, str, int]] = iter(()),  # noqa: B008 (it has no element)
    most_steps: int = 0,
) -> Soaked:
    """Trains, with faults as they come due until so many steps, and looks at the run's processes every five seconds.

    Raises:
        RuntimeError: the run failed.
    """
    words = [sys.executable, "-m", "girih", "train", str(options.config), "--strategy", STRATEGY]
    words += [*(word for each in sets for word in ("--set", each)), "--run", str(directory)]
    census = Census()
    found = Soaked(census)
    with (
        tempfile.TemporaryFile() as told,
        subprocess.Popen(words, stdout=told, stderr=subprocess.STDOUT, env=census.environment) as process,
    ):
        census.begin(process.pid)
        hand = Hand(census, directory, faults, options.stopped_s, most_steps)
        due_s = 0.0
        try:
            while process.poll() is None:
                hand.act(found)
                if census.now_s() >= due_s:
                    census.take()
                    due_s = census.now_s() + SAMPLE_S
                with_patience(process)
        finally:
            hand.let_go()
            if process.poll() is None:
                process.kill()
        found.ended_s = census.now_s()
        told.seek(0)
        printed = told.read().decode(errors="replace")
    found.left = census.left()
    ended = summary(directory)
    if process.returncode or ended is None:
        raise RuntimeError(f"{' '.join(words)}: status {process.returncode}\n{printed[-8000:]}")
    found.summary = ended
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line)).get("split") == "valid"]
    found.aucs = {record["epoch"]: record["auc"] for record in records}
    return found


def with_patience(process: subprocess.Popen[bytes]) -> None:
    """Waits for a moment, less where the process ends."""
    try:
        process.wait(10 * POLL_S)
    except subprocess.TimeoutExpired:
        return


class Hand:
    """What does things to processes when they are due, and sees how long no step went beyond those before."""

    def __init__(
        self,
        census: Census,
        directory: Path,
        faults: Iterator[tuple[float, str, str, int]],
        stopped_s: float,
        most_steps: int,
    ) -> None:
        self._census, self._directory, self._stopped_s = census, directory, stopped_s
        self._faults, self._next = faults, next(faults, None)
        self._stopped: dict[int, float] = {}  # pid → when it goes on
        self._furthest, self._most_steps = 0, most_steps

    def act(self, found: Soaked) -> None:
        """Does what is due, and notes it."""
        now_s = self._census.now_s()
        for pid in [pid for pid, until_s in self._stopped.items() if now_s >= until_s]:
            self._signal(pid, signal.SIGCONT)
            del self._stopped[pid]
        self._see(found, now_s)
        if not found.begun_s or self._next is None or self._furthest > self._most_steps:
            return
        if found.faults and found.faults[-1].stalled_s is None:
            return  # one after the other: trainers that are killed while they come back would never do
        at_s, kind, role, number = self._next
        if now_s < found.begun_s + at_s:
            return
        there = [each for each in processes(self._directory) if each["role"] == role]
        if not there:
            return  # they are about to come back
        one = there[number % len(there)]
        if self._signal(one["pid"], signal.SIGSTOP if kind == "stop" else signal.SIGKILL):
            if kind == "stop":
                self._stopped[one["pid"]] = now_s + self._stopped_s
            found.faults.append(Fault(now_s, kind, role, one["index"], self._furthest))
            print(
                f"{now_s:7.1f} s  step {self._furthest}: {kind} {role} {one['index']}",
                file=sys.stderr,
                flush=True,
            )
            self._next = next(self._faults, None)

    def let_go(self) -> None:
        """Lets all go on that are stopped."""
        for pid in self._stopped:
            self._signal(pid, signal.SIGCONT)

    def _signal(self, pid: int, number: int) -> bool:
        if not self._census.is_of_run(pid):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _see(self, found: Soaked, now_s: float) -> None:
        records = tail_of(self._directory / "metrics.jsonl")
        passes = max((r["epoch"] for r in records if r.get("split") == "valid"), default=0)
        found.passes_s += [now_s] * (passes - len(found.passes_s))
        step = max((record["step"] for record in records), default=0)
        if step > self._furthest:
            found.begun_s = found.begun_s or now_s
            self._furthest = step
            found.steps_s.append((now_s, step))
            for fault in found.faults:
                if fault.stalled_s is None and step > fault.furthest:
                    fault.stalled_s = now_s - fault.at_s


def processes(directory: Path) -> list[dict[str, Any]]:
    """The run's processes, as ``processes.json`` has them."""
    file = directory / "processes.json"
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return found


def tail_of(file: Path) -> list[dict[str, Any]]:
    """The last records of a file of lines, those that are there as a whole."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - TAIL_BYTES))
        read = lines.read().split(b"\n")
    whole = read[1 if size > TAIL_BYTES else 0 : -1]
    return [json.loads(line) for line in whole]


def growth(samples: Iterable[Sample], begin_s: float, end_s: float) -> float | None:
    """The growth of what processes hold between two moments, as a share of its level; None where there is too little to say.

    Args:
        samples: of all processes that are alike.
    """
    by_age: defaultdict[int, list[Sample]] = defaultdict(list)
    for each in samples:
        if begin_s <= each[0] <= end_s and each[2] > 0:
            by_age[min(each[1], FILLING_STEPS) // ALIKE_STEPS].append(each)
    slopes = []
    for age, alike in by_age.items():
        at, _, values, lives = np.array(alike).T
        first, second = np.triu_indices(len(at), 1)
        counts = at[first] != at[second]
        if age < FILLING_STEPS // ALIKE_STEPS:
            counts &= lives[first] != lives[second]  # in one life it is older, too
        first, second = first[counts], second[counts]
        slopes.append((np.log(values[second]) - np.log(values[first])) / (at[second] - at[first]))
    if sum(map(len, slopes)) < LEAST_PAIRS:
        return None
    return float(np.expm1(np.median(np.concatenate(slopes)) * (end_s - begin_s)))


def came_of(report: harness.Report, runs: Mapping[str, Soaked], passes: int) -> None:
    """Adds a table of what came of both runs."""
    table = report.table(
        f"{passes} passes under {STRATEGY}, role after role killed, every {STOP_EVERY}th fault a stop",
        {
            "run": "{}", "minutes": "{:.1f}", "killed": "{}", "stopped": "{}", "restarts": "{}", "stalled s": "{:.1f}",
            "at most s": "{:.1f}", "lost updates": "{}", "auc, last pass": "{:.4f}", "of undisturbed": "{:+.4f}",
            "widest, of all passes": "{:.4f}", "auc on test data": "{:.4f}", "left behind": "{}",
        },
    )  # fmt: skip
    usual = runs["undisturbed"]
    for name, run in runs.items():
        kinds = Counter(fault.kind for fault in run.faults)
        stalled = [fault.stalled_s for fault in run.faults if fault.stalled_s is not None]
        last = max(run.aucs)
        table.row(
            {
                "run": name, "minutes": (run.ended_s - run.begun_s) / 60, "killed": kinds["kill"],
                "stopped": kinds["stop"], "restarts": sum(run.summary["restarts"].values()),
                "stalled s": statistics.median(stalled) if stalled else None, "at most s": max(stalled, default=None),
                "lost updates": run.summary["lost_updates"], "auc, last pass": run.aucs[last],
                "of undisturbed": run.aucs[last] - usual.aucs[last],
                "widest, of all passes": max(abs(auc - usual.aucs[each]) for each, auc in run.aucs.items()),
                "auc on test data": run.summary["auc"], "left behind": len(run.left),
            }
        )  # fmt: skip


def holdings(report: harness.Report, runs: Mapping[str, Soaked]) -> None:
    """Adds a table of what processes of each role held in the second half, and whether it was flat."""
    table = report.table(
        f"what each process held in the second half: the median, and how it grew (flat: by {MOST_GROWTH:.0%} at most)",
        {
            "run": "{}", "role": "{}", "lives": "{}",
            **{column: form for what in WHAT.values() for column, form in ((what, "{:.0f}"), (f"{what} grew", "{:+.1%}"))},
            "flat": "{}",
        },
    )  # fmt: skip
    for name, run in runs.items():
        half_s = (run.begun_s + run.ended_s) / 2
        for role, held in by_role(run.census.held).items():
            row: dict[str, Any] = {"run": name, "role": role, "lives": len({each.pid for each in held})}
            late = [each for each in held if each.at_s >= half_s and each.age_s >= WARM_S]
            for what, column in WHAT.items():
                scale = 1e6 if what == "rss_bytes" else 1
                if late:
                    row[column] = statistics.median(getattr(each, what) for each in late) / scale
                row[f"{column} grew"] = growth(run.samples(held, what), half_s, run.ended_s)
            row["flat"] = verdict(row[f"{column} grew"] for column in WHAT.values())
            table.row(row)
        for role, points in whole_of(run).items():
            if run.faults and role == WHOLE:
                continue  # the sum of processes of all ages
            grew = growth(((at_s, FILLING_STEPS, value, 0) for at_s, value in points), half_s, run.ended_s)
            level = [value for at_s, value in points if at_s >= half_s]
            table.row(
                {
                    "run": name, "role": role, "RSS MB": statistics.median(level) / 1e6 if level else None,
                    "RSS MB grew": grew, "flat": verdict([grew]),
                }
            )  # fmt: skip


def verdict(grew: Iterable[float | None]) -> str:
    """Whether all of some growths are small enough."""
    found = list(grew)
    if None in found:
        return "too short to say"
    return "yes" if all(each <= MOST_GROWTH for each in found if each is not None) else "no"


def by_role(held: Iterable[Held]) -> dict[str, list[Held]]:
    """What was seen of each role, the launcher last, without passing helpers."""
    found: defaultdict[str, list[Held]] = defaultdict(list)
    for each in held:
        found[each.role].append(each)
    found.pop(OTHER, None)
    return {role: found[role] for role in sorted(found, key=lambda role: (role == LAUNCHER, role))}


def whole_of(run: Soaked) -> dict[str, list[tuple[float, float]]]:
    """(seconds, bytes) of the run as a whole: shares of memory at moments when all of its processes are warm, and shared memory."""
    at: defaultdict[float, list[Held]] = defaultdict(list)
    for each in run.census.held:
        at[each.at_s].append(each)
    most = max((len(there) for there in at.values()), default=0)
    shares = [
        (at_s, float(sum(each.pss_bytes for each in there)))
        for at_s, there in at.items()
        if len(there) == most and all(each.age_s >= WARM_S for each in there)
    ]
    segments = [(each.at_s, float(each.bytes)) for each in run.census.segments if each.num]
    return {WHOLE: shares, "shared memory": segments}


def stalls(report: harness.Report, run: Soaked) -> None:
    """Adds a table of how long no step went beyond those before, by role and kind of fault."""
    table = report.table(
        "from a fault to a step beyond those before, seconds",
        {"role": "{}", "fault": "{}", "times": "{}", "median": "{:.1f}", "most": "{:.1f}"},
    )
    alike: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for fault in run.faults:
        if fault.stalled_s is not None:
            alike[fault.role, fault.kind].append(fault.stalled_s)
    for (role, kind), seconds in sorted(alike.items()):
        table.row(
            {"role": role, "fault": kind, "times": len(seconds), "median": statistics.median(seconds), "most": max(seconds)}
        )  # fmt: skip


def minutes_of(run: Soaked) -> dict[str, Any]:
    """Medians by minute of what processes of each role held, (minute, number) each, and all faults."""
    found: dict[str, Any] = {}
    for what in WHAT:
        found[what] = {
            role: medians((each.at_s, getattr(each, what)) for each in held if each.age_s >= WARM_S)
            for role, held in by_role(run.census.held).items()
        }
    found["whole"] = {role: medians(points) for role, points in whole_of(run).items()}
    found["segments"] = medians((each.at_s, each.num) for each in run.census.segments)
    found["aucs"] = sorted(run.aucs.items())
    found["faults"] = [[round(f.at_s, 1), f.kind, f.role, f.index, f.stalled_s] for f in run.faults]
    return found


def medians(points: Iterable[tuple[float, float]]) -> list[tuple[int, float]]:
    """(minute, median) of (seconds, number)."""
    by_minute: defaultdict[int, list[float]] = defaultdict(list)
    for at_s, value in points:
        by_minute[int(at_s // 60)].append(value)
    return [(minute, statistics.median(values)) for minute, values in sorted(by_minute.items())]


def draw(file: Path, runs: Mapping[str, Soaked], by_minute: Mapping[str, Any]) -> None:
    """Memory, descriptors and threads by minute, and AUC by pass."""
    scaled = {
        role: [(minute, value / 1e6) for minute, value in points]
        for role, points in by_minute["rss_bytes"].items()
    }
    charts = [
        Chart("with faults", "minute", "resident MB of a process", scaled),
        Chart("with faults", "minute", "descriptors", by_minute["descriptors"]),
        Chart("with faults", "minute", "threads", by_minute["threads"]),
        Chart("both runs", "pass", "AUC on validation data", {n: sorted(r.aucs.items()) for n, r in runs.items()}),
    ]  # fmt: skip
    write_picture(file, charts)


if __name__ == "__main__":
    main()
