"""The parts that a group server holds: one set of live parameters, and as many nets on it as compute at once.

Nets move the parameters lock-free (Hogwild!, Recht et al. 2011; HT §3.1.1). Each has Parameters of its own over the
same memory: autograd refuses a backward pass through a Parameter that moved since the forward pass, and here it has.
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
    """A copy that reads and moves the same numbers, and that autograd watches apart: ``.data`` begins a count of versions of its own."""
    held: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    held |= {id(buffer): buffer.data for buffer in module.buffers()}
    return copy.deepcopy(module, held)


class SharedSteps:
    """Steps of optimizers that share state: the first step of a parameter makes its state, which two must not do at once."""

    def __init__(self) -> None:
        self._lock, self._begun = threading.Lock(), set[str]()

    @contextmanager
    def moving(self, learning: Set[str]) -> Iterator[None]:
        """A step of these parameters, by name, beside other steps."""
        if learning <= self._begun:
            yield
            return
        with self._lock:
            yield
            self._begun |= learning

    def forget(self) -> None:
        """The state of all parameters is gone."""
        self._begun = set()


class CutParameters:
    """Cuts what belongs to whole parameters, and joins what belongs to parts.

    Optimizer state of a parameter's shape is cut as the parameter is; other state, as a count of steps, is each part's.
    """

    def __init__(self, splits: Iterable[CutParameter]) -> None:
        self._splits = {split.parameter: split for split in splits}
        self._whole_of = {part: split for split in self._splits.values() for part in split.parts}

    def cut(self, entries: Iterable[Entry]) -> list[Entry]:
        """Entries of whole parameters as those that servers hold."""
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
        """The inverse of :meth:`cut`; what parts have each for itself is the first one's."""
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
        modules: as the parts are numbered.
        named: name in the whole model → parameter.
        optimizer: its state is that of all nets.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        named: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.modules, self.named, self.optimizer = modules, named, optimizer

    def nonfinite(self) -> str | None:
        """The name of a parameter whose gradient holds a NaN or an infinity, if there is one."""
        gradients = [each.grad for each in self.named.values() if each.grad is not None]
        if not gradients or torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            return None
        names = (n for n, p in self.named.items() if p.grad is not None and not torch.isfinite(p.grad).all())
        return next(names, None)

    def norms(self) -> dict[str, float]:
        """Name in the whole model → the norm of the gradient, float32, of each parameter that has one."""
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
    """Live parameters, buffers and optimizer state; methods may be called from any thread.

    Args:
        recipe: of the optimizer; None where nothing moves.
        averaged: whether what is evaluated and saved is what :meth:`publish` was given last, and not the live parameters.
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
        """The parts in evaluation mode, for any number of threads that want no gradients."""
        self.evaluated.eval()

    def borrow(self) -> NetOnServer:
        """A net that nobody else has."""
        try:
            return self._free.pop()
        except IndexError:
            return self._net()

    def give_back(self, net: NetOnServer) -> None:
        """Takes a net back; its gradients are dropped."""
        net.forget()
        self._free.append(net)

    def moving(self) -> list[Tensor]:
        """The live parameters that learn, float32."""
        return [parameter.data for parameter in self.named.values() if parameter.requires_grad]

    def publish(self, flat: Tensor, moments: Tensor) -> None:
        """Takes what is evaluated and saved; buffers of whole numbers are the live ones.

        Args:
            flat: parameters, float32[P] as :meth:`moving` has them. moments: buffers, float32[Q] as :meth:`moments` has them.
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
        """Moves the live parameters by the gradients of a net, beside others that do the same.

        Args:
            options: of each group of the optimizer, now.
            scale: what gradients are multiplied by before.
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
        """The live buffers that are averaged: those of floating-point numbers."""
        return _floating(self.modules)

    def buffers(self) -> list[Tensor]:
        """The live buffers."""
        return list(self.modules.buffers())

    def entries(self, *, with_optimizer: bool) -> list[Entry]:
        """Parameters and buffers as they are evaluated, and live optimizer state; not copies."""
        evaluated = _tensors(self.evaluated, self._known_by)
        entries: list[Entry] = [(name, None, value.data) for name, value in evaluated.items()]
        if with_optimizer and self._optimizer is not None:
            for name, parameter in self.named.items():
                entries += [(name, key, value) for key, value in self._state_of(parameter).items()]
        return entries

    def check(self, entries: Sequence[Entry]) -> None:
        """Refuses what :meth:`put` could put only in part.

        Raises:
            WireError: an entry of no parameter or buffer that is here, or of another shape than that.
        """
        known = _tensors(self.modules, self._known_by)
        for name, key, value in entries:
            if name not in known or (key is not None and name not in self.named):
                raise WireError(f"an entry of {name!r}; expected of a parameter or buffer here")
            if key is None and not (isinstance(value, Tensor) and value.shape == known[name].shape):
                came = list(value.shape) if isinstance(value, Tensor) else value
                raise WireError(f"{name!r}: {came!r:.100}; expected a tensor of {list(known[name].shape)}")

    def put(self, entries: Iterable[Entry]) -> None:
        """Sets what :meth:`entries` gave; optimizer state that is not among what is put stays."""
        copies = [_tensors(modules, self._known_by) for modules in (self.modules, self.evaluated)]
        value: Any
        for name, key, value in entries:
            if key is None:
                for each in copies:
                    each[name].data.copy_(value)  # which refuses another shape
            elif self._optimizer is not None:
                self._state_of(self.named[name])[key] = value.clone() if isinstance(value, Tensor) else value

    def forget_optimizer_state(self) -> None:
        """Empties it, before that of a checkpoint is put."""
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
    """Name in the whole model → parameter; once each, though parts may have it by several names.

    Raises:
        ConfigError: two parts hold a parameter of one name, each its own.
    """
    parameters: dict[str, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameters.setdefault(known_by.get(name, name), parameter) is not parameter:
                raise ConfigError(
                    f"part {number} has a copy of parameter {name!r} of its own; expected one, in all parts"
                )
    return parameters
