"""Specification of a dense half: said once, by the trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from girih.dense.options import OptimizerFactory
from girih.dense.scored import ScoredSteps
from girih.runs.stats import Stats
from girih.schema import LabelLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A model and how it learns.

    Attributes:
        module: ``forward(numeric, embeddings) -> logits``.
        optimizer: makes the optimizer of the module's parameters; a module without any has none.
        precision: "bfloat16" computes the forward and backward pass under autocast; parameters, their gradients
            and the optimizer stay float32.
        forward: "int8" computes the forward pass of linear layers with 8-bit integers, training and evaluating, on CPUs.
        on_nonfinite: "skip" has trainers agree on every step before one of them moves anything; where the run ends
            at a refused step ("stop"), a half may have them learn of it later.
        clip_norm: the largest norm of all dense gradients together (``clip_grad_norm_``); None clips nothing.
        global_batch_norm: batch norm takes the moments of all trainers' examples of a step, not of each trainer's own.
        compile: torch compiles forward and backward passes of training steps.
        stats: where spans and bytes sent are counted.
        losses: of each label, where the model has no loss of its own; bce for all where it is empty.
        huber_delta: the error from which Huber's loss grows linearly.
        scored: takes the logits of training steps; None where nobody wants them.
    """

    module: nn.Module
    optimizer: OptimizerFactory
    precision: str = "float32"
    forward: Literal["float32", "int8"] = "float32"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    on_nonfinite: Literal["stop", "skip"] = "skip"
    clip_norm: float | None = None
    global_batch_norm: bool = False
    compile: bool = False
    stats: Stats = field(default_factory=Stats)
    losses: tuple[LabelLoss, ...] = ()
    huber_delta: float = 1.0
    scored: ScoredSteps | None = None
