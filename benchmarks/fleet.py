"""Runs of real processes, measured from the first trainer: samples/s, processor time, bytes of links.

``measure`` starts this file as a program of its own, on the host of trainer 0; it starts all others.

Shapes: R rows of data, F = 26 categorical and 13 numeric features.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import cpu_groups
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from curves import Curve
from sampler import Sampler

from girih.app.run_config import RunConfig
from girih.cli.trainer import beginning
from girih.cluster.cluster import Cluster
from girih.cluster.roles import Hosts, HostSpec, RoleName, title
from girih.comm.registry import find
from girih.comm.service import answer
from girih.data import Dataset
from girih.data.options import SplitName
from girih.planner import plan as plans
from girih.processes.pipe import module_command
from girih.runs.callbacks import Callback
from girih.sparse.options import StoreOptions
from girih.sparse.protocol import NO_TURN, SparseVerb
from girih.store import shard_of
from girih.telemetry.status_file import read_all
from girih.trainer import Trainer

FEATURES, NUMERIC = 26, 13
FILLED_AT_ONCE = 1 << 19
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
TRIES, MOST_OTHERS = 3, 0.1
TICKS_S = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Plan:
    """One run that is to be measured.

    Attributes:
        config, overrides: as of ``girih train``; the strategy is among the overrides.
        warmup, steps, windows: steps that do not count, then windows of so many steps each.
        hosts: where processes live; see :class:`girih.cluster.roles.HostSpec`.
        links: interfaces whose bytes are counted, as this machine's root sees them.
        keep: where run directories go that are to be kept; None keeps none.
        fill: rows that servers have made, of ids 0, 1, …, before the first step.
        sample_ms: how often processes and links are looked at within the windows; None looks at their ends alone.
        held: a file of ``girih plan``, which the run holds.
        bounds, no_bounds: file → content that bounds hosts' cores from the end of the first ``steps`` steps on (from the first step on
            without a warm-up), and that lifts the bounds after the last window. So the run starts and ends at full speed.
        usage: host → the file with the processor time of its group.
        more_steps: after all windows, so that no trainer has ended by then where each has its own pace. Needs ``keep``: the progress of
            each trainer is in its status file.
    """

    config: str
    overrides: tuple[str, ...]
    warmup: int = 10
    steps: int = 10
    windows: int = 4
    hosts: Mapping[str, HostSpec] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    keep: str | None = None
    fill: int = 0
    sample_ms: float | None = None
    held: str | None = None
    bounds: Mapping[str, str] = field(default_factory=dict)
    no_bounds: Mapping[str, str] = field(default_factory=dict)
    usage: Mapping[str, str] = field(default_factory=dict)
    more_steps: int = 0

    @property
    def last_step(self) -> int:
        """Of the windows."""
        return self.warmup + self.steps * self.windows

    @property
    def max_steps(self) -> int:
        return self.last_step + self.more_steps


def add_windows(
    parser: argparse.ArgumentParser, *, warmup: int = 20, steps: int = 20, windows: int = 5
) -> None:
    """Options of the steps that a :class:`Plan` measures."""
    parser.add_argument("--warmup", type=int, default=warmup, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=steps, help="of a window")
    parser.add_argument("--windows", type=int, default=windows)


def windows_of(options: Mapping[str, Any]) -> dict[str, int]:
    """The options of :func:`add_windows` among others."""
    return {name: options[name] for name in ("warmup", "steps", "windows")}


def write_task(
    directory: Path,
    *,
    rows: int,
    cardinality: int,
    zipf: float | None = 1.2,
    dim: int = 16,
    batch: int = 4096,
    files: int = 4,
    bag: int = 1,
    shuffle: bool = True,
    table: str = "",
    hidden: Sequence[int] = (400, 400, 400),
) -> Path:
    """Writes Parquet data and a config; returns the config's path.

    Args:
        cardinality: ids of each feature. zipf: how skewed they are; None draws all alike.
        bag: ids of a bag. table: lines of TOML for a table that all features share.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(files):
        size = rows // files
        columns: dict[str, Any] = {}
        for feature in range(FEATURES):
            shape = size * bag
            drawn = (
                rng.integers(0, cardinality, shape) if zipf is None else rng.zipf(zipf, shape) % cardinality
            )
            drawn = pa.array(drawn)
            if bag > 1:
                drawn = pa.ListArray.from_arrays(
                    pa.array(np.arange(0, shape + 1, bag, dtype=np.int32)), drawn
                )
            columns[f"c{feature}"] = drawn
        for feature in range(NUMERIC):
            columns[f"x{feature}"] = rng.normal(size=size).astype(np.float32)
        columns["click"] = (rng.random(size) < 0.25).astype(np.int8)
        pq.write_table(pa.table(columns), directory / f"train-{number}.parquet", row_group_size=1 << 16)
    pooling = 'pooling = "sum"\n' if bag > 1 else ""
    lines = ["[data]", f'train = "{directory}/train-*.parquet"', f"batch_size = {batch}"]
    lines += [f"shuffle = {str(shuffle).lower()}", ""]
    for feature in range(FEATURES):
        of = 'table = "all"\n' if table else f"dim = {dim}\n"
        lines += ["[[features]]", f'name = "c{feature}"', 'kind = "categorical"', of + pooling]
    for feature in range(NUMERIC):
        lines += ["[[features]]", f'name = "x{feature}"', 'kind = "numeric"', ""]
    if table:
        lines += ["[[tables]]", 'name = "all"', f"dim = {dim}", table]
    lines += [
        "[labels]",
        'names = ["click"]',
        "",
        "[model]",
        'name = "deepfm"',
        f"hidden = {list(hidden)}",
        "",
    ]
    lines += ["[train]", "epochs = 1000", "seed = 1", ""]
    path = directory / "config.toml"
    path.write_text("\n".join(lines))
    return path


