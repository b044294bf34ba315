"""Persia's Figure 9: samples/s while tables grow (left), by strategy with the largest (right), and 10¹² keys under LRU.

One table that all 26 features share. The embedding server makes the rows first, asked as a worker asks; then come
steps of DeepFM (400-400-400) whose ids are drawn from all rows alike, so that hardly any row is in a cache. Left: rows in
shared memory and in private memory (heap), which has huge pages where the system gives them; with all processes on all cores,
and with the server on a core of its own, as Persia's have machines of their own. Right: "hybrid, τ = 0" is Persia's fully
synchronous mode; every process has a host of its own over links of ``--rate`` (needs root; none: shared memory). What is
kept in ``--results`` is not run again.

    girih bench persia_fig9
    girih bench persia_fig9 --rows 1_000_000 10_000_000
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fleet
import harness
import network
from experiments import RUNNING_PARTS, Results, Run, add_options, results

from girih.cluster.roles import HostSpec

SPACE = 10**12
ROW_BYTES, SPARE_BYTES = 150, 3 << 30
SERVER, ROLES = "embedding-server 0", ("loader", "embedding-worker")
ARENAS, CORES = ("shared", "heap"), ("all", "own")
MODES: dict[str, dict[str, Any]] = {
    "hybrid, τ = 0": {"name": "hybrid", "staleness": 0},
    "hybrid, τ = 4": {"name": "hybrid", "staleness": 4},
    "asynchronous, τ = 4": {"name": "asynchronous", "staleness": 4},
}
BASE = "hybrid, τ = 0"
AHEAD = 8
"""Batches of data beyond those of the steps: what is read ahead must not end the epoch."""
QUICK = {"rows": [2000, 4000], "batch": 128, "lru_rows": 5000, "warmup": 2, "steps": 2, "windows": 2}


def main() -> None:
    parser = harness.parser("persia_fig9", __doc__)
    add_options(parser, pictures=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--arenas", nargs="+", default=list(ARENAS), choices=ARENAS)
    parser.add_argument(
        "--server-cores", nargs="+", default=list(CORES), choices=CORES, help="all: shared with the others"
    )
    parser.add_argument("--rate", default="1gbit", help="of links in the right panel; none: shared memory")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4096, help="examples of a trainer")
    parser.add_argument("--lru-rows", type=int, default=5_000_000, help="max_rows of the table of 10¹² keys")
    fleet.add_windows(parser, warmup=10, steps=10)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    report = harness.Report("persia_fig9", options)
    kept = results(options, "persia-fig9", parts=RUNNING_PARTS)
    _left(report, options, kept)
    _right(report, options, kept)
    _bounded(report, options, kept)
    print(kept.told())
    report.finish()


def _left(report: harness.Report, options: argparse.Namespace, kept: Results) -> None:
    table = report.table(
        "left: steps by rows, ids drawn from all alike",
        {"arena": "{}", "server's cores": "{}", "rows": "{:,}", "GB of the server": "{:.2f}", "samples/s": "{:,.0f}",
         "of the smallest": "{:.2f}×", "step ms": "{:.0f}", "server CPU ms a step": "{:.1f}", "CPU ms a step": "{:.0f}",
         "rows made a second": "{:,.0f}", **fleet.DISTURBED},
    )  # fmt: skip
    strategy = {"name": "hybrid", "trainers": options.trainers}
    bases: dict[tuple[str, str], float] = {}
    # rows outside: arenas and cores take turns
    for rows, arena, cores in itertools.product(options.rows, options.arenas, options.server_cores):
        places = {} if cores == "all" else _own_core(options.trainers)
        if places is None:
            report.skip("a core of its own", "needs taskset and two cores")
            continue
        name = f"left/{rows:,} rows/{arena}, {cores} cores"
        run = _asked(options, name, strategy, rows=rows, arena=arena, server_cores=cores)
        if not _fits(report, kept, run):
            continue
        found = kept.measure(run, lambda run, places=places: _measured(options, run, places))
        rate, last = fleet.median(found, "samples_per_s"), found["windows"][-1]
        table.row(
            {
                "arena": arena,
                "server's cores": cores,
                "rows": last["rows"],
                "GB of the server": last["rss_bytes"][SERVER] / 1e9,
                "samples/s": rate,
                "of the smallest": rate / bases.setdefault((arena, cores), rate),
                "step ms": 1e3 * fleet.median(found, "step_s"),
                "server CPU ms a step": 1e3 * last["cpu_s_each"][SERVER],
                "CPU ms a step": 1e3 * fleet.median(found, "cpu_s"),
                "rows made a second": rows / found["fill_s"],
                **fleet.disturbance(found),
            }
        )
    table.rows.sort(key=lambda row: (row["arena"], row["server's cores"], row["rows"]))


def _right(report: harness.Report, options: argparse.Namespace, kept: Results) -> None:
    reason = None if options.rate == "none" else network.missing()
    if reason is not None:
        report.skip("right panel", reason)
        return
    rows, slow = options.rows[-1], options.rate != "none"
    table = report.table(
        f"right: {rows:,} rows, links: {options.rate} (Persia: hybrid 2.6 × synchronous, asynchronous 1.2 × hybrid)",
        {"strategy": "{}", "samples/s": "{:,.0f}", "of τ = 0": "{:.2f}×", "step ms": "{:.0f}", "CPU ms a step": "{:.0f}",
         "staleness": "{:.2f}", **fleet.DISTURBED},
    )  # fmt: skip
    base = None
    for mode, told in MODES.items():
        strategy = {**told, "trainers": options.trainers, "transport": "tcp" if slow else "shared"}
        name = f"right/{rows:,} rows/{options.rate}/{mode}"
        run = _asked(options, name, strategy, rows=rows, arena="heap", rate=options.rate)
        if not _fits(report, kept, run):
            return
        found = kept.measure(run, lambda run: _over_links(options, run))
        rate = fleet.median(found, "samples_per_s")
        base = rate if mode == BASE else base
        table.row(
            {
                "strategy": mode,
                "samples/s": rate,
                "of τ = 0": rate / base if base else None,
                "step ms": 1e3 * fleet.median(found, "step_s"),
                "CPU ms a step": 1e3 * fleet.median(found, "cpu_s"),
                "staleness": found["summary"]["staleness_mean"],
                **fleet.disturbance(found),
            }
        )


def _over_links(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    if options.rate == "none":
        return _measured(options, run)
    roles = dict.fromkeys(network.ROLES, 1) | {"trainer": options.trainers}
    with network.network(network.names_apart(roles), options.rate) as hosts:
        return _measured(options, run, network.apart(hosts))


def _bounded(report: harness.Report, options: argparse.Namespace, kept: Results) -> None:
    table = report.table(
        f"{SPACE:,} keys drawn alike, LRU of {options.lru_rows:,} rows",
        {"step": "{}", "rows": "{:,}", "GB of the server": "{:.3f}", "samples/s": "{:,.0f}",
         **fleet.DISTURBED},
    )  # fmt: skip
    strategy = {"name": "hybrid", "trainers": options.trainers}
    bounded = {"space": SPACE, "bounded": options.lru_rows, "windows": 2 * options.windows}
    name = f"lru/{options.lru_rows:,} rows"
    run = _asked(options, name, strategy, rows=options.lru_rows, arena="shared", **bounded)
    found = kept.measure(run, lambda run: _measured(options, run))
    for number, window in enumerate(found["windows"], 1):
        table.row(
            {
                "step": options.warmup + number * options.steps,
                "rows": window["rows"],
                "GB of the server": window["rss_bytes"][SERVER] / 1e9,
                "samples/s": window["samples_per_s"],
                **fleet.disturbance(found),
            }
        )
    report.not_identical(f"evicted rows: {found['summary']['store'].get('evicted')}")


def _asked(
    options: argparse.Namespace,
    name: str,
    strategy: Mapping[str, Any],
    *,
    rows: int,
    arena: str,
    **others: Any,
) -> Run:
    """A run over a table of so many rows, with all that its result depends on."""
    task = {"batch": options.batch, "dim": options.dim, "rows": rows, "arena": arena}
    task |= {"space": rows, "bounded": None}
    conditions: dict[str, Any] = fleet.windows_of(vars(options))
    task |= {key: value for key, value in others.items() if key in task}
    conditions |= {key: value for key, value in others.items() if key not in task}
    return Run(name, task, strategy, conditions)


def _fits(report: harness.Report, kept: Results, run: Run) -> bool:
    """Whether a run is kept, or there is memory for it."""
    available = harness.available_bytes()
    if kept.kept(run) is not None or available > ROW_BYTES * run.config["rows"] + SPARE_BYTES:
        return True
    report.skip(run.name, f"too little memory: {available / 1e9:.0f} GB")
    return False


def _own_core(trainers: int) -> dict[str, HostSpec] | None:
    """The server on the first core, all others on the rest; None where that cannot be."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or shutil.which("taskset") is None:
        return None
    own, others = (
        HostSpec(("taskset", "--cpu-list", ",".join(map(str, part)))) for part in (cores[:1], cores[1:])
    )
    rest = (*ROLES, *(f"trainer {rank}" for rank in range(trainers)))
    return {"embedding-server": own, **dict.fromkeys(rest, others)}


