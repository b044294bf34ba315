"""Progressive validation over all trainers: what each has counted, added up, told and saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from girih.comm.group import TrainerGroup
from girih.dense.scored import ScoredSteps
from girih.metrics.progressive import progressive_metrics
from girih.schema import Labels


class ProgressiveValidation:
    """The scores of training steps, of all trainers.

    Args:
        steps: of this trainer.
    """

    def __init__(self, steps: ScoredSteps, ranks: TrainerGroup, labels: Labels) -> None:
        self._steps, self._ranks, self._labels = steps, ranks, labels

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Label → metrics, over all trainers, which call it together."""
        return self._metrics(self._added())

    def record(self) -> Mapping[str, Any]:
        """The first label's metrics: over all trainers in step, who call it together; where they are not, this one's own."""
        counts = self._counted() if self._ranks.apart else self._added()
        return self._metrics(counts)[self._labels.names[0]]

    def state(self) -> Tensor:
        """float64[T, 2K + 3], the whole run's counts over all trainers, which call it together."""
        return self._added()[0]

    def restore(self, state: Tensor | None) -> None:
        """Goes on from a saved state, which the first trainer takes; None begins anew."""
        self._steps.settle()  # what is under way belongs to what is dropped
        self._steps.scores.restore(state.numpy() if state is not None and self._ranks.first else None)

    def _metrics(self, counts: Tensor) -> dict[str, dict[str, Any]]:
        return progressive_metrics(counts.numpy(), self._labels.names, self._labels.losses)

    def _counted(self) -> Tensor:
        self._steps.settle()
        return torch.from_numpy(self._steps.scores.counts())

    def _added(self) -> Tensor:
        counts = self._counted()
        self._ranks.all_reduce(counts)
        return counts
