"""Whether a part of a net draws random numbers when it trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.dropout import _DropoutNd

FUNCTIONS = ("dropout", "gumbel", "fractional_max_pool", "rand", "uniform_", "normal_", "lowrank", "lobpcg")
"""Parts of the names of torch's functions in Python that draw; its operators say it themselves, by a tag."""
ATTENTION = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Functions that draw where their ``dropout_p`` is not 0, and its place among the arguments."""
MODULES = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
KNOWN = ("torch", "girih")
"""Packages whose functions and modules draw by none but those, and by modules that drop out."""
PLAIN = ("operator", "_operator", "builtins", "math", "aten", "prims")
"""Python's own functions and namespaces of torch's operators."""


def draws(part: fx.GraphModule) -> bool:
    """Whether a part may draw: it drops out, draws itself, or has code of a user's, which may."""
    return any(_draws(part, node) for node in part.graph.nodes)


def _draws(part: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(_module_draws(each) for each in part.get_submodule(str(node.target)).modules())
    if node.op not in ("call_function", "call_method"):
        return False
    if callable(node.target) and _package(node.target) not in (*KNOWN, *PLAIN):
        return True
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    name = name.partition(".")[0]  # an operator's name has its overload's
    if name in ATTENTION:
        place = ATTENTION[name]
        probability = node.args[place] if len(node.args) > place else node.kwargs.get("dropout_p", 0.0)
        return not isinstance(probability, (int, float)) or probability > 0
    return any(each in name for each in FUNCTIONS) or _is_seeded(name)


def _package(function: Callable[..., object]) -> str:
    """The package of a function; built-in functions without one are torch's."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function).partition(".")[0]  # which names its namespace
    return (getattr(function, "__module__", None) or "torch").partition(".")[0]


@cache
def _is_seeded(name: str) -> bool:
    """Whether torch says of one of its operators that it draws."""
    operator = getattr(torch.ops.aten, name, None)
    if not isinstance(operator, OpOverloadPacket):
        return False
    names: list[str] = operator.overloads()  # type: ignore[no-untyped-call]
    overloads = (getattr(operator, name) for name in names)
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _module_draws(module: nn.Module) -> bool:
    if type(module).__module__.partition(".")[0] not in KNOWN:
        return True
    if isinstance(module, _DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    return isinstance(module, MODULES) or (isinstance(dropout, float) and dropout > 0)
