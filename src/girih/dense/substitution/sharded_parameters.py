"""Dense parameters of which each trainer has a part: how a checkpoint gets them whole, and gives each its part back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.models.operators import ParameterSplit

Change = Callable[[ParameterSplit, Tensor], Tensor]


class ShardedParameters(dict[nn.Parameter, ParameterSplit]):
    """Parameter of a module → the part of it that is here.

    Args:
        optimizer: of the module's parameters; what it keeps of each is as large as the parameter, or one number.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: TrainerGroup
    ) -> None:
        super().__init__()
        self._module, self._optimizer, self._ranks = module, optimizer, ranks

    def keep(self, parameter: nn.Parameter, own: ParameterSplit) -> None:
        """Notes that only a part of a parameter is here now, and cuts what its optimizer began with to size."""
        self[parameter] = own
        if self._optimizer is not None and parameter in self._optimizer.state:
            self._optimizer.state[parameter] = _changed(
                self._optimizer.state[parameter], own, ParameterSplit.part_of
            )

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A dense half's state with every parameter, and what the optimizer keeps of it, whole.

        All trainers call it together.
        """
        return self._with(state, self._joined)

    def part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of :meth:`whole`, for this trainer."""
        return self._with(state, ParameterSplit.part_of)

    def _with(self, state: Mapping[str, Any], change: Change) -> dict[str, Any]:
        splits = {name: self[p] for name, p in self._module.named_parameters() if p in self}
        model = {n: change(splits[n], value) if n in splits else value for n, value in state["model"].items()}
        optimizer = dict(state["optimizer"])
        if optimizer and self._optimizer is not None:
            order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            moments = dict(optimizer["state"])
            for number, parameter in enumerate(order):
                if parameter in self and number in moments:
                    moments[number] = _changed(moments[number], self[parameter], change)
            optimizer["state"] = moments
        return {**state, "model": model, "optimizer": optimizer}

    def _joined(self, own: ParameterSplit, part: Tensor) -> Tensor:
        shape = [own.size if dim == own.dim else size for dim, size in enumerate(part.shape)]
        whole = part.new_zeros(shape).index_copy_(own.dim, own.places.to(part.device), part)
        self._ranks.all_reduce(whole)  # of numbers beside zeros: exact
        return whole


def _changed(moments: Mapping[str, Any], own: ParameterSplit, change: Change) -> dict[str, Any]:
    """State that an optimizer keeps for a parameter, all but single numbers changed as the parameter is."""
    return {
        key: change(own, value) if isinstance(value, Tensor) and value.dim() else value
        for key, value in moments.items()
    }
