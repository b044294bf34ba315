"""``summary.json``: how a run ended, in one flat object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from girih.metrics import Metrics
from girih.training.state import RunState

WIRE_KINDS = ("ids", "embeddings", "gradients", "partials", "dense")


def summarize(
    state: RunState,
    metrics: Metrics | None,
    *,
    counters: Mapping[str, int],
    num_rows: int,
    phases_s: Mapping[str, float],
    totals: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Puts the summary together.

    Args:
        metrics: those of the final weights, on test (else valid) data; None where there is neither.
        counters: of the store. phases_s: seconds of each phase of the loop. facts: what else is known.
        totals: sums over all processes: see ``girih.runs.totals``.

    Returns:
        Plain values. ``samples_per_s`` counts training steps only; ``auc`` and ``logloss`` are the first label's.
    """
    totals = dict(totals)
    first = {
        name: totals.pop(name) for name in ("staleness_max", "staleness_mean", "lost_updates", "wire_bytes")
    }
    return {
        "auc": None if metrics is None else metrics.auc,
        "logloss": None if metrics is None else metrics.logloss,
        "samples_per_s": state.examples / state.train_s if state.train_s else None,
        "num_examples": state.examples,
        "num_rows": num_rows,
        **first,
        **facts,
        **totals,
        "steps": state.step,
        "epochs": state.epoch,
        "stopped_early": state.stopped_early,
        "checkpoint_step": state.step if state.best_step is None else state.best_step,
        "refused_steps": state.refused,
        "store": dict(counters),
        "phases_s": {name: round(seconds, 3) for name, seconds in phases_s.items()},
        "by_label": {} if metrics is None else metrics.as_dict(),
    }
