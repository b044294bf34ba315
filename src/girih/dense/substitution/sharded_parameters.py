"""Dense parameters of which each trainer has a part: how a checkpoint gets them whole, and gives each its part back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from girih.comm.group import TrainerGroup
from girih.models.operators import Split

Change = Callable[[Tensor, Split], Tensor]


class ShardedParameters(dict[str, Split]):
    """Parameter name → the part of it that is here."""

    def __init__(self, ranks: TrainerGroup) -> None:
        super().__init__()
        self._ranks = ranks

    def whole(self, state: Mapping[str, Any], module: nn.Module, optimizer: Any) -> dict[str, Any]:
        """A dense half's state with every parameter, and what the optimizer keeps of it, whole.

        All trainers call it together.
        """
        return self._changed(state, module, optimizer, self._joined, lambda shape, own: shape)

    def part(self, state: Mapping[str, Any], module: nn.Module, optimizer: Any) -> dict[str, Any]:
        """The inverse of :meth:`whole`, for this trainer."""
        return self._changed(state, module, optimizer, _taken, _wide)

    def keep(
        self, name: str, own: Split, parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Notes that only a part of a parameter is here now, and cuts what its optimizer began with to size."""
        self[name] = own
        began: dict[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        wide = _wide(list(parameter.shape), own)
        for key, value in began.items():
            if isinstance(value, Tensor) and list(value.shape) == wide:
                began[key] = _taken(value, own)

    def _changed(
        self,
        state: Mapping[str, Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        change: Change,
        shape_in_state: Callable[[list[int], Split], list[int]],
    ) -> dict[str, Any]:
        model = {
            name: change(value, self[name]) if name in self else value
            for name, value in state["model"].items()
        }
        found = dict(state["optimizer"])
        if found and optimizer is not None:
            moments = dict(found["state"])
            for index, (parameter, own) in self._by_index(module, optimizer).items():
                if index in moments:
                    shape = shape_in_state(list(parameter.shape), own)
                    moments[index] = {
                        key: change(value, own)
                        if isinstance(value, Tensor) and list(value.shape) == shape
                        else value
                        for key, value in moments[index].items()
                    }
            found["state"] = moments
        return {**state, "model": model, "optimizer": found}

    def _joined(self, part: Tensor, own: Split) -> Tensor:
        whole = part.new_zeros(_wide(list(part.shape), own))
        whole.index_copy_(own.dim, own.places.to(part.device), part)
        self._ranks.all_reduce(whole)  # of numbers beside zeros: exact
        return whole

    def _by_index(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[int, tuple[nn.Parameter, Split]]:
        """The optimizer's number of each parameter that is spread."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            index: (parameter, self[names[id(parameter)]])
            for index, parameter in enumerate(order)
            if names[id(parameter)] in self
        }


def _wide(shape: list[int], own: Split) -> list[int]:
    return [own.size if dim == own.dim else size for dim, size in enumerate(shape)]


def _taken(whole: Tensor, own: Split) -> Tensor:
    return whole.index_select(own.dim, own.places.to(whole.device))
