"""The dense half of trainers that each own some features. Weight-rich operators are divided (DES, Algorithm 1).

Each trainer computes the partial results of its features. The inputs of the upper network are the sums or the
concatenations of partial results. The parameters of operators are on the trainers whose features they read. They are
still dense parameters: the optimizer, clipping and schedules apply to them, and a checkpoint has the whole parameters.

Shapes: B examples, T labels, X numeric features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from girih.checkpoint.save import DenseState
from girih.comm.group import TrainerGroup
from girih.comm.group.trainers import Vote
from girih.data.batch import Batch, share_of
from girih.dense.half import DenseSpec, ScoredSteps
from girih.dense.halves.allreduced import SynchronousReplica
from girih.dense.halves.deferred import Gradients
from girih.dense.halves.replica import ReplicaComputed
from girih.dense.options import Lamb
from girih.dense.substitution import Aggregation, ShardedParameters
from girih.errors import NonFiniteError
from girih.models.embeddings import Embeddings
from girih.models.loss import Targets
from girih.models.operators import Aggregated, SubstitutableOperator, operators_of
from girih.planner.placement import Placement
from girih.schema import Schema


class SubstitutedReplica(SynchronousReplica):
    """One copy of the upper network, and a part of the operators below it.

    Each trainer sees all examples, but only the columns of the features that it owns.

    Args:
        placement: the features that each trainer owns.
        split: True if each trainer computes the upper network only for its share of a training batch, with independent
            dropout. Otherwise, and in evaluations, all trainers compute the same numbers, with the same dropout.
        half: True sends partial results as bfloat16.

    Attributes:
        shared: the parameters of which all trainers have a whole copy.
    """

    def __init__(
        self,
        spec: DenseSpec,
        ranks: TrainerGroup,
        *,
        schema: Schema,
        placement: Placement,
        split: bool = False,
        half: bool = False,
    ) -> None:
        super().__init__(spec, ranks)
        random = torch.get_rng_state()
        ranks.broadcast_tensor(random)
        torch.set_rng_state(random)
        self.split = split
        self._wire = Aggregation(ranks, spec.stats, half=half)
        self._operators = [operator for _, operator in operators_of(self.module)]
        sums = any(operator.aggregation == "sum" for operator in self._operators)
        # Requests to stop are sent with partial results, so that no step needs a separate message.
        self._polls_stop = spec.on_nonfinite == "stop" and sums and not (split or half or ranks.size == 1)
        self._sharded = ShardedParameters(self.module, self.optimizer, ranks)
        self._places: dict[SubstitutableOperator, list[Tensor]] = {}
        self._narrow([placement.schema_of(rank, schema) for rank in range(ranks.size)])
        self.shared = [parameter for parameter in self.parameters if parameter not in self._sharded]
        if isinstance(self.optimizer, Lamb):
            self.optimizer.whole_squares = self._whole_squares

    def state(self) -> DenseState:
        """See :class:`Replica`. All parameters in the state are whole. All trainers must call this method together."""
        return self._sharded.whole(super().state())

    def restore(self, state: DenseState) -> None:
        """See :class:`Replica`. Each trainer restores its part of the parameters."""
        super().restore(self._sharded.part(state))

    def _narrow(self, schemas: list[Schema]) -> None:
        """Keeps the part of each operator that this rank's features need."""
        for operator in self._operators:
            if operator.aggregation == "concat":
                self._places[operator] = [operator.places(part).to(self.device) for part in schemas]
            for name, split in operator.narrow(schemas[self.ranks.rank]).items():
                self._sharded.keep(operator.get_parameter(name), split)

    def _num_outputs(self, num_examples: int, *, train: bool) -> int:
        return self._wire.shares(num_examples)[self.ranks.rank] if self.split and train else num_examples

    def _targets(self, batch: Batch) -> tuple[Targets, float]:
        """Returns the targets of this trainer's share if the upper network is split, otherwise of all examples."""
        targets, weight = super()._targets(batch)
        if not self.split:
            return targets, weight
        none = replace(batch, ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), weights=None)
        targets, share = super()._targets(share_of(none, self.ranks.rank, self.ranks.size))
        return targets, weight * share  # the batch may be a micro-batch

    def _score(self, scored: ScoredSteps, outputs: Tensor, targets: Targets) -> None:
        """Counts the logits of this trainer's share. If all trainers have all examples, only rank 0 counts."""
        if self.split or self.ranks.first:
            super()._score(scored, outputs, targets)

    def _logits_of(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Tensor:
        totals = self._totals(numeric, embeddings, train=train)
        num_examples = min(len(total) for total in totals.values())
        if not num_examples:  # a trainer with an empty share takes part with an example that does not count
            totals = {operator: F.pad(total, (0, 0, 0, 1)) for operator, total in totals.items()}
        none = numeric.new_empty(max(1, num_examples), 0)  # only operators read numeric features
        # If the network is replicated, every trainer has all examples.
        with self._normalizing(counted=num_examples > 0) if self.split and train else nullcontext():
            logits = super()._logits_of(none, Aggregated(totals), train=train)  # type: ignore[arg-type]
        return logits[:num_examples]

    def _totals(
        self, numeric: Tensor, embeddings: Embeddings, *, train: bool
    ) -> dict[SubstitutableOperator, Tensor]:
        """Exchanges partial results. All sums share one buffer, and each concatenation has a separate buffer."""
        sums = [operator for operator in self._operators if operator.aggregation == "sum"]
        totals: dict[SubstitutableOperator, Tensor] = {}
        split = self.split and train
        if sums:
            partials = [operator.partial(numeric, embeddings).float() for operator in sums]
            joined = torch.cat(partials, dim=1) if len(partials) > 1 else partials[0]
            total = self._wire.summed(joined, split=split, polls_stop=self._polls_stop and train)
            totals |= zip(sums, total.split([o.columns for o in sums], dim=1), strict=True)  # type: ignore[no-untyped-call]
        for operator in self._operators:
            if operator.aggregation == "concat":
                partial = operator.partial(numeric, embeddings).float()
                totals[operator] = self._wire.joined(partial, self._places[operator], split=split)
        return totals

    def compute(
        self,
        batch: Batch,
        embeddings: Embeddings,
        onto: ReplicaComputed | None = None,
        *,
        last: bool = True,
    ) -> ReplicaComputed:
        """See :class:`Replica`. With the last micro-batch, the trainers agree on whether the step is refused.

        They need no agreement if all have the same loss and the run ends at a refused step.

        Raises:
            NonFiniteError: a gradient on this trainer is not finite, maybe only on this trainer, and the run ends at a
                refused step.
        """
        computed = super().compute(batch, embeddings, onto, last=last)
        if not last or self.ranks.size == 1:
            return computed
        vote, names = computed.vote, computed.names()
        refusal = computed.explain(names, [vote.loss.item(), 0.0, 0.0, *computed.largest.tolist()])
        # The sparse half would find a non-finite gradient only after other trainers have updated their rows.
        parts = computed.embeddings if refusal is None else ()
        feature = next((name for part in parts if (name := part.first_nonfinite_gradient())), None)
        if feature is not None:
            refusal = NonFiniteError(f"the gradient of feature {feature!r} is NaN or infinite")
        if self.split:
            total, refusal = self._sum_shared(computed.gradients, vote.loss.item(), refusal)
        elif self._polls_stop:
            if refusal is not None and math.isfinite(
                vote.loss
            ):  # all trainers have the same loss, but not the same gradients
                raise NonFiniteError(
                    f"trainer {self.ranks.rank}: {refusal}; other trainers may have applied theirs; resume from the last"
                    " checkpoint, with a lower learning rate or train.clip_norm"
                )
            return computed
        else:
            # If all trainers have the whole loss, it counts once.
            counted = vote.loss.item() if refusal is None and self.ranks.first else 0.0
            total, num_refusing = self.ranks.vote(counted, refusing=refusal is not None)
            if num_refusing:
                refusal = refusal or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
        refused = torch.tensor(refusal is not None, device=self.device)
        loss = torch.tensor(total, dtype=torch.float64, device=self.device)
        return replace(computed, vote=Vote(refused, loss), refusal=refusal)

    def _taken_gradients(self) -> Gradients:
        """See :class:`Replica`. Parameters without a local part get empty gradients, and therefore optimizer state."""
        for parameter in self.parameters:
            if parameter.grad is None and not parameter.numel():
                parameter.grad = torch.zeros_like(parameter)
        return super()._taken_gradients()

    def _sum_shared(
        self, taken: Gradients, value: float, refusal: NonFiniteError | None
    ) -> tuple[float, NonFiniteError | None]:
        """Sums the gradients of shared parameters over the trainers' shares. The same message has the votes."""
        pairs = zip(self.parameters, taken, strict=True)
        gradients = [each for parameter, each in pairs if each is not None and parameter not in self._sharded]
        counted = 0.0 if refusal else value
        votes = torch.tensor([counted, refusal is not None, self.ranks.stop_requested], device=self.device)
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), votes])
        with self.stats_of_process.spans("allreduce"):
            self.ranks.all_reduce(flat)
        *sums, votes = flat.split([*(gradient.numel() for gradient in gradients), len(votes)])  # type: ignore[no-untyped-call]
        num_bytes = 4 * (flat.numel() - len(votes))
        self.stats_of_process.sent("dense", 2 * (self.ranks.size - 1) * num_bytes // self.ranks.size)
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))
        loss, num_refusing, num_stopping = votes.tolist()
        self.ranks.note_stops(num_stopping)
        if num_refusing:
            refusal = refusal or NonFiniteError("another trainer's loss or gradient is NaN or infinite")
        elif not torch.isfinite(flat).all():
            refusal = NonFiniteError("a dense gradient, summed over trainers, is NaN or infinite")
        return loss, refusal

    def _clip(self, most: float) -> None:
        """Clips by the norm over all trainers' parts, as ``clip_grad_norm_`` does for whole parameters."""
        sharded = sum(_square(p.grad) for p in self.parameters if p in self._sharded)
        shared = sum(_square(p.grad) for p in self.shared)
        norm = (self.ranks.sum([sharded])[0] + shared) ** 0.5
        scale = min(1.0, most / (norm + 1e-6))
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def _whole_squares(self, parameters: Sequence[Tensor], squares: Tensor) -> Tensor:
        """See :class:`Lamb`. Sums the norms of sharded parameters. Norms of shared parameters stay the same."""
        parts = torch.tensor([parameter in self._sharded for parameter in parameters], device=squares.device)
        total = squares * parts[:, None]
        self.ranks.all_reduce(total)
        return torch.where(parts[:, None], total, squares)


def _square(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.double().square().sum())
