"""Whether a part of a net draws random numbers when it trains."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

FUNCTIONS = ("dropout", "rrelu", "rand", "bernoulli", "multinomial", "normal_", "uniform_")
KNOWN = ("torch", "girih")
"""Packages whose functions and modules draw by none but those, and by modules that drop out."""


def draws(part: fx.GraphModule) -> bool:
    """Whether a part may draw: it drops out, draws itself, or has code of a user's, which may."""
    return any(_draws(part, node) for node in part.graph.nodes)


def _draws(part: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(_module_draws(each) for each in part.get_submodule(str(node.target)).modules())
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return any(each in name for each in FUNCTIONS)


def _module_draws(module: nn.Module) -> bool:
    if type(module).__module__.partition(".")[0] not in KNOWN:
        return True
    if isinstance(module, _DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0.0)  # of attention and recurrent layers
    return isinstance(module, nn.RReLU) or (isinstance(dropout, float) and dropout > 0)
