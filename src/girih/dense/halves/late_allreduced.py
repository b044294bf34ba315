"""The dense half of a trainer among others on GPUs, of which the hosts learn loss and refusals a step late.

Trainers vote on their GPUs: what one refuses moves nothing on any, nor do the steps behind it until the hosts know. They learn of it at the same
step, and so they do of a stop.

Shapes: R trainers, K words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from girih.data.batch import Batch
from girih.dense.halves.allreduced import AllReducedReplica
from girih.dense.halves.late_replica import STOPS, LateReplica, Numbers
from girih.models.embeddings import Embeddings

_SELDOM = 1 << 30


class LateAllReducedReplica(AllReducedReplica, LateReplica):  # type: ignore[misc]
    """One copy of the dense parameters among equal ones, moved by decisions of the devices; see the module."""

    def _distributed(self, batch: Batch, embeddings: Embeddings) -> DistributedDataParallel:
        parallel = super()._distributed(batch, embeddings)
        # it waits for the GPU to measure a step
        parallel._set_ddp_runtime_logging_sample_rate(_SELDOM)  # type: ignore[no-untyped-call]
        return parallel

    def ballot(self, loss: Tensor, refused: Tensor) -> Tensor:
        """See :class:`LateReplica`."""
        stops = torch.full_like(loss, float(self.ranks.stop_requested))
        return torch.stack([loss, refused.double(), stops])

    def gathered(self, words: Tensor) -> Tensor:
        """See :class:`LateReplica`."""
        return self.ranks.all_gather(words)

    def heed(self, ballots: Sequence[Numbers]) -> None:
        """Learns, as all trainers do at the same step, whether one of them wants to stop."""
        self.ranks.heed(sum(ballot[STOPS] for ballot in ballots))
