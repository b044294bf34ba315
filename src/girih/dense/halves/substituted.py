"""The dense half of trainers that each own some features: its weight-rich operators are spread (DES, Algorithm 1).

Each trainer computes the partial results of its own features; their sum, or concatenation, is what the upper network
takes. Parameters of operators stay with the features that they read, and are dense parameters all the same: the
optimizer, clipping and schedules see them, and a checkpoint has them whole.

Shapes: B examples, T labels, X numeric features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.data.batch import Batch
from girih.data.shares import share_of
from girih.dense.halves.synchronous import SynchronousReplica
from girih.dense.options import OptimizerFactory
from girih.dense.substitution.aggregation import Aggregation
from girih.dense.substitution.sharded_parameters import ShardedParameters
from girih.errors import ConfigError
from girih.models.embeddings import Embeddings
from girih.models.operators import Aggregated, Operator, operators_of
from girih.planner.placement import Placement
from girih.schema import Schema
from girih.training.halves import Targets

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
"""Optimizers that move a part of a parameter as they would move it within the whole."""


class SubstitutedReplica(SynchronousReplica):
    """One copy of the upper network, and a part of the operators below it; arguments as of :class:`SynchronousReplica`.

    To be placed, once, before it computes. All trainers see all examples, each its own columns of them.

    Args:
        half: partial results travel as bfloat16.
    """

    own_dropout = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        *,
        ranks: TrainerGroup,
        half: bool = False,
        **options: Any,
    ) -> None:
        refuse_unsubstitutable(module)
        random = torch.get_rng_state()
        super().__init__(module, optimizer, ranks=ranks, begin_alike=(random,), **options)
        torch.set_rng_state(random)
        kind = type(self.optimizer)
        if self.optimizer is not None and not (
            kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
        ):
            raise ConfigError(
                f"strategy: substitution: the dense optimizer {kind.__name__} may need parameters whole; expected one of"
                f" {', '.join(ELEMENTWISE)}"
            )
        self._split = False
        self._wire = Aggregation(ranks, half=half)
        self._operators = list(operators_of(module))
        self.num_parameters = sum(p.numel() for p in self.parameters)  # of the whole model
        self.placement = Placement({}, ranks.size)
        self._splits = ShardedParameters()
        self._places: dict[Operator, list[Tensor]] = {}

    @property
    def wire_bytes(self) -> Counter[str]:
        """Sent by this trainer: partial results, and dense gradients."""
        return Counter(partials=self._wire.sent_bytes, dense=self.sent_bytes)

    @property
    def shared(self) -> list[nn.Parameter]:
        """The parameters that all trainers have whole."""
        named = self.module.named_parameters()
        return [p for name, p in named if p.requires_grad and name not in self._splits]

    @property
    def split(self) -> bool:
        """Whether each trainer computes the upper network for its share of a training batch only.

        Else all compute the same, with the same dropout. Evaluations always do.
        """
        return self._split

    @split.setter
    def split(self, split: bool) -> None:
        if split and not self._split and not self.ranks.first:
            torch.manual_seed(torch.initial_seed() + self.ranks.rank)  # dropout of its own
        self._split = split

    @property
    def partial_bytes(self) -> int:
        """Of one number of a partial result on the wire."""
        return self._wire.itemsize

    @property
    def together(self) -> list[tuple[str, ...]]:
        """Features that one trainer must have together."""
        return [names for _, operator in self._operators for names in operator.together]

    def num_columns(self, aggregation: str) -> int:
        """Numbers an example of all operators that are aggregated so."""
        return sum(o.columns for _, o in self._operators if o.aggregation == aggregation)

    def place(self, placement: Placement, schema: Schema) -> None:
        """Keeps of every operator what this rank's features need."""
        self.placement = placement
        parts = [placement.schema_of(rank, schema) for rank in range(self.ranks.size)]
        for name, operator in self._operators:
            if operator.aggregation == "concat":
                self._places[operator] = [operator.places(part).to(self.device) for part in parts]
            for parameter, own in operator.narrow(parts[self.ranks.rank]).items():
                full = f"{name}.{parameter}" if name else parameter
                self._splits.keep(full, own, operator.get_parameter(parameter), self.optimizer)

    def targets(self, batch: Batch, *, train: bool = True) -> Targets:
        """Of this trainer's share where the upper network is split; of all examples else."""
        if self.split and train:
            without_ids = replace(
                batch, ids=np.empty(0, np.int64), offsets=np.zeros(1, np.int32), weights=None
            )
            batch = share_of(without_ids, self.ranks.rank, self.ranks.size)
        return super().targets(batch, train=train)

    def forward(self, batch: Batch, embeddings: Embeddings, *, train: bool = True) -> Tensor:
        """Logits, float32[B, T], or those of this trainer's share."""
        self._wire.spans = self.spans
        return super().forward(batch, embeddings, train=train)

    def _logits_of(self, numeric: Tensor, embeddings: Embeddings, *, train: bool) -> Tensor:
        totals = self._totals(numeric, embeddings, split=self.split and train)
        num_examples = min(len(total) for total in totals.values())
        if not num_examples:  # an empty share takes part with an example that counts nothing
            totals = {operator: F.pad(total, (0, 0, 0, 1)) for operator, total in totals.items()}
        none = numeric.new_empty(max(1, num_examples), 0)  # numeric features are read by operators alone
        logits = super()._logits_of(none, Aggregated(totals), train=train)  # type: ignore[arg-type]
        return logits[:num_examples]

    def _totals(self, numeric: Tensor, embeddings: Embeddings, *, split: bool) -> dict[Operator, Tensor]:
        """Everything that is summed goes in one buffer; each concatenation in one of its own."""
        sums = [o for _, o in self._operators if o.aggregation == "sum"]
        totals: dict[Operator, Tensor] = {}
        if sums:
            partials = [operator.partial(numeric, embeddings).float() for operator in sums]
            joined = torch.cat(partials, dim=1) if len(partials) > 1 else partials[0]
            total = self._wire.summed(joined, split=split)
            totals |= zip(sums, total.split([o.columns for o in sums], dim=1), strict=True)  # type: ignore[no-untyped-call]
        for _, operator in self._operators:
            if operator.aggregation == "concat":
                own = operator.partial(numeric, embeddings).float()
                totals[operator] = self._wire.joined(own, self._places[operator], split=split)
        return totals

    @property
    def counts_loss(self) -> bool:
        """Where all have the whole loss, it counts once."""
        return self.split or self.ranks.first

    def _check_gradients(self) -> None:
        self._sum_shared()
        for parameter in self.parameters:
            if (
                parameter.grad is None and not parameter.numel()
            ):  # optimizers then have state of it everywhere
                parameter.grad = torch.zeros_like(parameter)
        super()._check_gradients()

    def _sum_shared(self) -> None:
        """Gradients of what all have whole are of each one's share where the network is split: their sum counts."""
        gradients = [p.grad for p in self.shared if p.grad is not None]
        if not self.split or not gradients:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        with nullcontext() if self.spans is None else self.spans("allreduce"):
            self.ranks.all_reduce(flat)
        self.sent_bytes += 2 * (self.ranks.size - 1) * flat.numel() * 4 // self.ranks.size
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):  # type: ignore[no-untyped-call]
            gradient.copy_(part.view_as(gradient))

    def _clip(self, most: float) -> None:
        """By the norm over all trainers' parts, as ``clip_grad_norm_`` does of whole parameters."""
        shared = {id(parameter) for parameter in self.shared}
        own = sum(_square(p) for p in self.parameters if id(p) not in shared)
        rest = sum(_square(p) for p in self.parameters if id(p) in shared)
        norm = (self.ranks.sum([own])[0] + rest) ** 0.5
        scale = min(1.0, most / (norm + 1e-6))
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def state(self) -> dict[str, Any]:
        """As of :class:`Replica`, with every parameter whole. All trainers call it together."""
        state = super().state()
        return state if self.ranks.size == 1 else self._splits.whole(
            state, self.module, self.optimizer, self.ranks
        )

    def restore(self, state: Mapping[str, Any]) -> None:
        """As of :class:`Replica`; each trainer takes its part."""
        super().restore(self._splits.part(state, self.module, self.optimizer))


def refuse_unsubstitutable(module: nn.Module) -> None:
    """Refuses a model whose weight-rich input does not go through operators alone.

    Raises:
        ConfigError: says why, and what to use instead.
    """
    kind = type(module).__name__
    reason = getattr(module, "not_substitutable", None)
    if reason is not None:
        raise ConfigError(f"strategy: substitution: {kind}: {reason}")
    if not any(True for _ in operators_of(module)):
        raise ConfigError(
            f"strategy: substitution: {kind} has no substitutable operator; build it of those in girih.models.operators,"
            " or use strategy 'synchronous'"
        )


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
