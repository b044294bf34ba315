"""LAMB: Adam whose step is, for each parameter, as long as the parameter itself times the learning rate.

You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (ICLR 2020), Algorithm 2. torch
has none.

Shapes: n parameters of a group that have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class Lamb(torch.optim.Optimizer):
    """LAMB with φ(z) = z: x ← x − lr · ‖x‖ / ‖u‖ · u, where u = m̂ / (√v̂ + eps) + weight_decay · x.

    m̂ and v̂ are Adam's moments, bias-corrected. The norms are of one parameter at a time; where one of them is 0, as that
    of a bias which begins at 0, their ratio is 1.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW has them.

    Attributes:
        whole_squares: turns squared norms of parts of parameters, float64[n, 2], into those of the whole parameters, where
            trainers have parts; None where all are whole.

    Raises:
        ValueError: an option out of range.
    """

    whole_squares: Callable[[Sequence[Tensor], Tensor], Tensor] | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} = {value}: expected a number ≥ 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas = {betas}: expected two numbers ≥ 0 and < 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient; returns what ``closure`` returned, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            updates = [self._update(parameter, group) for parameter in moved]
            squares = torch.stack([_squares(*pair) for pair in zip(moved, updates, strict=True)])
            if self.whole_squares is not None:
                squares = self.whole_squares(moved, squares)
            of_parameter, of_update = squares.sqrt().unbind(1)
            ratios = torch.where(squares.all(1), of_parameter / of_update, 1.0)
            for parameter, update, ratio in zip(moved, updates, ratios.tolist(), strict=True):
                parameter.add_(update, alpha=-group["lr"] * ratio)
        return loss

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """u, after the moments took the gradient in."""
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update: Tensor = mean.div_((square / (1 - beta2**step)).sqrt_().add_(group["eps"]))
        return update.add_(parameter, alpha=group["weight_decay"])


def _squares(parameter: Tensor, update: Tensor) -> Tensor:
    """Squared norms of both, float64[2]."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (parameter, update)]
    return torch.stack(norms).square()
