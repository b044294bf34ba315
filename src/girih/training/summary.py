"""``summary.json``: the results of a run over all its processes, in one flat object. Also ``print(trainer)``."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from girih.checkpoint.state import RunState
from girih.comm.group import TrainerGroup
from girih.files.whole import write_whole
from girih.metrics import Metrics
from girih.schema import Schema
from girih.sparse.groups.group import EVALUATED, READ, UNSEEN
from girih.sparse.half import SparseStats
from girih.telemetry.stats import (
    ASKED_KEYS,
    COMPILE,
    DENSE_STALENESS,
    EXCHANGE_NS,
    PACED_KEYS,
    SERVED_ROWS,
    UPDATES_SINCE_READ,
    Stats,
    StatsSnapshot,
    wire_bytes,
)

WIRE_KINDS = ("ids", "embeddings", "gradients", "partials", "dense", "activations")


def summarize(
    state: RunState,
    metrics: Metrics | None,
    facts: Mapping[str, object],
    *,
    ranks: TrainerGroup,
    stats: Stats,
    sparse: SparseStats,
    processes: Sequence[StatsSnapshot],
) -> dict[str, object]:
    """Returns the summary of the run. All trainers call it together.

    Args:
        metrics: metrics of the final weights on test data, or else on valid data. None without both.
        facts: further entries of the summary.
        stats: statistics of this trainer.
        sparse: statistics of the sparse half.
        processes: ``Stats.snapshot`` of each process that serves this trainer.

    Returns:
        Plain values. ``samples_per_s`` counts only training steps. ``auc`` and ``logloss`` belong to the first label.
    """
    wire = Counter(stats.wire_bytes())
    for snapshot in processes:
        wire.update(wire_bytes(snapshot["counters"]))
    stale, num_steps, lost, *sent = ranks.sum(
        [
            state.staleness_sum,
            state.step,
            stats.counters["lost_updates"],
            *(wire[kind] for kind in WIRE_KINDS),
        ]
    )
    since_read = histogram_of(UPDATES_SINCE_READ, processes)
    stale_writes = percentiles_of(
        ranks, histogram_of(DENSE_STALENESS, [stats.snapshot(spans=False), *processes])
    )
    served = [s["counters"]["served_keys"] for s in processes if "served_keys" in s["counters"]]
    loads = loads_of_trainers(ranks, stats) or ({ASKED_KEYS: served} if any(served) else {})
    imbalance = {name: max(load) * len(load) / sum(load) for name, load in loads.items() if sum(load)}
    if paced := stats.counters[PACED_KEYS]:
        imbalance["asked_keys_per_step"] = paced / sum(loads[ASKED_KEYS])
    return {
        "auc": None if metrics is None else metrics.auc,
        "logloss": None if metrics is None else metrics.logloss,
        "samples_per_s": state.examples / state.train_s if state.train_s else None,
        "num_examples": state.examples,
        "repeated_examples": state.repeated_examples,
        "num_rows": sum(sparse.rows.values()),
        "staleness_max": int(ranks.largest([state.staleness_max])[0]),
        "staleness_mean": stale / num_steps if num_steps else 0.0,
        "updates_since_read_max": max(since_read, default=0),
        "updates_since_read_mean": sum(n * times for n, times in since_read.items())
        / max(1, since_read.total()),
        "lost_updates": int(lost),
        "wire_bytes": {kind: int(count) for kind, count in zip(WIRE_KINDS, sent, strict=True)},
        **facts,
        **(
            {"dense_staleness_max": stale_writes["max"], "dense_staleness": stale_writes}
            if stale_writes
            else {}
        ),
        **({"loads": loads, "imbalance": imbalance} if loads else {}),
        **({"server_load": imbalance[ASKED_KEYS]} if any(served) else {}),
        "steps": state.step,
        "epochs": state.epoch,
        "stopped_early": state.stopped_early,
        "checkpoint_step": state.step if state.best_step is None else state.best_step,
        "refused_steps": state.refused,
        "store": dict(sparse.store),
        **hit_ratio(sparse.store),
        "phases_s": {
            name: round(seconds, 3) for name, seconds in stats.spans.totals_s.items() if name != COMPILE
        },
        "by_label": {} if metrics is None else metrics.as_dict(),
    }


def features_of(
    schema: Schema, sparse: SparseStats, evaluated: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    """Returns the numbers of rows and ids of each feature that the model reads, by name.

    Args:
        evaluated: the part of ``sparse.features`` that the last evaluation added.
    """
    tables = {f.name: f.table_name for f in schema.sparse if READ + f.name in sparse.features}
    return {
        name: {
            "table": table,
            "rows": sparse.rows.get(table, 0),
            "ids": sparse.features[READ + name],
            "evaluated_ids": (num_evaluated := evaluated.get(EVALUATED + name, 0)),
            "unseen": evaluated[UNSEEN + name] / num_evaluated if num_evaluated else None,
        }
        for name, table in tables.items()
    }


def histogram_of(name: str, processes: Iterable[StatsSnapshot]) -> Counter[int]:
    """Merges a histogram over several processes.

    Args:
        processes: the ``Stats.snapshot`` of each process.
    """
    histogram: Counter[int] = Counter()
    for snapshot in processes:
        for number, times in snapshot["histograms"].get(name, {}).items():
            histogram[int(number)] += times
    return histogram


def percentiles_of(ranks: TrainerGroup, counts: Counter[int]) -> dict[str, int]:
    """Returns ``median``, ``p99`` and ``max`` of the counts of all trainers, by nearest rank.

    The dict is empty without counts. All trainers call it together.
    """
    total: Counter[int] = Counter()
    for items in ranks.broadcast(ranks.gather(list(counts.items()))):
        total.update(dict(map(tuple, items)))
    if not total:
        return {}
    numbers = sorted(total)
    until = list(accumulate(total[number] for number in numbers))
    median, p99 = (numbers[bisect_left(until, share * until[-1])] for share in (0.5, 0.99))
    return {"median": median, "p99": p99, "max": numbers[-1]}


def loads_of_trainers(ranks: TrainerGroup, stats: Stats) -> dict[str, Sequence[float]]:
    """Returns the load of each trainer in training steps, by rank. The dict is empty without counts.

    All trainers call it together.

    Args:
        stats: statistics of this trainer.

    Returns:
        ``asked_keys``, ``served_rows`` and ``exchange_s``: see :mod:`girih.telemetry.stats`.
    """
    mine = [int(stats.counters[name]) for name in (ASKED_KEYS, SERVED_ROWS, EXCHANGE_NS)]
    asked, served, exchange_ns = zip(*ranks.broadcast(ranks.gather(mine)), strict=True)
    if not any((*asked, *served, *exchange_ns)):
        return {}
    exchange_s = [round(count / 1e9, 6) for count in exchange_ns]
    return {ASKED_KEYS: list(asked), SERVED_ROWS: list(served), "exchange_s": exchange_s}


def hit_ratio(counters: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Returns ``hit_ratio``: the fraction of reads in training that each tier served. The dict is empty with one tier.

    A read is a read of an existing row. It counts once for each batch that has the row's key. A prefetched row counts
    for the tier from which it was read.
    """
    reads = {
        tier: counters[f"{tier}_reads"] for tier in ("gpu", "dram", "ssd") if f"{tier}_reads" in counters
    }
    total = sum(reads.values())
    return (
        {"hit_ratio": {tier: count / total if total else 0.0 for tier, count in reads.items()}}
        if reads
        else {}
    )


