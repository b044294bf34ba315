"""Sparse optimizers as frozen descriptions; the arithmetic is in ``kernels``.

All of them are lazy: a row moves only in a step whose batch touched it. Gradients of equal keys
are summed before the step. ``l2 = λ`` adds λ·row to the gradient of every row that the batch
touched; rows outside the batch do not decay. Defaults are those of ``torch.optim`` where torch has
the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from girih.config import checks
from girih.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """``row -= lr · v`` with ``v = momentum · v + gradient`` (``torch.optim.SGD``).

    State: ``dim`` floats with momentum, none without.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 1e-3
    momentum: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        checks.number("sgd.lr", self.lr, 0.0)
        checks.number("sgd.momentum", self.momentum, 0.0, 1.0)
        checks.number("sgd.l2", self.l2, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """``row -= lr · g / (sqrt(Σ g²) + eps)``, element by element (``torch.optim.Adagrad``).

    State: ``dim`` floats.
    """

    name: ClassVar[str] = "adagrad"
    lr: float = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    l2: float = 0.0

    def __post_init__(self) -> None:
        checks.number("adagrad.lr", self.lr, 0.0)
        checks.number("adagrad.initial_accumulator_value", self.initial_accumulator_value, 0.0)
        checks.number("adagrad.eps", self.eps, 0.0)
        checks.number("adagrad.l2", self.l2, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one accumulator a row: the mean of g² over the row's columns.

    State: 1 float.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    lr: float = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    l2: float = 0.0

    def __post_init__(self) -> None:
        checks.number("rowwise_adagrad.lr", self.lr, 0.0)
        checks.number("rowwise_adagrad.initial_accumulator_value", self.initial_accumulator_value, 0.0)
        checks.number("rowwise_adagrad.eps", self.eps, 0.0)
        checks.number("rowwise_adagrad.l2", self.l2, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Lazy Adam: moments of a row move only when it is touched, bias correction counts the
    optimizer's steps (``torch.optim.SparseAdam``).

    State: 2 · ``dim`` floats.
    """

    name: ClassVar[str] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    l2: float = 0.0

    def __post_init__(self) -> None:
        checks.number("adam.lr", self.lr, 0.0)
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise ConfigError(f"adam.betas = {self.betas!r}: expected two numbers, as in [0.9, 0.999]")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            checks.number("adam.betas", beta, 0.0, 1.0)
        checks.number("adam.eps", self.eps, 0.0, open_low=True)
        checks.number("adam.l2", self.l2, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FTRL:
    """FTRL-proximal (McMahan et al. 2013, Algorithm 1), per coordinate, with exact zeros.

    ``lr`` is the paper's α, ``beta`` its β, ``l1`` its λ₁, ``l2`` its λ₂: here ``l2`` belongs to the
    closed form of the weight, not to the gradient. State: 2 · ``dim`` floats (z, n).
    """

    name: ClassVar[str] = "ftrl"
    lr: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        checks.number("ftrl.lr", self.lr, 0.0, open_low=True)
        checks.number("ftrl.beta", self.beta, 0.0)
        checks.number("ftrl.l1", self.l1, 0.0)
        checks.number("ftrl.l2", self.l2, 0.0)


SparseOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam | FTRL
BY_NAME: dict[str, type[SparseOptimizer]] = {
    cls.name: cls for cls in (SGD, Adagrad, RowwiseAdagrad, Adam, FTRL)
}
