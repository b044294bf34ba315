"""Sparse optimizers as frozen descriptions; the arithmetic is in ``kernels``.

All optimizers are lazy: a row moves only in steps whose batch contains it. Gradients of equal keys are summed before
the step. ``l2 = λ`` adds λ·row to the gradient of every row in the batch; rows outside the batch do not decay. Defaults
are those of ``torch.optim``, if torch has the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, get_args

from girih.config.bounds import Fraction, NonNegative, Positive
from girih.config.options import Options


class _Optimizer(Options):
    """Base of sparse optimizers.

    Attributes:
        lr: learning rate.
        l2: λ of the L2 penalty on rows in the batch.
    """

    owner = "{self.name}."
    name: ClassVar[str]
    misplaced_options: ClassVar[Mapping[str, str]] = {
        "learning_rate": "did you mean 'lr'?",
        "weight_decay": "did you mean 'l2'?",
    }


class SGD(_Optimizer):
    """``row -= lr · v`` with ``v = momentum · v + gradient`` (``torch.optim.SGD``).

    State: ``dim`` floats with momentum, none without.

    Attributes:
        momentum: the factor of the earlier velocity; 0 keeps no velocity.
    """

    name = "sgd"
    lr: NonNegative = 1e-3
    momentum: Fraction = 0.0
    l2: NonNegative = 0.0


class Adagrad(_Optimizer):
    """``row -= lr · g / (sqrt(Σ g²) + eps)``, element by element (``torch.optim.Adagrad``).

    State: ``dim`` floats.

    Attributes:
        initial_accumulator_value: Σ g² of a new row.
        eps: a small number that keeps the divisor above 0.
    """

    name = "adagrad"
    lr: NonNegative = 1e-2
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10
    l2: NonNegative = 0.0


class RowwiseAdagrad(_Optimizer):
    """Adagrad with one accumulator per row: the mean of g² over the row's columns.

    State: 1 float.

    Attributes:
        initial_accumulator_value: the accumulator of a new row.
        eps: a small number that keeps the divisor above 0.
    """

    name = "rowwise_adagrad"
    lr: NonNegative = 1e-2
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10
    l2: NonNegative = 0.0


class Adam(_Optimizer):
    """Lazy Adam: moments move only for touched rows; bias correction counts all steps (``torch.optim.SparseAdam``).

    State: 2 · ``dim`` floats.

    Attributes:
        betas: the decay of the mean of g, and of the mean of g².
        eps: a small number that keeps the divisor above 0.
    """

    name = "adam"
    lr: NonNegative = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    l2: NonNegative = 0.0


class FTRL(_Optimizer):
    """FTRL-proximal (McMahan et al. 2013, Algorithm 1), per coordinate, with exact zeros.

    ``lr`` is the paper's α, ``beta`` its β, ``l1`` its λ₁, ``l2`` its λ₂. Here ``l2`` belongs to the closed form of the
    weight, not to the gradient. State: 2 · ``dim`` floats (z, n).

    Attributes:
        lr: learning rate, α.
        beta: β, which lowers the rate of the first steps.
        l1: λ₁; a larger value makes more weights exactly 0.
        l2: λ₂, which shrinks weights.
    """

    name = "ftrl"
    lr: Positive = 0.1
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0


SparseOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam | FTRL
BY_NAME: dict[str, type[SparseOptimizer]] = {cls.name: cls for cls in get_args(SparseOptimizer)}
