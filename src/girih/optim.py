"""Sparse optimizers as frozen descriptions; the arithmetic is in ``kernels``.

All optimizers are lazy: a row moves only in steps whose batch contains it. Gradients of equal keys are summed before
the step. ``l2 = λ`` adds λ·row to the gradient of every row in the batch; rows outside the batch do not decay. Defaults
are those of ``torch.optim``, if torch has the optimizer.

Examples:
    A trainer has one optimizer for all rows. A table may have another one.

    >>> import girih
    >>> schema = girih.Schema([girih.Categorical(name="user")], labels="clicked")
    >>> model = girih.models.DeepFM(schema)
    >>> with girih.Trainer(
    ...     model, sparse_optimizer=girih.optim.Adagrad(lr=0.05)
    ... ) as trainer:
    ...     print(trainer)
    Trainer(DeepFM, step 0, tables user)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, get_args

from girih.config.bounds import Fraction, NonNegative, Positive
from girih.config.options import Options


class _Optimizer(Options):
    owner = "{self.name}."
    name: ClassVar[str]
    misplaced_options: ClassVar[Mapping[str, str]] = {
        "learning_rate": "did you mean 'lr'?",
        "weight_decay": "did you mean 'l2'?",
    }


class SGD(_Optimizer):
    """``row -= lr · v`` with ``v = momentum · v + gradient`` (``torch.optim.SGD``).

    State: ``dim`` float32 per row with momentum, none without.

    Attributes:
        lr: learning rate, per step.
        momentum: part of v that stays in the next step, in [0, 1).
        l2: factor λ of the row that is added to its gradient.

    Examples:
        >>> import girih
        >>> girih.Table(
        ...     name="user", optimizer=girih.optim.SGD(lr=0.1, momentum=0.9)
        ... ).optimizer
        SGD(lr=0.1, momentum=0.9, l2=0.0)
    """

    name = "sgd"
    lr: NonNegative = 1e-3
    momentum: Fraction = 0.0
    l2: NonNegative = 0.0


class Adagrad(_Optimizer):
    """``row -= lr · g / (sqrt(Σ g²) + eps)``, element by element (``torch.optim.Adagrad``).

    State: ``dim`` float32 per row.

    Attributes:
        lr: learning rate, per step.
        initial_accumulator_value: Σ g² of a new row.
        eps: added to the root, so that the quotient is finite.
        l2: factor λ of the row that is added to its gradient.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", optimizer=girih.optim.Adagrad(lr=0.05)).optimizer
        Adagrad(lr=0.05, initial_accumulator_value=0.0, eps=1e-10, l2=0.0)
    """

    name = "adagrad"
    lr: NonNegative = 1e-2
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10
    l2: NonNegative = 0.0


class RowwiseAdagrad(_Optimizer):
    """Adagrad with one accumulator per row: the mean of g² over the row's columns.

    State: 1 float32 per row.

    Attributes:
        lr: learning rate, per step.
        initial_accumulator_value: the accumulator of a new row.
        eps: added to the root, so that the quotient is finite.
        l2: factor λ of the row that is added to its gradient.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", optimizer=girih.optim.RowwiseAdagrad(lr=0.05)).optimizer
        RowwiseAdagrad(lr=0.05, initial_accumulator_value=0.0, eps=1e-10, l2=0.0)
    """

    name = "rowwise_adagrad"
    lr: NonNegative = 1e-2
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10
    l2: NonNegative = 0.0


class Adam(_Optimizer):
    """Lazy Adam: moments move only for touched rows; bias correction counts all steps (``torch.optim.SparseAdam``).

    State: 2 · ``dim`` float32 per row.

    Attributes:
        lr: learning rate, per step.
        betas: the decay of the first and the second moment, each in [0, 1).
        eps: added to the root, so that the quotient is finite.
        l2: factor λ of the row that is added to its gradient.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", optimizer=girih.optim.Adam(lr=0.01, l2=1e-06)).optimizer
        Adam(lr=0.01, betas=(0.9, 0.999), eps=1e-08, l2=1e-06)
    """

    name = "adam"
    lr: NonNegative = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    l2: NonNegative = 0.0


class FTRL(_Optimizer):
    """FTRL-proximal (McMahan et al. 2013, Algorithm 1), per coordinate, with exact zeros.

    State: 2 · ``dim`` float32 per row (z, n).

    Attributes:
        lr: α of the paper, the learning rate per step.
        beta: β of the paper, which lowers the learning rate of rare coordinates.
        l1: λ₁ of the paper. A higher value gives more zeros.
        l2: λ₂ of the paper. It belongs to the closed form of the weight, not to the gradient.

    Examples:
        >>> import girih
        >>> girih.Table(name="user", optimizer=girih.optim.FTRL(lr=0.1, l1=0.01)).optimizer
        FTRL(lr=0.1, beta=1.0, l1=0.01, l2=0.0)
    """

    name = "ftrl"
    lr: Positive = 0.1
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0


SparseOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam | FTRL
BY_NAME: dict[str, type[SparseOptimizer]] = {cls.name: cls for cls in get_args(SparseOptimizer)}
