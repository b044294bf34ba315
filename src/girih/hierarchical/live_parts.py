"""The parts that a group server holds: one set of live parameters, and nets that compute on it at the same time.

Nets update the parameters lock-free (Hogwild!, Recht et al. 2011; HT §3.1.1). Each net has separate Parameter objects
over the same memory. Otherwise autograd would refuse a backward pass, because a Parameter changed since the
forward pass.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from girih.dense.options import spread_over
from girih.errors import ConfigError, WireError
from girih.hierarchical.graph import CutParameter, ServerPart
from girih.hierarchical.optimizer_recipe import OptimizerOptions, OptimizerRecipe, take_options
from girih.hierarchical.wire import Entry

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def twin_of(module: AnyModule) -> AnyModule:
    """Copies a module over the same memory, with separate version counters for autograd, which ``.data`` provides."""
    held: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    held |= {id(buffer): buffer.data for buffer in module.buffers()}
    return copy.deepcopy(module, held)


class SharedSteps:
    """Steps of optimizers that share state. First steps of a parameter make its state, so they must not overlap."""

    def __init__(self) -> None:
        self._lock, self._begun = threading.Lock(), set[str]()

    @contextmanager
    def moving(self, learning: Set[str]) -> Iterator[None]:
        """Surrounds a step of these parameters (by name), which may overlap with other steps."""
        if learning <= self._begun:
            yield
            return
        with self._lock:
            yield
            self._begun |= learning

    def forget(self) -> None:
        """Forgets which parameters have optimizer state."""
        self._begun = set()


class CutParameters:
    """Cuts the state of whole parameters, and joins the state of parts.

    Optimizer state with the shape of a parameter is cut in the same way as the parameter. Each part has a copy of
    other state, for example a count of steps.
    """

    def __init__(self, splits: Iterable[CutParameter]) -> None:
        self._splits = {split.parameter: split for split in splits}
        self._whole_of = {part: split for split in self._splits.values() for part in split.parts}

    def cut(self, entries: Iterable[Entry]) -> list[Entry]:
        """Turns entries of whole parameters into the entries that servers hold."""
        parts: list[Entry] = []
        for name, key, value in entries:
            split = self._splits.get(name)
            if split is None:
                parts.append((name, key, value))
                continue
            sizes = list(split.sizes)
            values: Sequence[object] = [value] * len(sizes)
            if isinstance(value, Tensor) and value.dim() > split.dim and value.shape[split.dim] == sum(sizes):
                values = value.split(sizes, split.dim)  # type: ignore[no-untyped-call]
            parts += [(part, key, each) for part, each in zip(split.parts, values, strict=True)]
        return parts

    def joined(self, entries: Iterable[Entry]) -> Iterable[Entry]:
        """The inverse of :meth:`cut`. State that each part has separately is taken from the first part."""
        waiting: dict[tuple[str, str | None], dict[str, Any]] = {}
        for name, key, value in entries:
            split = self._whole_of.get(name)
            if split is None:
                yield name, key, value
                continue
            parts = waiting.setdefault((split.parameter, key), {})
            parts[name] = value
            if len(parts) == len(split.parts):
                values = [parts[part] for part in split.parts]
                whole = isinstance(value, Tensor) and value.dim() > split.dim
                yield split.parameter, key, torch.cat(values, split.dim) if whole else values[0]


class NetOnServer:
    """A net's copy of all parts, over the live memory.

    Attributes:
        modules: in the order of the parts' numbers.
        named: name in the whole model → parameter.
        optimizer: shares its state with all nets.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        named: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.modules, self.named, self.optimizer = modules, named, optimizer

    def nonfinite(self) -> str | None:
        """The name of a parameter with NaN or infinity in its gradient, or None."""
        gradients = [each.grad for each in self.named.values() if each.grad is not None]
        if not gradients or torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            return None
        names = (n for n, p in self.named.items() if p.grad is not None and not torch.isfinite(p.grad).all())
        return next(names, None)

    def norms(self) -> dict[str, float]:
        """Maps the names in the whole model of parameters with a gradient to its norm, float32."""
        return {
            name: torch.linalg.vector_norm(parameter.grad).item()
            for name, parameter in self.named.items()
            if parameter.grad is not None
        }

    def forget(self) -> None:
        """Drops the gradients."""
        for parameter in self.named.values():
            parameter.grad = None


