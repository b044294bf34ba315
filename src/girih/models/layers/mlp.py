"""The multi-layer perceptron of all models."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from girih.config import checks


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation that takes the running moments where a training batch has one example.

    One example has no variance, and the last batch of an epoch may have just one.
    """

    def forward(self, input: Tensor) -> Tensor:
        """float32[B, D] to float32[B, D]."""
        if self.training and lacks_variance(input):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(input)


def lacks_variance(input: Tensor) -> bool:
    """Whether a training batch cannot be normalised by itself: it has one example, or none.

    A mode of torch functions may know of more examples elsewhere, see :class:`girih.dense.batch_norm.GlobalBatchNorm`.
    """
    if has_torch_function_unary(input):
        known: bool = handle_torch_function(lacks_variance, (input,), input)
        return known
    return input.shape[0] < 2


class MLP(nn.Sequential):
    """Blocks of Linear → BatchNorm (option) → ReLU → Dropout, then a plain Linear to ``outputs``.

    Without ``outputs`` it ends with the last block.

    Attributes:
        width: of what comes out.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        outputs: int | None = None,
        *,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        checks.fraction("dropout", dropout)
        checks.flag("batch_norm", batch_norm)
        layers: list[nn.Module] = []
        width = inputs
        for size in hidden:
            layers.append(nn.Linear(width, size))
            if batch_norm:
                layers.append(BatchNorm(size))
            layers.append(nn.ReLU(inplace=True))  # nothing before it keeps its own output
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            width = size
        if outputs is not None:
            layers.append(nn.Linear(width, outputs))
            width = outputs
        super().__init__(*layers)
        self.width = width
