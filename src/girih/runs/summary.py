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
    wire_bytes: Mapping[str, int],
    staleness: tuple[int, float],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Puts the summary together.

    Args:
        metrics: of the final weights, on test (else valid) data; None where there is neither.
        counters: of the store. phases_s: seconds of each phase of the loop. facts: what else is known.
        wire_bytes: sent by all processes, by kind.
        staleness: the largest of all trainers, and the mean of all batches.

    Returns:
        Plain values. ``samples_per_s`` counts training steps only; ``auc`` and ``logloss`` are the first label's;
        ``wire_bytes`` and staleness are zero where nothing crosses a wire. ``lost_updates`` is 0 in every run that
        ends: an update that cannot be delivered ends the run.
    """
    return {
        "auc": None if metrics is None else metrics.auc,
        "logloss": None if metrics is None else metrics.logloss,
        "samples_per_s": state.examples / state.train_s if state.train_s else None,
        "num_examples": state.examples,
        "num_rows": num_rows,
        "staleness_max": staleness[0],
        "staleness_mean": staleness[1],
        "lost_updates": 0,
        "wire_bytes": {kind: int(wire_bytes.get(kind, 0)) for kind in WIRE_KINDS},
        **facts,
        "steps": state.step,
        "epochs": state.epoch,
        "stopped_early": state.stopped_early,
        "checkpoint_step": state.step if state.best_step is None else state.best_step,
        "refused_steps": state.refused,
        "store": dict(counters),
        "phases_s": {name: round(seconds, 3) for name, seconds in phases_s.items()},
        "by_label": {} if metrics is None else metrics.as_dict(),
    }
