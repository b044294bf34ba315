"""Float32 linear layers through oneDNN, for :class:`girih.dense.accel.arithmetic.LinearBy`.

Only the order of summation differs from torch's layers. PyTorch multiplies float32 matrices with MKL, which does not
use AVX-512 on processors of other vendors than Intel. On these, oneDNN, which PyTorch includes for bfloat16, takes
half the time (docs/decisions/0006-linear-through-onednn.md). On Intel's processors it takes 1.1 to 1.3 times as long
as MKL (decision 0029).

Shapes: B examples (all dimensions before the last), I inputs, O outputs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.models.layers.autograd import Context

MIN_PRODUCTS = 1 << 22  # for B · I · O below this number, MKL is as fast


def pays() -> bool:
    """Returns whether layers are faster through oneDNN on this machine. On Intel's processors MKL is as fast."""
    return available() and _vendor() != "GenuineIntel"


def available() -> bool:
    """Returns whether this machine and this PyTorch support :func:`linear`."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@lru_cache(maxsize=1)
def _vendor() -> str:
    """Returns the vendor of the processor, or "" if the system does not report the vendor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` through oneDNN if that is faster: [..., I], [O, I] and [O] to [..., O]."""
    if not _serves(input, weight, bias):
        return F.linear(input, weight, bias)
    flat = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    output: Tensor = (
        _OrderedLinear.apply(flat, weight, bias)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled()
        else _product(flat, weight, bias)
    )
    # A view would cause copies if the next layer works in place.
    return output if input.dim() == 2 else output.view(*input.shape[:-1], -1)


def _serves(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return input.numel() * weight.shape[0] >= MIN_PRODUCTS and is_plain_linear(input, weight, bias)


def is_plain_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Returns whether all are float32 on a CPU, their shapes match, and no torch mode is active."""
    return (
        weight.dim() == 2
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and all(t is None or _is_plain(t) for t in (input, weight, bias))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # vmap and similar transforms need torch's own operators
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.layout == torch.strided


class _OrderedLinear(torch.autograd.Function):
    """[B, I], [O, I] and [O] to [B, O]. Computes each of its three products only if it is needed."""

    @staticmethod
    def forward(ctx: Context, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        # A differentiable gradient needs torch's own operators.
        product = _differentiable_product if torch.is_grad_enabled() else _product
        return _gradients(ctx.needs_input_grad, gradient, input, weight, product)


def gradients(
    wanted: Sequence[bool], gradient: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight and bias of a linear layer, in float32, by the faster library.

    Args:
        wanted: True for each of the three gradients that is needed. The remaining gradients are None.
        gradient: [B, O], the gradient of the output.
        input, weight: [B, I], [O, I].
    """
    through = pays() and input.numel() * weight.shape[0] >= MIN_PRODUCTS and not torch.is_grad_enabled()
    return _gradients(wanted, gradient, input, weight, _product if through else _differentiable_product)


def _gradients(
    wanted: Sequence[bool],
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    gradient = gradient.contiguous()  # the gradient may be some columns of a wider tensor
    of_input = of_weight = of_bias = None
    if wanted[0]:
        of_input = product(gradient, weight.mT)
    if wanted[1]:  # the product is twice as fast with the narrower matrix first
        narrow = gradient.shape[1] <= input.shape[1]
        of_weight = product(gradient.mT, input.mT) if narrow else product(input.mT, gradient.mT).mT
    if wanted[2]:
        of_bias = gradient.sum(0)
    return of_input, of_weight, of_bias


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns a bᵀ + bias. Makes no copy if ``a`` is contiguous, and ``b`` or its transpose is contiguous."""
    if bias is not None:
        bias = bias.contiguous()
    if not (b.is_contiguous() or b.mT.is_contiguous()):  # oneDNN would multiply one number at a time
        b = b.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return product


def _differentiable_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT
