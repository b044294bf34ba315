"""Learning of dense parameters: ``[dense_optimizer]`` and learning rate schedules, by torch's own names, and LAMB."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from girih import config
from girih.dense.lamb import Lamb
from girih.errors import ConfigError, nearest

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

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
FUSED = ("sgd", "adagrad", "adam", "adamw")  # torch has one kernel for the whole step
GRAPH_ONLY = ("capturable", "differentiable")


def optimizer_factory(options: Mapping[str, Any] | str, where: str = "[dense_optimizer]") -> OptimizerFactory:
    """``{"name": "adam", "lr": 1e-3}`` to a function of parameters.

    Options are those of ``torch.optim``, or of :class:`Lamb`.

    Raises:
        ConfigError: an unknown name or option, or a value that the optimizer refuses.
    """
    if isinstance(options, str):
        options = {"name": options}
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where} = {options!r}: expected a table of options, as in {{ name = 'adam' }}")
    rest = dict(options)
    name = rest.pop("name", "adam")
    if name not in OPTIMIZERS:
        raise ConfigError(f"{where}: unknown name {name!r}{nearest(str(name), OPTIMIZERS)}")
    cls = OPTIMIZERS[name]
    checked = config.check_call(cls, rest, where)
    for key, value in checked.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}.{key} = {value}: expected a finite number")
        if key in GRAPH_ONLY and value:
            raise ConfigError(f"{where}.{key}: serves steps that torch records or differentiates; drop it")
    if "betas" in checked:
        checked["betas"] = tuple(checked["betas"])
    try:
        cls([Parameter(torch.zeros(1))], **checked)  # values are checked only when it is called
    except (TypeError, ValueError, RuntimeError) as error:
        title = "Lamb" if cls is Lamb else f"torch.optim.{cls.__name__}"
        raise ConfigError(f"{where}: {title} refuses these options: {error}") from None
    if name in FUSED and not {"foreach", "fused", "differentiable"} & checked.keys():
        return partial(_fused, cls, checked)
    return partial(cls, **checked)


def _fused(
    cls: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any], parameters: Iterable[Parameter]
) -> torch.optim.Optimizer:
    """Left to itself, torch steps through the parameters on CPUs one by one, and everywhere operator by operator."""
    parameters = list(parameters)
    # an older torch has none of Adagrad for GPUs
    on_gpu = cls is not torch.optim.Adagrad or _has_kernel("aten::_fused_adagrad_", "CUDA")
    devices = ("cpu", "cuda") if on_gpu else ("cpu",)
    if all(p.device.type in devices and p.dtype == torch.float32 for p in parameters):
        return cls(parameters, **options, fused=True)
    return cls(parameters, **options)


def schedule_class(name: str, where: str) -> type[torch.optim.lr_scheduler.LRScheduler]:
    """A class of ``torch.optim.lr_scheduler`` by its name.

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
