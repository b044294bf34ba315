"""Statistics of all processes of a run, put together. Functions are called by all trainers, together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from girih.comm.group import TrainerGroup
from girih.dense.half import DenseHalf
from girih.runs.stats import Stats, wire_bytes
from girih.runs.summary import WIRE_KINDS
from girih.sparse.half import SparseStats
from girih.training.state import RunState

Snapshots = Mapping[str, Mapping[str, Any]]
"""Title of a process → its ``Stats.snapshot``."""


def totals(
    ranks: TrainerGroup,
    own: Stats,
    sparse: SparseStats,
    dense: DenseHalf,
    loaders: Snapshots,
    state: RunState,
) -> dict[str, Any]:
    """Sums over all processes, for ``summary.json``."""
    processes = [*loaders.values(), *sparse.processes.values()]
    wire = Counter(own.wire_bytes())
    for snapshot in processes:
        wire.update(wire_bytes(snapshot["counters"]))
    stale, num_steps, lost, *sent = ranks.sum(
        [state.staleness_sum, state.step, own.counters["lost_updates"], *(wire[kind] for kind in WIRE_KINDS)]
    )
    served = [s["counters"]["served_keys"] for s in processes if "served_keys" in s["counters"]]
    load = {"server_load": max(served) * len(served) / sum(served)} if sum(served) else {}
    return {
        "wire_bytes": {kind: int(count) for kind, count in zip(WIRE_KINDS, sent, strict=True)},
        "staleness_max": int(ranks.largest([state.staleness_max])[0]),
        "staleness_mean": stale / num_steps if num_steps else 0.0,
        "lost_updates": int(lost),
        "dense_staleness_max": dense.stats()["staleness_max"],
        **load,
    }


def timelines(ranks: TrainerGroup, own: Stats, processes: Snapshots) -> dict[str, Any]:
    """The spans of all processes by title, on rank 0; of this trainer alone on the others."""
    mine = {f"trainer {ranks.rank}": own.spans.events()}
    others = {title: snapshot["spans"] for title, snapshot in processes.items()}
    gathered = ranks.gather({**mine, **others})
    return {title: events for each in gathered or [mine] for title, events in each.items()}
