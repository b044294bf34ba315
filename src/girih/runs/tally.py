"""What all processes of a run count and time, put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from girih.comm.group import TrainerGroup
from girih.runs.spans import Spans
from girih.training.state import RunState
from girih.runs.summary import WIRE_KINDS
from girih.training.halves import DenseHalf, SparseHalf


class Tally:
    """Asks the trainers, and the processes behind their halves. Methods are called by all trainers, together.

    Attributes:
        loaders: what loaders counted, by title; to be set before they end.
    """

    def __init__(self, ranks: TrainerGroup, sparse: SparseHalf, dense: DenseHalf) -> None:
        self._ranks, self._sparse, self._dense = ranks, sparse, dense
        self.loaders: Mapping[str, Mapping[str, Any]] = {}

    def told(self) -> dict[str, Mapping[str, Any]]:
        """What each process beside the trainers counts, as far as this trainer asks it, by title."""
        return {**self.loaders, **self._sparse.told()}

    def summed(self, state: RunState) -> dict[str, Any]:
        """``wire_bytes`` by kind, ``staleness`` (the largest and the mean), and ``server_load`` where there are servers."""
        told, ranks = self.told(), self._ranks
        wire = Counter(self._sparse.wire_bytes)
        wire.update(self._dense.wire_bytes)
        for counted in told.values():
            wire.update(counted["wire"])
        stale, num_steps, *sent = ranks.sum([state.staleness_sum, state.step, *(wire[k] for k in WIRE_KINDS)])
        most = int(ranks.largest([state.staleness_max])[0])
        served = [counted["served_keys"] for counted in told.values() if "served_keys" in counted]
        load = {"server_load": max(served) * len(served) / sum(served)} if sum(served) else {}
        return {
            "wire_bytes": {kind: int(count) for kind, count in zip(WIRE_KINDS, sent, strict=True)},
            "staleness": (most, stale / num_steps if num_steps else 0.0),
            **load,
        }

    def timelines(self, spans: Spans, *, failed: bool) -> dict[str, Any]:
        """The spans of all processes by title, on rank 0; of this trainer alone where the run failed."""
        own = {f"trainer {self._ranks.rank}": spans.events()}
        if failed:
            return own
        others = {name: counted["spans"] for name, counted in self.told().items()}
        gathered = self._ranks.gather({**own, **others})
        return {name: events for each in gathered or [own] for name, events in each.items()}