class LiveParts:
    """Live parameters, buffers and optimizer state. Thread-safe.

    Args:
        recipe: the recipe of the optimizer, or None if no parameter is trained.
        averaged: whether evaluations and checkpoints use the values of the last :meth:`publish` instead of the live
            parameters.
    """

    def __init__(
        self, parts: Sequence[ServerPart], recipe: OptimizerRecipe | None, *, averaged: bool = False
    ) -> None:
        self.modules = nn.ModuleList(part.module for part in parts)
        self._known_by = {} if recipe is None else recipe.known_by
        self.named = _whole_names(self.modules, self._known_by)
        self._optimizer = None if recipe is None else recipe.made(self.named)
        self._recipe = recipe
        self._free: list[NetOnServer] = []
        self._steps = SharedSteps()
        self.evaluated = copy.deepcopy(self.modules) if averaged else twin_of(self.modules)
        """The parts in evaluation mode. Any number of threads may compute without gradients."""
        self.evaluated.eval()

    def borrow(self) -> NetOnServer:
        """Returns a net that no other thread has."""
        try:
            return self._free.pop()
        except IndexError:
            return self._net()

    def give_back(self, net: NetOnServer) -> None:
        """Takes a net back and drops its gradients."""
        net.forget()
        self._free.append(net)

    def moving(self) -> list[Tensor]:
        """The live trainable parameters, float32."""
        return [parameter.data for parameter in self.named.values() if parameter.requires_grad]

    def publish(self, flat: Tensor, moments: Tensor) -> None:
        """Sets the values to evaluate and save. Integer buffers are the live ones.

        Args:
            flat: parameters, float32[P], in the order of :meth:`moving`.
            moments: buffers, float32[Q], in the order of :meth:`moments`.
        """
        published = [
            each for each in _whole_names(self.evaluated, self._known_by).values() if each.requires_grad
        ]
        for parameter, part in spread_over(published, flat):
            parameter.data.copy_(part)
        for buffer, live in zip(self.evaluated.buffers(), self.modules.buffers(), strict=True):
            buffer.copy_(live)
        for buffer, part in spread_over(_floating(self.evaluated), moments):
            buffer.copy_(part)

    def move(self, net: NetOnServer, options: Sequence[OptimizerOptions], scale: float = 1.0) -> None:
        """Updates the live parameters with the gradients of a net. Other nets may do so at the same time.

        Args:
            options: the current options of each group of the optimizer.
            scale: the factor for the gradients.
        """
        if net.optimizer is None:
            return
        take_options(net.optimizer, options)
        if scale != 1.0:
            for parameter in net.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        moved = {name for name, parameter in net.named.items() if parameter.grad is not None}
        with self._steps.moving(moved):
            net.optimizer.step()

    def moments(self) -> list[Tensor]:
        """The live buffers that are averaged: the floating-point ones."""
        return _floating(self.modules)

    def buffers(self) -> list[Tensor]:
        """The live buffers."""
        return list(self.modules.buffers())

    def entries(self, *, with_optimizer: bool) -> list[Entry]:
        """Parameters and buffers to evaluate and save, and live optimizer state. They are not copies."""
        evaluated = _tensors(self.evaluated, self._known_by)
        entries: list[Entry] = [(name, None, value.data) for name, value in evaluated.items()]
        if with_optimizer and self._optimizer is not None:
            for name, parameter in self.named.items():
                entries += [(name, key, value) for key, value in self._state_of(parameter).items()]
        return entries

    def check(self, entries: Sequence[Entry]) -> None:
        """Refuses entries that :meth:`put` could only apply in part.

        Raises:
            WireError: an entry names an unknown parameter or buffer, or has a different shape.
        """
        known = _tensors(self.modules, self._known_by)
        for name, key, value in entries:
            if name not in known or (key is not None and name not in self.named):
                raise WireError(f"an entry of {name!r}; expected a parameter or buffer of this server")
            if key is None and not (isinstance(value, Tensor) and value.shape == known[name].shape):
                came = list(value.shape) if isinstance(value, Tensor) else value
                raise WireError(f"{name!r}: {came!r:.100}; expected a tensor of {list(known[name].shape)}")

    def put(self, entries: Iterable[Entry]) -> None:
        """Sets the values that :meth:`entries` returned. Optimizer state without an entry stays."""
        copies = [_tensors(modules, self._known_by) for modules in (self.modules, self.evaluated)]
        value: Any
        for name, key, value in entries:
            if key is None:
                for each in copies:
                    each[name].data.copy_(value)  # copy_ refuses a different shape
            elif self._optimizer is not None:
                self._state_of(self.named[name])[key] = value.clone() if isinstance(value, Tensor) else value

    def forget_optimizer_state(self) -> None:
        """Clears the optimizer state, before a checkpoint's state is set."""
        if self._optimizer is not None:
            for parameter in self.named.values():
                self._state_of(parameter).clear()
        self._steps.forget()

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._optimizer is None else self._optimizer.state[parameter]
        return state

    def _net(self) -> NetOnServer:
        modules = twin_of(self.modules)
        named = _whole_names(modules, self._known_by)
        optimizer = None if self._recipe is None else self._recipe.made(named)
        if optimizer is not None:
            for name, parameter in named.items():
                optimizer.state[parameter] = self._state_of(self.named[name])
        return NetOnServer(modules, named, optimizer)


def _tensors(modules: nn.ModuleList, known_by: Mapping[str, str]) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the whole model."""
    buffers = (module.named_buffers() for module in modules)
    return {**_whole_names(modules, known_by), **{name: buffer for each in buffers for name, buffer in each}}


def _floating(modules: nn.ModuleList) -> list[Tensor]:
    return [buffer for buffer in modules.buffers() if buffer.is_floating_point()]


def _whole_names(modules: nn.ModuleList, known_by: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """Maps each name in the whole model to its parameter, once, even if parts use several names for it.

    Raises:
        ConfigError: two parts hold different parameters of the same name.
    """
    parameters: dict[str, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameters.setdefault(known_by.get(name, name), parameter) is not parameter:
                raise ConfigError(
                    f"part {number} has a separate copy of parameter {name!r}; expected one copy for all parts"
                )
    return parameters