def strategy_override(strategy: Mapping[str, Any]) -> str:
    """``[strategy]`` as an override of ``girih train``."""
    return override("strategy", strategy)


def override(section: str, values: Mapping[str, Any]) -> str:
    """A section of the config as an override of ``girih train``."""
    return f"{section} = {{{', '.join(f'{key} = {json.dumps(value)}' for key, value in values.items())}}}"


DISTURBED = {"others, of the cores": "{:.0%}", "disturbed": "{}"}
"""Columns of :func:`disturbance`."""


def measure(plan: Plan, *, timeout_s: float = 300.0, tries: int = TRIES) -> dict[str, Any]:
    """Runs a plan; returns what ``_run`` found, of the least disturbed try, and how many tries there were.

    A run in which others took more than a tenth of the cores is done again, ``tries`` times in all at most;
    where all tries were disturbed, :func:`disturbance` tells.

    Raises:
        RuntimeError: it failed; what it said.
    """
    found: list[dict[str, Any]] = []
    while len(found) < tries and (not found or others(found[-1]) > MOST_OTHERS):
        keep = None if plan.keep is None else _try_folder(plan.keep, len(found))
        found.append(_measure_once(dataclasses.replace(plan, keep=keep), timeout_s))
    best = min(range(len(found)), key=lambda number: others(found[number]))
    if plan.keep is not None:
        shutil.rmtree(plan.keep, ignore_errors=True)
        for number in range(len(found)):
            if number == best:
                Path(_try_folder(plan.keep, number)).rename(plan.keep)
            else:
                shutil.rmtree(_try_folder(plan.keep, number))
    return {**found[best], "tries": len(found)}


def _try_folder(keep: str, number: int) -> str:
    return f"{keep}.try-{number}"


def disturbance(*found: Mapping[str, Any]) -> dict[str, Any]:
    """For a row of a table: what others took of the processors in the worst of its runs, and whether that was too much."""
    most = max(others(run) for run in found)
    return {"others, of the cores": most, "disturbed": "yes" if most > MOST_OTHERS else "no"}


def others(found: Mapping[str, Any]) -> float:
    """The share of the cores' time that was not the run's own processes'; what the kernel does for links is in it."""
    taken_s = median(found, "machine_cpu_s") - median(found, "cpu_s")
    return taken_s / CORES / median(found, "step_s")


