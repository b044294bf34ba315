"""DES's Table 5 and Figure 7: throughput, and computation and communication time a step, beside other strategies.

    girih bench des_table5 [--rates 1gbit] [--models lr] [--batches 4096] [--rounds 2] [--quick] [--results FOLDER]

Four trainers, a network namespace each (needs root), links of ``--rates``; generated wide data (``wide.py``) of at least 100
batches an epoch, the same for all. Asynchronous training has a loader, an embedding worker and an embedding server on
each trainer's host; in ``mesh`` (``mesh.py``) each of them serves its own host, as in the paper's baseline. After a
warm-up come windows of ``--steps`` steps, within one epoch. All trainers are measured, on one clock (``phases.py``):
waiting for the last of them is apart from communication.

A trainer of ``mesh`` and ``asynchronous`` waits for rows and updates. Its waits contain the work of embedding workers and
servers, which substitution does as computing. So the ratio of waits to communication is no ratio of communication times;
bytes of links compare.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import fleet
import harness
import mesh
import network
import phases
import wide
from experiments import RUNNING_PARTS, Results, Run, add_options, results, show
from trainers import train_all

from girih.cluster.roles import HostSpec

TRAINERS, IDS_EACH, LAYERS = 4, 1.6, [256, 64]
FILE_ROWS, FILES, DISTINCT = 16_384, 100, 8
MODELS = ("lr", "wide_deep", "deepfm")
PAPER = {"lr": (2.7, 1.55), "wide_deep": (2.3, 4.52), "deepfm": (3.2, 3.91)}
"""How many times less communication time, and more samples/s, than DiFacto."""
SUBSTITUTION, SPLIT, SYNCHRONOUS = "substitution", "substitution, split", "synchronous"
WAITING, AHEAD, SHARED = "mesh, τ = 0", "mesh, τ = 4", "asynchronous, τ = 4"
ROLES_EACH = {"loaders": TRAINERS, "embedding_workers": TRAINERS, "embedding_servers": TRAINERS}
MESH = {"name": "${MESH}:Mesh", "transport": "tcp", **ROLES_EACH}
STRATEGIES: dict[str, dict[str, Any]] = {
    SUBSTITUTION: {"name": SUBSTITUTION, "dense": "replicated"},
    SPLIT: {"name": SUBSTITUTION, "dense": "split"},
    SYNCHRONOUS: {"name": SYNCHRONOUS},
    WAITING: {**MESH, "staleness": 0},
    AHEAD: {**MESH, "staleness": 4},
    SHARED: {**MESH, "name": "asynchronous", "staleness": 4},
}
ROLES = ("trainer", "loader", "embedding-worker", "embedding-server")
WIRE_BYTES_PER_S = 125e6
MORE_STEPS = 10
"""Steps after the last window, so that no trainer has ended before the slowest one is measured."""

Case = tuple[str, int, str, str]
"""Links, examples of a step of all trainers, model, strategy."""


def main() -> None:
    parser = harness.parser("des_table5", __doc__)
    add_options(parser, pictures=False)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "none"], choices=["1gbit", "none"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[4096, FILE_ROWS], help="of all trainers")
    parser.add_argument(
        "--strategies", nargs="+", choices=list(STRATEGIES), metavar="STRATEGY", help=", ".join(STRATEGIES),
        default=[SUBSTITUTION, SYNCHRONOUS, WAITING, AHEAD, SHARED],
    )  # fmt: skip
    parser.add_argument(
        "--all", action="store_true", help="all that is named, not only what tells something new"
    )
    parser.add_argument("--features", type=int, default=200)
    fleet.add_windows(parser, windows=3)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each case, by turns")
    arguments = parser.parse_args()
    rows = FILE_ROWS
    if arguments.quick:
        arguments.features, arguments.warmup, arguments.steps, arguments.windows = 12, 10, 5, 2
        arguments.batches, arguments.rounds, rows = [256], 1, 256
    if arguments.warmup % arguments.steps:
        parser.error("--warmup: expected a multiple of --steps")
    if max(arguments.batches) > rows:
        parser.error(f"--batches: expected at most {rows:,}, so that an epoch has {FILES} of them")
    if arguments.warmup + arguments.steps * arguments.windows + MORE_STEPS > FILES:
        parser.error(f"--steps: expected warm-up and windows to end in one epoch of {FILES} steps")
    report = harness.Report("des_table5", arguments)
    reason = network.missing()
    if reason is None:
        kept = results(arguments, "des-table5", parts=RUNNING_PARTS)
        _write_data(report, arguments, rows)
        _show(report, _measured(kept, arguments))
        print(kept.told())
    else:
        report.skip("all", reason)
    report.finish()


def _write_data(report: harness.Report, arguments: argparse.Namespace, rows: int) -> None:
    folder = Path("runs", "wide", f"{arguments.features}x{rows}").resolve()
    batches = sorted({rows, min(rows, 4096)})
    unique = wide.write_epoch(
        folder, rows, FILES, batches, distinct=DISTINCT, features=arguments.features, each=IDS_EACH
    )
    os.environ |= {"WIDE": str(folder), "MESH": str(Path(mesh.__file__))}
    report.not_identical(
        f"an epoch has {FILES * rows:,} examples, of which {DISTINCT * rows:,} differ: new ids are new in the warm-up alone;"
        f" unique ids in a batch: {', '.join(f'{count:,} of {size:,}' for size, count in unique.items())}"
    )
    report.not_identical(
        "waits of a mesh contain lookups, pooling and optimizer of embedding workers and servers on the same cores;"
        " substitution's communication does not"
    )
    report.not_identical(
        f"each loader of {SHARED!r} decodes whole batches and keeps its trainer's share; those of a mesh decode a trainer's"
        " own examples, a trainer of substitution its own columns of all"
    )


def _measured(kept: Results, arguments: argparse.Namespace) -> dict[Case, list[dict[str, Any]]]:
    """Case → what was measured, once a round."""
    chosen = (arguments.rates, arguments.batches, arguments.models, arguments.strategies)
    cases = [case for case in itertools.product(*chosen) if arguments.all or _tells(*case)]
    found: defaultdict[Case, list[dict[str, Any]]] = defaultdict(list)
    for number in range(1, 1 + arguments.rounds):
        runs = {case: _run(case, number, arguments) for case in cases}
        for rate in arguments.rates:
            missing = [run for case, run in runs.items() if case[0] == rate and kept.kept(run) is None]
            for run, result, wall_s in _train(rate, missing):
                kept.keep(run, result, wall_s)
                rates = ", ".join(f"{window['samples_per_s']:,.0f}" for window in result["windows"])
                print(f"{run.name:60} samples/s {rates}  {wall_s:.0f} s", flush=True)
        for case, run in runs.items():
            result = kept.kept(run)
            if result is None:
                raise SystemExit(f"{run.name}: no result")
            kept.used.append(result)
            found[case].append(result)
    return found


def _tells(rate: str, batch: int, model: str, name: str) -> bool:
    """Whether a case tells something new: links without bounds, and larger batches, are beside a chosen few."""
    beside = (SUBSTITUTION, AHEAD) if rate == "none" else (SUBSTITUTION, WAITING, AHEAD)
    if batch == FILE_ROWS:
        return rate != "none" and model != "deepfm" and name in beside
    return rate != "none" or name in beside


def _run(case: Case, number: int, arguments: argparse.Namespace) -> Run:
    rate, batch, model, name = case
    layers = {} if model == "lr" else {"hidden": LAYERS}
    config = wide.config(
        "${WIDE}/train-*.parquet",
        batch,
        {"name": model, **layers},
        features=arguments.features,
        each=IDS_EACH,
    )
    conditions = {"rate": rate} | fleet.windows_of(vars(arguments))
    strategy = {**STRATEGIES[name], "trainers": TRAINERS}
    where = f"{arguments.features} features/{rate}/{batch}"
    return Run(f"{where}/{model}/{name}/{number}", config, strategy, conditions)


def _train(rate: str, runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any], float]]:
    """Runs over links of one bandwidth, in turn: each with what was measured, and seconds."""
    if not runs:
        return
    hosts = [f"t{rank}" for rank in range(TRAINERS)]
    with network.network(hosts, None if rate == "none" else rate) as net:
        asked = [
            {
                "config": run.config,
                "strategy": run.strategy,
                **fleet.windows_of(run.conditions),
                "more_steps": MORE_STEPS,
                "links": [net.links[host] for host in hosts],
            }
            for run in runs
        ]
        start = time.perf_counter()
        for run, found in zip(runs, train_all(asked, TRAINERS, _places(net)), strict=True):
            yield run, _reduced(run, found), time.perf_counter() - start
            start = time.perf_counter()


def _places(net: network.Hosts) -> dict[str, HostSpec]:
    """Each role's process i on the host of trainer i."""
    return {f"{role} {rank}": net.places[f"t{rank}"] for role in ROLES for rank in range(TRAINERS)}


