"""Optimizers of dense parameters and learning rate schedules, by torch's names. Also defines LAMB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import ParamsT

from girih import config
from girih.errors import ConfigError, WireError, nearest


class Lamb(torch.optim.Optimizer):
    """LAMB with φ(z) = z: x ← x − lr · ‖x‖ / ‖u‖ · u, where u = m̂ / (√v̂ + eps) + weight_decay · x.

    m̂ and v̂ are Adam's bias-corrected moments. Each norm is over one parameter. If a norm is 0, the ratio of the norms
    is 1. Example: the norm of a bias that starts at 0 is 0.

    Args:
        params, lr, betas, eps, weight_decay: the same as in torch.optim.AdamW.

    Attributes:
        whole_squares: a function for trainers that own parts of parameters, or None if all parameters are whole. It
            converts squared norms of the parts, float64[n, 2], to squared norms of the whole parameters.

    Raises:
        ValueError: an option is out of range.
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
        """Takes one step of all parameters that have a gradient. Returns the result of ``closure``, if given."""
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
        """Adds the gradient to the moments and returns u."""
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
    """Returns the squared norms of the parameter and the update, float64[2]."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (parameter, update)]
    return torch.stack(norms).square()


OptimizerFactory = Callable[[Iterable[Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lamb": Lamb,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}

FUSED = ("sgd", "adagrad", "adam", "adamw")  # for these, torch has one fused kernel for the whole step
GRAPH_ONLY = ("capturable", "differentiable")


def optimizer_factory(
    options: Mapping[str, object] | str, where: str = "[dense_optimizer]"
) -> OptimizerFactory:
    """Returns a function that creates an optimizer of parameters, for options like ``{"name": "adam", "lr": 1e-3}``.

    Options are the arguments of the class in ``torch.optim``, or of :class:`Lamb`.

    Raises:
        ConfigError: the name or an option is unknown, or the optimizer refuses a value.
    """
    if isinstance(options, str):
        options = {"name": options}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} = {options!r}: expected a table of options, as in {{ name = 'adam' }}")
    arguments = dict(options)
    name = arguments.pop("name", "adam")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(f"{where}: unknown name {name!r}{nearest(str(name), OPTIMIZERS)}")
    cls = OPTIMIZERS[name]
    checked = config.check_call(cls, arguments, where)
    for key, value in checked.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}.{key} = {value}: expected a finite number")
        if key in GRAPH_ONLY and value:
            raise ConfigError(f"{where}.{key}: serves steps that torch records or differentiates; drop it")
    if "betas" in checked:
        checked["betas"] = tuple(checked["betas"])
    try:
        cls([Parameter(torch.zeros(1))], **checked)  # the optimizer checks values only when it is created
    except (TypeError, ValueError, RuntimeError) as error:
        title = "Lamb" if cls is Lamb else f"torch.optim.{cls.__name__}"
        raise ConfigError(f"{where}: {title} refuses these options: {error}") from None
    if name in FUSED and not {"foreach", "fused", "differentiable"} & checked.keys():
        return partial(_fused, cls, checked)
    return partial(cls, **checked)


def _fused(
    cls: Callable[..., torch.optim.Optimizer], options: Mapping[str, object], parameters: Iterable[Parameter]
) -> torch.optim.Optimizer:
    """Creates an optimizer with torch's fused kernel if possible.

    By default, torch loops over the parameters on CPUs, and launches one operator after the other on any device.
    """
    parameters = list(parameters)
    # torch 2.11 has a fused Adagrad for GPUs, and refuses to use it. Older versions have none.
    on_gpu = cls is not torch.optim.Adagrad or torch.__version__ >= "2.13"
    devices = ("cpu", "cuda") if on_gpu else ("cpu",)
    if all(p.device.type in devices and p.dtype == torch.float32 for p in parameters):
        return cls(parameters, **options, fused=True)
    return cls(parameters, **options)


def schedule_class(name: str, where: str) -> type[torch.optim.lr_scheduler.LRScheduler]:
    """Returns the class of ``torch.optim.lr_scheduler`` with this name.

    Raises:
        ConfigError: torch has no such scheduler.
    """
    module = torch.optim.lr_scheduler
    known = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, module.LRScheduler)
        and not key.startswith("_")
        and key not in ("LRScheduler", "SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
    }
    if name not in known:
        raise ConfigError(f"{where}: unknown name {name!r}{nearest(name, known)}")
    return known[name]


def spread_over(tensors: Iterable[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each tensor with its part of ``flat``, which has the numbers of all tensors in order.

    Raises:
        WireError: ``flat`` has too many or too few numbers. It is raised before the first tensor.
    """
    tensors, begin = list(tensors), 0
    if (expected := sum(tensor.numel() for tensor in tensors)) != flat.numel():
        raise WireError(
            f"{flat.numel():,} numbers came; expected {expected:,}, one for each number of the parameters"
        )
    for tensor in tensors:
        yield tensor, flat[begin : begin + tensor.numel()].view_as(tensor)
        begin += tensor.numel()
