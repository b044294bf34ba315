"""Linear layers with an 8-bit forward pass, for :class:`girih.dense.accel.arithmetic.LinearBy` (HT §5.1's Model-B).

Each forward pass rounds activations and weights to 8 bits, and multiplies them as integers. The backward pass is the
same as for the float32 layer. It treats rounding as the identity (straight-through estimator: Bengio et al. 2013, arXiv
1308.3432). docs/decisions/0039-fewer-bits.md gives the reasons.

Shapes: B examples (all dimensions before the last), I inputs, O outputs.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from girih.dense.accel import onednn
from girih.models.layers.autograd import Context

LEAST_STEP = 2.0**-100
"""The smallest step. Numbers that would need a smaller step become 0."""
_NUMBERS_OF_A_PART = 1 << 17  # the numbers per thread that are processed together
_MOST_EXACT = 1024  # up to this number of inputs, float32 adds products of 7 and 8 bits exactly


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` with an 8-bit forward pass: [..., I], [O, I] and [O] to [..., O].

    All activations of a call share a step s and a zero point z: x ≈ s (q − z), q = round(x / s + z) from −128 to 127,
    and s = (max(x, 0) − min(x, 0)) / 255. Each output o has its own step for its weights: w ≈ s_o q, q from −127 to
    127. So y = s s_o (Σ q_x q_w − z Σ q_w) + bias, and the sums of integers are exact.

    Torch's own layer runs in these cases:

    - there are no examples, or the numbers are not float32 on a CPU
    - an activation is not finite
    - autocast or a transform of functions is active
    """
    if not _serves(input, weight, bias):
        return F.linear(input, weight, bias)
    low, high = (float(number) for number in torch.aminmax(input.detach()))
    if not math.isfinite(high - low):  # so that the same steps are refused as in float32
        return F.linear(input, weight, bias)
    flat = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    output: Tensor = _Int8Linear.apply(flat, weight, bias, min(low, 0.0), max(high, 0.0))  # type: ignore[no-untyped-call]
    return output if input.dim() == 2 else output.view(*input.shape[:-1], -1)


def _serves(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return input.numel() > 0 and weight.numel() > 0 and onednn.is_plain_linear(input, weight, bias)


class _Int8Linear(torch.autograd.Function):
    """[B, I], [O, I] and [O] to [B, O]. Activations are between ``low`` ≤ 0 and ``high`` ≥ 0."""

    @staticmethod
    def forward(
        ctx: Context, input: Tensor, weight: Tensor, bias: Tensor | None, low: float, high: float
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        step = max((high - low) / 255, LEAST_STEP)
        zero = -128 - round(low / step)
        steps = weight.abs().amax(1).div_(127).clamp_(min=LEAST_STEP)
        # Another net may have updated the weight since its steps were computed. A code that wraps around would change
        # its sign.
        rounded = weight.div(steps[:, None]).round_().clamp_(-127, 127)
        weight_codes = torch.empty(weight.shape, dtype=torch.int8).copy_(rounded)
        steps.mul_(step)
        offset = weight_codes.sum(1, dtype=torch.int32).mul(steps).mul_(-zero)
        if bias is not None:
            offset += bias
        output = torch.empty(len(input), len(weight))
        # Parts stay in a core's cache, so that all operations together pass over memory once.
        rows = max(1, _NUMBERS_OF_A_PART * torch.get_num_threads() // input.shape[1])
        numbers = torch.empty(min(rows, len(input)), input.shape[1])
        codes = torch.empty(numbers.shape, dtype=torch.int8)
        for start in range(0, len(input), rows):
            block, result = input[start : start + rows], output[start : start + rows]
            part, coded = numbers[: len(block)], codes[: len(block)]
            torch.mul(block, 1 / step, out=part)
            coded.copy_(part.add_(zero).round_().clamp_(-128, 127))
            torch.mul(product(coded, weight_codes), steps, out=result).add_(offset)
        return output

    @staticmethod
    def backward(
        ctx: Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        input, weight = ctx.saved_tensors
        return *onednn.gradients(ctx.needs_input_grad, gradient, input, weight), None, None


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a bᵀ exactly: int8[B, I], int8[O, I] to int32[B, O]. ``b`` must not contain −128."""
    if _multiplies_integers() and a.shape[1] > 1:  # torch's result is wrong for one input and several outputs
        result: Tensor = torch._int_mm(a, b.mT)
        return result
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for start in range(0, a.shape[1], _MOST_EXACT):
        some = slice(start, start + _MOST_EXACT)
        total += (a[:, some].float() @ b[:, some].float().mT).int()
    return total


@lru_cache(maxsize=1)
def _multiplies_integers() -> bool:
    """Returns whether torch uses fast int8 instructions on this machine.

    Without them, torch multiplies one number at a time.
    """
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    return torch.backends.mkldnn.is_available() and supported is not None and bool(supported())  # type: ignore[no-untyped-call]