Events = Sequence[tuple[str, float, float]]
"""Spans: the name, the start (``time.perf_counter``) and the length of each, in seconds."""

BESIDE = frozenset(
    {
        "allreduce",
        "average",
        *(f"part {verb}" for verb in ("forward", "backward", "apply")),
        *(f"exchange {kind}" for kind in ("ids", "embeddings", "gradients", "vote")),
    }
)
"""Names of spans that may overlap other spans of their process, also of the same name. They need separate tracks."""


def timelines(ranks: TrainerGroup, stats: Stats, processes: Mapping[str, StatsSnapshot]) -> dict[str, Events]:
    """Returns the spans of all processes by name on rank 0, and the spans of this trainer on other ranks.

    All trainers call it together.

    Args:
        processes: maps the name of each process that this trainer asks to its ``Stats.snapshot``.
    """
    mine: dict[str, Events] = {f"trainer {ranks.rank}": stats.spans.events()}
    others = {title: snapshot["spans"] for title, snapshot in processes.items()}
    gathered = ranks.gather({**mine, **others})
    return {title: events for each in gathered or [mine] for title, events in each.items()}


def write_timeline(path: Path, processes: Mapping[str, Events], totals_s: Mapping[str, float]) -> None:
    """Writes the spans of processes.

    Args:
        processes: the spans of each process, by its name. The phases of the first process represent the run.
        totals_s: the seconds of each phase of the first process, over the whole run.
    """
    origin = min((start for events in processes.values() for _, start, _ in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for number, (title, events) in enumerate(processes.items()):
        trace.append({"name": "process_name", "ph": "M", "pid": number, "args": {"name": title}})
        free_us: list[int] = []  # the time at which each separate track becomes free
        for name, start, seconds in events:
            begin, end = round((start - origin) * 1e6), round((start - origin + seconds) * 1e6)
            track = 0
            if name in BESIDE:
                track = 1 + next(
                    (number for number, free in enumerate(free_us) if free <= begin), len(free_us)
                )
                free_us[track - 1 : track] = [end]
            trace.append(
                {"name": name, "ph": "X", "pid": number, "tid": track, "ts": begin, "dur": end - begin}
            )
    totals = {name: round(seconds, 6) for name, seconds in totals_s.items()}
    write_whole(path, json.dumps({"traceEvents": trace, "totals_s": totals}))


MOST_TABLES = 6  # the most tables that the line names


def summary_line(
    owner: object, model: nn.Module, step: int, schema: Schema, rows: Mapping[str, int] | None
) -> str:
    """Returns one line with the model, the step and the tables.

    Args:
        rows: the number of rows of each table. None if the session is not open, or if other processes have the rows.
    """
    names = [table.name for table in schema.tables]
    if len(names) > MOST_TABLES:
        tables = f"{len(names)} tables"
        if rows is not None:
            tables += f" with {sum(rows.values()):,} rows"
    elif rows is None:
        tables = f"tables {', '.join(names)}" if names else "no tables"
    else:
        tables = ", ".join(f"{name} {rows.get(name, 0):,} rows" for name in names) or "no tables"
    return f"{type(owner).__name__}({type(model).__name__}, step {step}, {tables})"
