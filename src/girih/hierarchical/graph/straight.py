"""Flattens a model in evaluation mode to one function of torch calls, without modules.

For a batch of a few hundred examples, Python code between the operators takes a third of the operators' time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from girih.dense.accel import onednn
from girih.dense.half import DenseSpec
from girih.hierarchical.graph.batches import batches_of
from girih.hierarchical.graph.runnable import CONSTANTS
from girih.hierarchical.graph.tracing import trace
from girih.models.embeddings import Embeddings

_LOG = logging.getLogger(__name__)
FlatForward = Callable[[nn.Module, Tensor, Embeddings], Tensor]
"""Computes the outputs of the traced module, or of the same module with other parameters."""
WITHOUT_LINEAR = (
    nn.BatchNorm1d, nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm, nn.LeakyReLU, nn.PReLU, nn.ReLU, nn.Sigmoid, nn.SiLU,
    nn.Softmax, nn.Tanh,
)  # fmt: skip
"""Modules that call no ``F.linear``, so that the choice of arithmetic does not affect them."""
TRIED = (512, 3)


def flatten_module(spec: DenseSpec, numeric: Tensor, embeddings: Embeddings) -> FlatForward | None:
    """Flattens the evaluation of a spec's module.

    Returns None if the module looks at values, or the spec needs other arithmetic.

    Args:
        numeric, embeddings: float32[B, X] and the embeddings of an example batch whose sequences differ in length. The
            function serves batches of any size with the same packing.
    """
    if spec.precision != "float32" or spec.forward != "float32" or spec.device.type != "cpu":
        return None
    was_training = [(module, module.training) for module in spec.module.modules()]
    spec.module.eval()
    try:
        traced = trace(spec.module, numeric, embeddings)
        if traced.opaque or traced.left or not _flatten_graph(traced.net):
            return None
        function: FlatForward = type(traced.net).forward
        return function if _computes_as(function, spec, batches_of(numeric, embeddings, TRIED)) else None
    except (
        Exception
    ):  # the model may refuse the example's values; it reports such an error itself when it runs
        _LOG.debug("no straight code", exc_info=True)
        return None
    finally:
        for module, training in was_training:
            module.training = training


def _flatten_graph(net: fx.GraphModule) -> bool:
    """Makes linear layers use :func:`arithmetic`. Returns whether no other module depends on the arithmetic."""
    linear = onednn.linear if onednn.pays() else F.linear
    for node in list(net.graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith(CONSTANTS):
            return False
        if node.op == "call_function" and node.target is F.linear:
            node.target = linear
        if node.op != "call_module":
            continue
        module = net.get_submodule(node.target)
        if type(module) is nn.Linear:
            _open(net.graph, node, linear, has_bias=module.bias is not None)
        elif not isinstance(module, WITHOUT_LINEAR):
            return False
    net.recompile()
    return True


def _open(graph: fx.Graph, node: fx.Node, linear: Callable[..., Tensor], *, has_bias: bool) -> None:
    with graph.inserting_before(node):
        weight = graph.get_attr(f"{node.target}.weight")
        bias = graph.get_attr(f"{node.target}.bias") if has_bias else None
        called = graph.call_function(linear, (*node.args, weight, bias))
    node.replace_all_uses_with(called)
    graph.erase_node(node)


def _computes_as(function: FlatForward, spec: DenseSpec, batches: list[tuple[Tensor, Embeddings]]) -> bool:
    """Returns whether the function and the module give the same outputs, bit for bit."""
    with torch.inference_mode():
        for batch in batches:
            with spec.arithmetic():
                expected = spec.module(*batch)
            if not torch.equal(function(spec.module, *batch), expected):
                return False
    return True
