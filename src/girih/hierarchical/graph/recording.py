"""Records one forward pass: each torch function and each module that is one operator, with the origins of its inputs.

The pass runs on real tensors, so plain Python code between the calls works. This code must not look into the tensors'
data, because the next batch has different data. A module whose code does so is opaque: it becomes one operator, and
its inside is not recorded.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import _get_qualified_name
from torch.overrides import TorchFunctionMode

from girih.hierarchical.graph.batches import read, tensors_of
from girih.hierarchical.graph.runnable import CONSTANTS, leaves, mapped, resolved
from girih.models.embeddings import Embeddings


class Opaque(BaseException):
    """A module cannot be recorded. A BaseException, so that models do not catch it.

    Attributes:
        scope: the path of the module.
        reason: the reason, in words.
    """

    def __init__(self, scope: str, reason: str) -> None:
        super().__init__(f"{scope!r}: {reason}")
        self.scope, self.reason = scope, reason


@dataclass(eq=False)
class Recording:
    """A recorded forward pass.

    Attributes:
        graph: its inputs, and a node for each operator. ``meta["scope"]`` is the path of the module whose code called
            the operator. A node of a tensor has ``meta["shape"]``.
        inputs: parameters, buffers, and the inputs of the model.
        constants: other tensors of the model, by their names.
        logits: the node of the returned value.
        left: tensors that the pass left on modules: (path, attribute) → node.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[fx.Node] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    logits: fx.Node | None = None
    left: dict[tuple[str, str], fx.Node] = field(default_factory=dict)

    def nodes(self, *, left: bool = True) -> dict[fx.Node, str]:
        """Returns the nodes that matter for the result, each with the scope that reads it first.

        Calls are in their order. Inputs are in the order in which they are read.

        Args:
            left: whether the tensors left on modules belong to the result.
        """
        ends = [node for node in (self.logits, *(self.left.values() if left else ())) if node is not None]
        needed = set(ends)
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        scopes: dict[fx.Node, str] = {}

        def read(node: fx.Node, scope: str) -> None:
            if node not in scopes:
                for each in node.all_input_nodes:
                    read(each, scope)
                scopes[node] = scope

        for node in self.graph.nodes:
            if node in needed and "scope" in node.meta:
                read(node, node.meta["scope"])
        for node in ends:
            read(node, "")
        return scopes


Target = str | Callable[..., object]
CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
PLAIN = (int, float, bool, str, complex, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)  # fmt: skip
SHAPES = frozenset({"shape", "size", "numel", "nelement", "__len__", "stride"})
FACTS = SHAPES | {
    "dim", "ndim", "dtype", "device", "layout", "itemsize", "element_size", "get_device", "__hash__",
    "requires_grad", "is_leaf", "is_tensor", "is_contiguous", "is_floating_point", "is_complex", "is_signed",
    "is_cuda", "is_cpu", "is_sparse", "is_nested", "is_quantized", "is_inference",
}  # fmt: skip
"""Facts of a tensor that are known without its data."""
SHAPED_BY_DATA = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"}
)


