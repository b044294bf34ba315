"""``summary.json``: how a run ended, in one flat object, over all its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from girih.comm.group import TrainerGroup
from girih.dense.half import DenseHalf
from girih.metrics import Metrics
from girih.runs.state import RunState
from girih.runs.stats import UPDATES_SINCE_READ, Stats, wire_bytes
from girih.sparse.half import SparseStats

WIRE_KINDS = ("ids", "embeddings", "gradients", "partials", "dense")


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
    processes = [*loaders.values(), *sparse.processes.values()]
    wire = Counter(own.wire_bytes())
    for snapshot in processes:
        wire.update(wire_bytes(snapshot["counters"]))
    stale, num_steps, lost, *sent = ranks.sum(
        [state.staleness_sum, state.step, own.counters["lost_updates"], *(wire[kind] for kind in WIRE_KINDS)]
    )
    since_read: Counter[int] = Counter()
    for snapshot in processes:
        for number, times in snapshot["histograms"].get(UPDATES_SINCE_READ, {}).items():
            since_read[int(number)] += times
    served = [s["counters"]["served_keys"] for s in processes if "served_keys" in s["counters"]]
    return {
        "auc": None if metrics is None else metrics.auc,
        "logloss": None if metrics is None else metrics.logloss,
        "samples_per_s": state.examples / state.train_s if state.train_s else None,
        "num_examples": state.examples,
        "num_rows": sum(sparse.rows.values()),
        "staleness_max": int(ranks.largest([state.staleness_max])[0]),
        "staleness_mean": stale / num_steps if num_steps else 0.0,
        "updates_since_read_max": max(since_read, default=0),
        "updates_since_read_mean": sum(n * times for n, times in since_read.items())
        / max(1, since_read.total()),
        "lost_updates": int(lost),
        "wire_bytes": {kind: int(count) for kind, count in zip(WIRE_KINDS, sent, strict=True)},
        **facts,
        "dense_staleness_max": dense.stats()["staleness_max"],
        **({"server_load": max(served) * len(served) / sum(served)} if sum(served) else {}),
        "steps": state.step,
        "epochs": state.epoch,
        "stopped_early": state.stopped_early,
        "checkpoint_step": state.step if state.best_step is None else state.best_step,
        "refused_steps": state.refused,
        "store": dict(sparse.store),
        "phases_s": {name: round(seconds, 3) for name, seconds in own.spans.totals_s.items()},
        "by_label": {} if metrics is None else metrics.as_dict(),
    }
