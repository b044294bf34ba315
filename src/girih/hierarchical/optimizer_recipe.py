"""A recipe from which another process can make a dense optimizer: its class, and the options of each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from girih.dense.options import Lamb
from girih.errors import ConfigError
from girih.planner.operators import ELEMENTWISE

_ASK_FOR_MORE = (torch.optim.LBFGS, torch.optim.SparseAdam)  # they need a closure, or sparse gradients
OptimizerOptions = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OptimizerRecipe:
    """The class and options of an optimizer. It replaces the user's function, which cannot be sent.

    Attributes:
        kind: the class.
        groups: the options of each of its groups of parameters.
        group_of: name of a parameter → its group's number; the optimizer does not update other parameters.
        known_by: other names of parameters that the model has at several places → their names in ``group_of`` and in
            checkpoints.
    """

    kind: type[torch.optim.Optimizer]
    groups: tuple[OptimizerOptions, ...]
    group_of: Mapping[str, int]
    known_by: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer | None,
        module: nn.Module,
        parts_of: Mapping[str, Sequence[str]] | None = None,
    ) -> OptimizerRecipe | None:
        """Makes the recipe of an optimizer of a module's parameters. Returns None if there is no optimizer.

        Args:
            parts_of: name of a split parameter → names of its parts.

        Raises:
            ConfigError: the class belongs neither to ``torch.optim`` nor to girih; or the optimizer updates other
                parameters; or it would update a part differently from the whole parameter.
        """
        if optimizer is None:
            return None
        kind = type(optimizer)
        if (kind is not Lamb and not kind.__module__.startswith("torch.optim.")) or kind in _ASK_FOR_MORE:
            raise ConfigError(
                f"dense_optimizer made a {kind.__module__}.{kind.__qualname__}; group servers make their optimizers from its class and"
                " options, so expected one of torch.optim (except LBFGS and SparseAdam), or girih's LAMB; or set"
                " servers_per_group = 0"
            )
        parts_of = parts_of or {}
        if parts_of and kind.__name__ not in ELEMENTWISE:
            raise ConfigError(
                f"the dense optimizer {kind.__name__} may need parameters whole, but strategy.split_fc cuts some; set"
                f" split_fc = false, or use one of {', '.join(ELEMENTWISE)}"
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        group_of: dict[str, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise ConfigError(
                        "dense_optimizer was made with a parameter that is not in the model; expected the parameters that it is"
                        " called with"
                    )
                name = names[parameter]
                group_of |= dict.fromkeys(parts_of.get(name, (name,)), number)
        return cls(kind, options_of(optimizer), group_of, other_names(module))

    def made(self, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """Makes an optimizer of some parameters, by their names in the whole model. Returns None if it updates none.

        It has all groups, even empty ones, so that their numbers stay the same.
        """
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self.groups]
        for name, parameter in named.items():
            if name in self.group_of:
                groups[self.group_of[name]]["params"].append(parameter)
        if not any(group["params"] for group in groups):
            return None
        kind: Callable[..., torch.optim.Optimizer] = self.kind
        return kind(groups, **self.groups[0])


def other_names(module: nn.Module) -> dict[str, str]:
    """Returns the other names of each parameter that a module has at several places → its first name."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            names[name] = first[id(parameter)]
    return names


def options_of(optimizer: torch.optim.Optimizer | None) -> tuple[OptimizerOptions, ...]:
    """The current options of each group of an optimizer, as plain values. A learning rate schedule changes them."""
    if optimizer is None:
        return ()
    known = inspect.signature(type(optimizer)).parameters
    return tuple(
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key in known and key != "params"
        }
        for group in optimizer.param_groups
    )


def take_options(optimizer: torch.optim.Optimizer, options: Sequence[OptimizerOptions]) -> None:
    """Sets the options of each group. Turns lists, which come from JSON, into tuples."""
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in now.items()})