def _measure_once(plan: Plan, timeout_s: float) -> dict[str, Any]:
    first = plan.hosts.get("trainer 0", HostSpec())
    command = [*first.command, sys.executable, __file__]
    done = subprocess.run(
        command,
        input=json.dumps(dataclasses.asdict(plan)),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **first.environment},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{plan.overrides}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Meter:
    """Hears records of a run and notes time, processor time and bytes by then, at the ends of whole windows.

    Args:
        links: interfaces whose bytes are counted, as this machine's root sees them.
        every: steps of a window; warmup: steps that do not count. sample_ms: see :class:`Plan`.

    Attributes:
        plan: that of the run, once it begins.
    """

    def __init__(
        self,
        cluster: Cluster,
        links: Sequence[str],
        *,
        every: int,
        warmup: int,
        sample_ms: float | None = None,
        usage: Mapping[str, str] | None = None,
        run: Path | None = None,
    ) -> None:
        self._cluster, self._links, self._usage, self._run = cluster, links, usage or {}, run
        self._every, self._warmup = every, warmup
        self._pids: dict[str, int] = {}
        self._sample_ms = sample_ms
        self._sampler: Sampler | None = None
        self._trainer: Trainer | None = None
        self.notes: list[dict[str, Any]] = []
        self.plan: Mapping[str, Any] = {}

    def watch(self, trainer: Trainer) -> None:
        """Notes the phases of this trainer too."""
        self._trainer = trainer

    def samples(self) -> dict[str, Any] | None:
        """What was sampled between the first note and the last."""
        if self._sampler is None:
            return None
        return self._sampler.take(self.notes[0]["time_s"], self.notes[-1]["time_s"])

    def on_metrics(self, record: Mapping[str, Any]) -> None:
        if self._sample_ms is not None and self._sampler is None:  # it takes a moment to begin
            self._pids = _pids_of(self._cluster)
            self._sampler = Sampler(self._pids.values(), self._links, self._sample_ms)
        if record["step"] < self._warmup or record["step"] % self._every:
            return  # the last one may come when loaders have ended
        self._pids = self._pids or _pids_of(self._cluster)
        note: dict[str, Any] = {"time_s": time.perf_counter()}
        note |= {key: record[key] for key in ("step", "examples", "rows", "rss_bytes")}
        note |= use(self._pids, self._links, self._usage)
        note["phases_s"] = {} if self._trainer is None else dict(self._trainer.spans.totals_s)
        note["tiers"] = _tiers(self._trainer)
        note["progress"] = {} if self._run is None else _progress(self._run)
        self.notes.append(note)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Training begins."""
        self.plan = plan

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        """Nothing is evaluated."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """All is noted."""


def use(pids: Mapping[str, int], links: Sequence[str], usage: Mapping[str, str]) -> dict[str, Any]:
    """The processor time and the bytes so far: part of a note."""
    return {
        "machine_cpu_s": machine_cpu_s(),
        "cpu_s": {title: cpu_s(pid) for title, pid in pids.items()},
        "rss": {title: rss_bytes(pid) for title, pid in pids.items()},
        "links": {link: link_counts(link, "bytes") for link in links},
        "packets": {link: link_counts(link, "packets") for link in links},
        "hosts_cpu_s": {host: cpu_groups.used_s(Path(file)) for host, file in usage.items()},
    }


class Bounds(Callback):
    """Bounds hosts' cores during a run, see :class:`Plan`. Evaluations run at full speed: they change nothing that is measured."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._bounded = plan, False

    def watch(self, trainer: Trainer) -> None:
        """Lifts the bounds during evaluations."""
        scoring = trainer._run.scoring
        score = scoring.score

        def unbounded(data: Dataset) -> Any:
            was_bounded = self._bounded
            self._bound(False)
            try:
                return score(data)
            finally:
                self._bound(was_bounded)

        scoring.score = unbounded  # type: ignore[method-assign]

    def on_plan(self, record: Mapping[str, Any]) -> None:
        """Bounds the hosts if all steps count."""
        if not self._plan.warmup:
            self._bound(True)

    def on_metrics(self, record: Mapping[str, Any]) -> None:
        """Bounds the hosts after the first steps, and lifts the bounds after the last window."""
        if record["step"] == self._plan.steps and self._plan.warmup:
            self._bound(True)
        if record["step"] == self._plan.last_step:
            self._bound(False)

    def _bound(self, bounded: bool) -> None:
        self._bounded = bounded
        cpu_groups.write(self._plan.bounds if bounded else self._plan.no_bounds)