def _reduced(run: Run, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run: everything a step of one trainer, over all trainers.

    Raises:
        RuntimeError: a trainer ended before the first window did.
    """
    trails, moments, summary = found["trails"], found["moments_s"], found["summary"]
    share = run.config["data"]["batch_size"] / TRAINERS
    until = min(map(phases.last_step, trails))
    windows = []
    for (start, end), measured in zip(itertools.pairwise(moments), found["windows"], strict=True):
        if end > until:
            break
        trainers = phases.divide(trails, start, end)
        steps = mean(trainer["steps"] for trainer in trainers)
        scale = run.conditions["steps"] / steps  # what was measured is a step of the first trainer
        cpu_s: Counter[str] = Counter()
        for title, seconds in measured["cpu_s_each"].items():
            cpu_s[title.rpartition(" ")[0]] += seconds * scale
        windows.append(
            {
                "samples_per_s": share * sum(trainer["steps"] for trainer in trainers) / (end - start),
                "step_s": (end - start) / steps,
                "machine_cpu_s": measured["machine_cpu_s"] * scale,
                "cpu_s": dict(cpu_s),
                "trainers": trainers,
            }
        )
    if not windows:
        raise RuntimeError(f"{run.name}: a trainer ended before the first window did")
    steps = mean(trainer["steps"] for trainer in phases.divide(trails, moments[0], moments[-1]))
    scale = run.conditions["steps"] * len(found["windows"]) / steps
    dense = phases.dense_staleness(trails, moments[0], moments[-1])
    kinds = ("steps", "staleness_mean", "staleness_max", "updates_since_read_mean", "wire_bytes")
    return {
        "windows": windows,
        "link_bytes": [[scale * n for n in each] for each in found["whole"][0]["link_bytes"].values()],
        "dense_staleness_mean": mean(dense) if dense else None,
        "dense_staleness_max": max(dense, default=None),
        **{kind: summary[kind] for kind in kinds},
    }


Found = Mapping[Case, Sequence[Mapping[str, Any]]]


def _show(report: harness.Report, found: Found) -> None:
    show(
        report,
        "ms a step: mean over trainers, the worst",
        [*CASE, "samples/s", "of τ = 4", "step", "computing", *TIMES],
        [[*_named(case), *_times(case, found)] for case in found],
    )
    show(
        report,
        "ms of processors a step",
        [*CASE, *ROLES, "machine", "machine / cores", "of own"],
        [[*_named(case), *_processors(runs)] for case, runs in found.items()],
    )
    show(
        report,
        "bytes a step of a trainer, and staleness",
        [*CASE, "MB in and out", "busiest direction, MB", "ms at 1 Gbit/s", "staleness of rows: mean, most",
         "updates since read, mean", "dense: mean, most"],
        [[*_named(case), *_bytes(runs)] for case, runs in found.items()],
    )  # fmt: skip
    show(
        report,
        "how many times as much as substitution",
        [*CASE[:3], "beside", "paper: communication", "communication", "and waiting", "bytes", "busiest direction",
         "paper: samples/s", "samples/s of substitution"],
        [row for case in found for row in _beside(case, found)],
    )  # fmt: skip


CASE = ["link", "batch", "model", "strategy"]
PARTS: dict[str, tuple[str, ...]] = {
    "reading": ("read",),
    "communication": ("communication",),
    "waiting for the last": ("waiting",),
    "waiting for rows": ("wait for rows",),
    "waiting for updates": ("wait for update", "wait for parameters"),
}
BESIDE = "AllReduce beside"
TIMES = [*PARTS, BESIDE]


def _named(case: Case) -> list[str]:
    rate, batch, model, name = case
    return [rate, f"{batch:,}", model, name]


def _times(case: Case, found: Found) -> list[str]:
    runs, base = found[case], found.get((*case[:3], AHEAD))
    speed = _middle(runs, _speed)
    cells = [f"{speed:,.0f}", f"{speed / _middle(base, _speed):.2f}" if base else ""]
    asked = {"step": ("step",), "computing": (), **PARTS}
    if case[3] == SYNCHRONOUS:
        asked[BESIDE] = ("beside",)
    for name in ("step", "computing", *TIMES):
        cells.append(_mean_worst(runs, name, asked[name]) if name in asked else "")
    return cells


def _mean_worst(runs: Sequence[Mapping[str, Any]], name: str, parts: Sequence[str]) -> str:
    def each(window: Mapping[str, Any]) -> list[float]:
        return [_computing(t) if name == "computing" else _spent(t, parts) for t in window["trainers"]]

    average, worst = (_middle(runs, lambda window, of=of: 1e3 * of(each(window))) for of in (mean, max))
    return f"{average:.1f}, {worst:.1f}" if worst >= 0.05 else ""


def _spent(trainer: Mapping[str, float], parts: Sequence[str]) -> float:
    return sum(trainer.get(part, 0.0) for part in parts)


def _computing(trainer: Mapping[str, float]) -> float:
    """What is left of a step: also what runs beside an AllReduce."""
    return trainer["step"] - _spent(trainer, [part for parts in PARTS.values() for part in parts])


def _speed(window: Mapping[str, Any]) -> float:
    return float(window["samples_per_s"])


def _middle(runs: Sequence[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], float]) -> float:
    """The median over all windows of all rounds."""
    return median(of(window) for run in runs for window in run["windows"])


def _processors(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for role in ROLES:
        spent = _middle(runs, lambda window, role=role: window["cpu_s"].get(role, 0.0))
        cells.append(f"{1e3 * spent:.0f}" if spent else "")
    machine = _middle(runs, lambda window: window["machine_cpu_s"])
    of_own = _middle(runs, lambda window: window["machine_cpu_s"] / sum(window["cpu_s"].values()))
    return [*cells, f"{1e3 * machine:.0f}", f"{1e3 * machine / fleet.CORES:.0f}", f"{of_own:.2f}"]


def _bytes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    busiest = mean(map(_busiest, runs))
    dense = [run["dense_staleness_mean"] for run in runs if run["dense_staleness_mean"] is not None]
    most = max((run["dense_staleness_max"] or 0 for run in runs), default=0)
    return [
        f"{mean(map(_in_and_out, runs)) / 1e6:.3f}",
        f"{busiest / 1e6:.3f}",
        f"{1e3 * busiest / WIRE_BYTES_PER_S:.1f}",
        f"{mean(run['staleness_mean'] for run in runs):.2f}, {max(run['staleness_max'] for run in runs)}",
        f"{mean(run['updates_since_read_mean'] for run in runs):.1f}",
        f"{mean(dense):.1f}, {most}" if dense else "",
    ]


def _in_and_out(run: Mapping[str, Any]) -> float:
    """Mean over trainers."""
    return mean(sum(both) for both in run["link_bytes"])


def _busiest(run: Mapping[str, Any]) -> float:
    return max(max(both) for both in run["link_bytes"])


def _beside(case: Case, found: Found) -> list[list[str]]:
    """A substitution beside each other strategy."""
    if not case[3].startswith(SUBSTITUTION):
        return []
    ours, (communicating, speeding) = found[case], PAPER[case[2]]
    rows = []
    for name in (SYNCHRONOUS, WAITING, AHEAD, SHARED):
        theirs = found.get((*case[:3], name))
        if theirs is None:
            continue
        alone, waiting = ("communication",), ("communication", "waiting")
        if name == SYNCHRONOUS:
            their_alone, their_waiting = (*alone, "beside"), (*waiting, "beside")
        else:
            their_alone = their_waiting = ("wait for rows", "wait for update", "wait for parameters")
        rows.append(
            [
                *_named(case)[:3], f"{case[3]} / {name}", f"{communicating:.1f}", _ratio(theirs, their_alone, ours, alone),
                _ratio(theirs, their_waiting, ours, waiting),
                f"{mean(map(_in_and_out, theirs)) / mean(map(_in_and_out, ours)):.2f}",
                f"{mean(map(_busiest, theirs)) / mean(map(_busiest, ours)):.2f}",
                f"{speeding:.2f}", f"{_middle(ours, _speed) / _middle(theirs, _speed):.2f}",
            ]
        )  # fmt: skip
    return rows


def _ratio(
    theirs: Sequence[Mapping[str, Any]], their_parts: Sequence[str], ours: Sequence[Mapping[str, Any]], parts: Sequence[str]
) -> str:  # fmt: skip
    """Mean seconds over trainers, theirs of ours."""
    spent = [
        _middle(runs, lambda window, of=of: mean(_spent(trainer, of) for trainer in window["trainers"]))
        for runs, of in ((theirs, their_parts), (ours, parts))
    ]
    return f"{spent[0] / spent[1]:.2f}"


if __name__ == "__main__":
    main()