def record(module: nn.Module, numeric: Tensor, embeddings: Embeddings, opaque: Collection[str]) -> Recording:
    """Records one forward pass of a module in its present mode.

    Args:
        opaque: paths of modules that become one operator each, in addition to those of torch.nn.

    Raises:
        Opaque: another module must become one operator.
    """
    recorder = _Recorder(module, numeric, embeddings, opaque)
    hooks = []
    for path, each in module.named_modules():
        if path:
            hooks.append(each.register_forward_pre_hook(partial(recorder.enter, path), with_kwargs=True))
            hooks.append(each.register_forward_hook(partial(recorder.leave, path), with_kwargs=True))
    try:
        with recorder:
            output = module(numeric, embeddings)
    except Exception as error:
        raise Opaque("", f"{type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.finished(output)


class _Recorder(TorchFunctionMode):
    def __init__(
        self, module: nn.Module, numeric: Tensor, embeddings: Embeddings, opaque: Collection[str]
    ) -> None:
        super().__init__()
        self._module, self._opaque = module, opaque
        self._recording = Recording()
        self._graph = self._recording.graph
        first, whole = self._graph.placeholder("numeric"), self._graph.placeholder("embeddings")
        self._known: dict[int, tuple[fx.Node, object]] = {id(embeddings): (whole, embeddings)}
        self._shaped_by_data: set[int] = set()
        self._scopes, self._inside, self._silent = [""], "", False
        self._versions: list[tuple[Tensor, int]] = []
        self._state = _state()
        self._before = {path: dict(vars(each)) for path, each in module.named_modules()}
        named = (*module.named_parameters(), *module.named_buffers())
        inputs = [(self._graph.get_attr(name), tensor) for name, tensor in named]
        for place, tensor in tensors_of(embeddings):
            inputs.append((self._graph.call_function(read, (whole, *place)), tensor))
        for node, tensor in (*inputs, (first, numeric)):
            if id(tensor) not in self._known:
                self._recording.inputs.append(node)
                self._hand_on(node, tensor)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        if self._silent or self._inside:
            return func(*args, **kwargs)
        scope = self._scopes[-1]
        if _state() != self._state:
            raise Opaque(scope, "it changes whether gradients or autocast are on")
        kind, target, extra = _target(func, scope)
        tensors = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        versions = [(tensor, tensor._version) for tensor in tensors]
        result: Any = func(*args, **kwargs)
        walked = target == "unbind" and func is torch.Tensor.__iter__
        if walked:
            result = tuple(result)
        if not any(isinstance(each, Tensor) for each in leaves(result)):
            self._check_fact(scope, target if not extra else extra[0], tensors)
            return result
        if any(tensor._version != version for tensor, version in versions):
            raise Opaque(scope, f"{target} works in place")
        self._write(kind, target, ((*args, *extra), kwargs), result)
        self._mark(target, tensors, kwargs, result)
        return iter(result) if walked else result

    def enter(self, path: str, module: nn.Module, args: object, kwargs: object) -> None:
        """Called when a module begins."""
        if self._inside:
            return
        if path in self._opaque or (
            type(module).__module__.startswith("torch.nn") and type(module) not in CONTAINERS
        ):
            self._inside = path
            self._versions = [(t, t._version) for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        else:
            self._scopes.append(path)

    def leave(self, path: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        """Called when a module ends."""
        if self._inside and self._inside != path:
            return
        if not self._inside:
            self._scopes.pop()
            return
        changed = [tensor for tensor, version in self._versions if tensor._version != version]
        if any(tensor is not output for tensor in changed):
            raise Opaque(self._scopes[-1], f"{path} works in place")
        if any(not isinstance(each, Tensor | None) for each in leaves(output)):
            raise Opaque(self._scopes[-1], f"{path} returns more than tensors")
        self._inside = ""
        self._silent = True
        self._write("module", path, (args, kwargs), output)
        self._silent = False

    def finished(self, output: object) -> Recording:
        """Returns the recording of a pass that returned ``output``."""
        if not isinstance(output, Tensor) or id(output) not in self._known:
            raise Opaque("", f"it returns {type(output).__name__}; expected a tensor that it computed")
        self._recording.logits = self._known[id(output)][0]
        for path, each in self._module.named_modules():
            for name, value in vars(each).items():
                if (
                    isinstance(value, Tensor)
                    and value is not self._before[path].get(name)
                    and id(value) in self._known
                ):
                    self._recording.left[path, name] = self._known[id(value)][0]
        return self._recording

    def _write(self, kind: str, target: Target, arguments: tuple[object, object], result: object) -> None:
        args, kwargs = mapped(arguments, self._argument)
        node = self._graph.create_node(f"call_{kind}", target, args, kwargs)
        node.meta["scope"] = self._scopes[-1]
        self._hand_on(node, result)

    def _hand_on(self, node: fx.Node, value: object) -> None:
        """Assigns a node to a value, and nodes that read from it to the items of the value."""
        if isinstance(value, Tensor):
            self._known[id(value)] = node, value
            node.meta["shape"] = value.shape
        items = enumerate(value) if isinstance(value, (tuple, list)) else ()
        for key, each in value.items() if isinstance(value, dict) else items:
            self._hand_on(self._graph.call_function(operator.getitem, (node, key)), each)

    def _argument(self, value: object) -> Any:
        if id(value) in self._known and self._known[id(value)][1] is value:
            return self._known[id(value)][0]
        if isinstance(value, Tensor):
            name = f"{CONSTANTS}.number_{len(self._recording.constants)}"
            self._recording.constants[name] = value
            self._known[id(value)] = self._graph.get_attr(name), value
            return self._known[id(value)][0]
        if isinstance(value, PLAIN):
            return value
        raise Opaque(self._scopes[-1], f"a {type(value).__name__} cannot be an input of an operator")

    def _check_fact(self, scope: str, name: object, tensors: list[Tensor]) -> None:
        """Refuses facts about tensors that depend on data."""
        if not tensors:
            return
        if name not in FACTS:
            raise Opaque(scope, f"it looks into data: {name}")
        if name in SHAPES and any(id(tensor) in self._shaped_by_data for tensor in tensors):
            raise Opaque(scope, f"it looks into data: {name} of a tensor whose shape depends on data")

    def _mark(
        self, target: object, tensors: list[Tensor], kwargs: Mapping[str, object], result: object
    ) -> None:
        """Remembers tensors whose shape depends on data."""
        name = getattr(target, "__name__", target)
        by_mask = name == "__getitem__" and any(each.dtype == torch.bool for each in tensors[1:])
        repeated = name == "repeat_interleave" and "output_size" not in kwargs
        if (
            name in SHAPED_BY_DATA
            or by_mask
            or repeated
            or any(id(each) in self._shaped_by_data for each in tensors)
        ):
            self._shaped_by_data |= {id(each) for each in leaves(result)}


def _state() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


def _target(func: Callable[..., object], scope: str) -> tuple[str, Target, tuple[str, ...]]:
    """Kind and target of a call, and extra arguments at the end."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        getter: Any = func
        return "function", getattr, (getter.__self__.__name__,)
    if func is torch.Tensor.__iter__:
        return "method", "unbind", ()
    if getattr(torch.Tensor, name, None) is func:
        return "method", name, ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qualified = _get_qualified_name(func) if callable(func) else ""
        if resolved(qualified) is not func:
            raise Opaque(scope, f"it calls {name or func!r}, which cannot be imported by its name")
    return "function", func, ()