def _measured(
    options: argparse.Namespace, run: Run, hosts: Mapping[str, HostSpec] | None = None
) -> dict[str, Any]:
    """Steps over rows that are made before the first of them; ids are drawn from a space of keys."""
    task, times = run.config, run.conditions
    bounded = task["bounded"]
    eviction = "" if bounded is None else f'eviction = {{ name = "lru", max_rows = {bounded} }}\n'
    steps = times["warmup"] + times["steps"] * times["windows"] + AHEAD
    with tempfile.TemporaryDirectory() as directory:
        config = fleet.write_task(
            Path(directory), rows=steps * options.batch * options.trainers, cardinality=task["space"],
            zipf=None, dim=options.dim, shuffle=False, table=eviction or "\n",
        )  # fmt: skip
        plan = fleet.Plan(
            str(config),
            (
                fleet.strategy_override(run.strategy),
                f"data.batch_size = {options.batch * options.trainers}",
                f'store.arena = "{task["arena"]}"',
            ),
            **fleet.windows_of(times),
            fill=task["rows"],
            hosts=hosts or {},
        )
        found = fleet.measure(plan, timeout_s=900.0, tries=1 if options.quick else fleet.TRIES)
    kept = ("samples_per_s", "step_s", "cpu_s", "cpu_s_each", "machine_cpu_s", "rows", "rss_bytes")
    return {
        "tries": found["tries"],
        "fill_s": found["fill_s"],
        "windows": [{key: window[key] for key in kept} for window in found["windows"]],
        "summary": {key: found["summary"][key] for key in ("staleness_mean", "store")},
    }


if __name__ == "__main__":
    main()