def _started(trainers: int, words: Sequence[str], hosts: Hosts) -> Cluster:
    """The cluster of all trainers, which this process starts and of which it becomes the first one.

    Args:
        words: arguments of ``girih`` that make one of the others.
        hosts: where all processes of the run live; this one must be in that of trainer 0 already.
    """
    cluster = Cluster(hosts=hosts)
    cluster._bind = cluster.host(RoleName.TRAINER, 0)
    torch.set_num_threads(max(1, torch.get_num_threads() // trainers))
    supervisor = cluster.supervise(trainers, module_command("girih", *words))
    try:
        for rank in range(1, trainers):
            supervisor.start_trainer(rank)
        cluster._meet(0, trainers, cluster._hello())
    except BaseException:
        cluster.close(failed=True)
        raise
    return cluster


def _run(plan: Plan) -> dict[str, Any]:
    """The first trainer: what ``girih train`` does, with a meter."""
    every = [f"train.max_steps={plan.max_steps}", f"train.log_every_steps={plan.steps}"]
    overrides = [*plan.overrides, *every]
    settings = RunConfig.load(Path(plan.config), overrides=overrides)
    strategy = settings.strategy
    data = {split: settings.dataset(split) for split in SPLITS if getattr(settings.data, split) is not None}
    words = ["train", plan.config, *(word for each in overrides for word in ("--set", each))]
    if plan.held is not None:
        settings = dataclasses.replace(settings, plan=plans.Plan.read(Path(plan.held)))
        words += ["--plan", plan.held]
    keep = None if plan.keep is None else Path(plan.keep)
    cluster = _started(strategy.trainers, words, plan.hosts)
    try:
        ranks = cluster.ranks
        ranks.broadcast(beginning())  # there is something to train, and nothing to go on with
        meter = Meter(
            cluster,
            plan.links,
            every=plan.steps,
            warmup=plan.warmup,
            sample_ms=plan.sample_ms,
            usage=plan.usage,
            run=keep,
        )
        bounds, curve = Bounds(plan), Curve()
        with settings.trainer(run=keep, callbacks=[meter, bounds, curve], cluster=cluster) as trainer:
            trainer.check(data["train"], data.get("valid"))
            start = time.perf_counter()
            fill(trainer, data["train"], plan.fill, settings.store)
            filled_s = time.perf_counter() - start
            curve.watch(trainer)
            bounds.watch(trainer)
            meter.watch(trainer)
            trainer.fit(data["train"], data.get("valid"))
            samples = meter.samples()
            final = data.get("test", data.get("valid"))
            metrics = None if final is None else trainer.evaluate(final)  # as the other trainers do
            summary = trainer.summary(metrics, duration_s=0.0)
            trainer.end(summary)  # else closing asks the others, which have ended, for another summary
    except BaseException:
        cluster.close(failed=True)
        raise
    return {
        "windows": windows(meter.notes[: 1 + plan.windows]),
        "notes": meter.notes,
        "summary": summary,
        "plan": dict(meter.plan),
        "samples": samples,
        "fill_s": filled_s,
        "curve": curve.points,
    }


def fill(trainer: Trainer, data: Dataset, rows: int, store: StoreOptions) -> None:
    """Has servers make the rows of ids, asked as embedding workers ask; one table, one server."""
    if not rows:
        return
    trainer._run.open(data)  # the others come to it in ``fit``
    (server,) = trainer.sparse._servers
    num_shards = store.num_shards((group.spec for group in trainer.sparse.groups), CORES)
    waiting: deque[Any] = deque()
    for ticket, first in enumerate(range(0, rows, FILLED_AT_ONCE)):
        keys = np.arange(first, min(rows, first + FILLED_AT_ONCE))
        shards = shard_of(keys, np.zeros(len(keys), np.int32), num_shards)
        lengths = np.bincount(shards, minlength=num_shards)
        asked = (lengths, keys[np.argsort(shards, kind="stable")], np.ones(len(keys), np.int32))
        nobody = 1 << 20  # no trainer's staleness is touched
        waiting.append(server.call(SparseVerb.LOOKUP, (ticket, nobody, ticket, 1, 0, 1), asked))
        waiting.append(server.call(SparseVerb.DROP, (ticket, nobody, ticket, NO_TURN)))
        while len(waiting) > 4:
            answer(waiting.popleft())
    for reply in waiting:
        answer(reply)


def _progress(run: Path) -> dict[str, tuple[float, float]]:
    """Title of each trainer → when it last told its status, and its examples by then."""
    trainers = (shown for shown in read_all(run) if shown.role == RoleName.TRAINER)
    return {
        shown.title: (shown.now["at_s"], shown.now["stats"]["live"].get("examples", 0)) for shown in trainers
    }


def _tiers(trainer: Trainer | None) -> Counter[str]:
    """Counters of tiers of the shards that this process holds, and ``room_rows``, whose values memory has room for."""
    found: Counter[str] = Counter()
    sparse: Any = None if trainer is None else trainer.sparse
    for _, store in sparse.stores() if hasattr(sparse, "stores") else ():
        if counters := store.tier_counters():
            state = store.state
            slots = state.slots.table if hasattr(state, "slots") else state.values.slots
            found.update({**counters, "room_rows": slots.num_slots})
    return found


def _pids_of(cluster: Cluster) -> dict[str, int]:
    """All processes of a run by title, once they are there."""
    known = {rank: find(cluster.registry, RoleName.TRAINER, rank) for rank in range(cluster.ranks.size)}
    pids = {title(RoleName.TRAINER, rank): entry.pid for rank, entry in known.items() if entry is not None}
    supervisor = cluster._supervisor
    return pids | {title(h.name, h.index): h.pid for h in (supervisor.handles if supervisor else ())}


def windows(notes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened between each two notes, a step."""
    found = []
    for before, after in pairwise(notes):
        steps = after["step"] - before["step"]
        seconds = after["time_s"] - before["time_s"]
        each = {t: (after["cpu_s"][t] - before["cpu_s"][t]) / steps for t in after["cpu_s"]}
        sent, packets = (
            {
                link: [(b - a) / steps for a, b in zip(before[what][link], after[what][link], strict=True)]
                for link in after[what]
            }
            for what in ("links", "packets")
        )
        phases = {name: s - before["phases_s"].get(name, 0.0) for name, s in after["phases_s"].items()}
        found.append(
            {
                "phases_s": {name: spent / steps for name, spent in phases.items()},
                "tiers": {
                    name: count - before["tiers"].get(name, 0) for name, count in after["tiers"].items()
                },
                "room_rows": after["tiers"].get("room_rows", 0),
                "own_samples_per_s": _own_rates(before.get("progress", {}), after.get("progress", {})),
                "samples_per_s": (after["examples"] - before["examples"]) / seconds,
                "step_s": seconds / steps,
                "cpu_s": sum(each.values()),
                "cpu_s_each": each,
                "hosts_cpu_s": {
                    host: (used - before["hosts_cpu_s"][host]) / steps
                    for host, used in after["hosts_cpu_s"].items()
                },
                "machine_cpu_s": (after["machine_cpu_s"] - before["machine_cpu_s"]) / steps,
                "link_bytes": sent,
                "link_packets": packets,
                "rows": after["rows"],
                "rss_bytes": after["rss"],
            }
        )
    return found


def _own_rates(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Title of each trainer → its examples/s by its status files; 0 for a trainer that said nothing since."""
    rates = {}
    for trainer, (then_s, examples) in before.items():
        now_s, now = after.get(trainer, (then_s, examples))
        rates[trainer] = (now - examples) / (now_s - then_s) if now_s > then_s else 0.0
    return rates


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, its kernel time included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def machine_cpu_s() -> float:
    """Busy time of all cores so far, interrupts included: what TCP does for others is in here alone."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS_S


def link_counts(link: str, what: str) -> tuple[int, int]:
    """Bytes, or packets, into and out of the root's end of a link: what its owner sent and what it was sent."""
    folder = Path("/sys/class/net", link, "statistics")
    return int((folder / f"rx_{what}").read_text()), int((folder / f"tx_{what}").read_text())


def median(found: Mapping[str, Any], name: str) -> float:
    """Of all windows."""
    return float(np.median([window[name] for window in found["windows"]]))


if __name__ == "__main__":
    told = json.loads(sys.stdin.read())
    told["hosts"] = {title: HostSpec(**host_spec) for title, host_spec in told["hosts"].items()}
    told["overrides"], told["links"] = tuple(told["overrides"]), tuple(told["links"])
    told["hosts"] = {t: dataclasses.replace(p, command=tuple(p.command)) for t, p in told["hosts"].items()}
    print(json.dumps(_run(Plan(**told))))
