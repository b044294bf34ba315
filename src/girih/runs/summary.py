"""``summary.json``: how a run ended, in one flat object, over all its processes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from girih.comm.group import TrainerGroup
from girih.dense.half import DenseHalf
from girih.metrics import Metrics
from girih.runs.state import RunState
from girih.runs.stats import (
    ASKED_KEYS,
    COMPILE,
    DENSE_STALENESS,
    EXCHANGE_NS,
    PACED_KEYS,
    SERVED_ROWS,
    UPDATES_SINCE_READ,
    Stats,
    wire_bytes,
)
from girih.schema import Schema
from girih.sparse.groups.feature_counts import EVALUATED, READ, UNSEEN
from girih.sparse.half import SparseStats

WIRE_KINDS = ("ids", "embeddings", "gradients", "partials", "dense", "activations")


def summarize(
    state: RunState,
    metrics: Metrics | None,
    facts: Mapping[str, Any],
    *,
    ranks: TrainerGroup,
    own: Stats,
    sparse: SparseStats,
    dense: DenseHalf,
    loaders: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Puts the summary together. Called by all trainers, together.

    Args:
        metrics: those of the final weights, on test (else valid) data; None where there is neither.
        facts: what else is known.
        own: statistics of this trainer.
        loaders: title of a loader → its ``Stats.snapshot``, of those that this trainer asks.

    Returns:
        Plain values. ``samples_per_s`` counts training steps only; ``auc`` and ``logloss`` are the first label's.
    """
    processes = [*loaders.values(), *sparse.processes.values(), *dense.processes().values()]
    wire = Counter(own.wire_bytes())
    for snapshot in processes:
        wire.update(wire_bytes(snapshot["counters"]))
    stale, num_steps, lost, *sent = ranks.sum(
        [state.staleness_sum, state.step, own.counters["lost_updates"], *(wire[kind] for kind in WIRE_KINDS)]
    )
    since_read = histogram_of(UPDATES_SINCE_READ, processes)
    stale_writes = percentiles_of(
        ranks, histogram_of(DENSE_STALENESS, [own.snapshot(spans=False), *processes])
    )
    served = [s["counters"]["served_keys"] for s in processes if "served_keys" in s["counters"]]
    loads = loads_of_trainers(ranks, own) or ({ASKED_KEYS: served} if any(served) else {})
    imbalance = imbalance_of(loads, own.counters[PACED_KEYS])
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
        "dense_staleness_max": stale_writes.get("max", dense.stats()["staleness_max"]),
        **({"dense_staleness": stale_writes} if stale_writes else {}),
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
            name: round(seconds, 3) for name, seconds in own.spans.totals_s.items() if name != COMPILE
        },
        "by_label": {} if metrics is None else metrics.as_dict(),
    }


def features_of(
    schema: Schema, sparse: SparseStats, evaluated: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Rows and ids of each feature that the model reads, by name.

    Args:
        evaluated: what the last evaluation added to ``sparse.features``.
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


def histogram_of(name: str, processes: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """A histogram over several processes.

    Args:
        processes: their ``Stats.snapshot``.
    """
    found: Counter[int] = Counter()
    for snapshot in processes:
        for number, times in snapshot["histograms"].get(name, {}).items():
            found[int(number)] += times
    return found


def percentiles_of(ranks: TrainerGroup, own: Counter[int]) -> dict[str, int]:
    """``median``, ``p99`` and ``max`` of what all trainers counted, by nearest rank; empty where they counted nothing.

    Called by all trainers, together.
    """
    found: Counter[int] = Counter()
    for items in ranks.broadcast(ranks.gather(list(own.items()))):
        found.update(dict(map(tuple, items)))
    if not found:
        return {}
    numbers = sorted(found)
    until = list(accumulate(found[number] for number in numbers))
    median, p99 = (numbers[bisect_left(until, share * until[-1])] for share in (0.5, 0.99))
    return {"median": median, "p99": p99, "max": numbers[-1]}


def loads_of_trainers(ranks: TrainerGroup, own: Stats) -> dict[str, Sequence[float]]:
    """Work of each trainer in training steps, by rank; empty where they count none. Called by all trainers, together.

    Args:
        own: statistics of this trainer.

    Returns:
        ``asked_keys``, ``served_rows`` and ``exchange_s``: see :mod:`girih.runs.stats`.
    """
    names = (ASKED_KEYS, SERVED_ROWS, EXCHANGE_NS)
    mine = [0.0] * (len(names) * ranks.size)
    mine[ranks.rank :: ranks.size] = [own.counters[name] for name in names]
    told = ranks.sum(mine)
    if not any(told):
        return {}
    asked, served, exchange_ns = (told[i : i + ranks.size] for i in range(0, len(told), ranks.size))
    return {
        ASKED_KEYS: [int(count) for count in asked],
        SERVED_ROWS: [int(count) for count in served],
        "exchange_s": [round(each / 1e9, 6) for each in exchange_ns],
    }


def hit_ratio(counters: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """``hit_ratio``: the share of reads in training that each tier answered; empty where there is one tier.

    A read is that of a row that was there, once for each batch that has its key. What was fetched ahead counts for the
    tier that it came from.
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


def imbalance_of(loads: Mapping[str, Sequence[float]], paced_keys: int) -> dict[str, float]:
    """For each load, the most that one process has over the mean of all; and the same for keys, step by step.

    Args:
        paced_keys: counter of that name.
    """
    found = {name: max(each) * len(each) / sum(each) for name, each in loads.items() if sum(each)}
    if paced_keys:
        found["asked_keys_per_step"] = paced_keys / sum(loads[ASKED_KEYS])
    return found
