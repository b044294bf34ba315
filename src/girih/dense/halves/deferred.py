"""Optimizer steps that a flag on the device can refuse, so that no step waits for the GPU.

The host reads the flag one step later. Until then, the flag prevents changes of parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from girih.dense.halves.replica import Replica

Gradients = list[Tensor | None]
"""The gradient of each parameter, or None if the loss does not depend on the parameter."""
Buffers = Sequence[tuple[Tensor, Tensor]]
"""Pairs of a tensor and a copy of its value before a batch."""


def take_step_masked(
    half: Replica, refused: Tensor, gradients: Gradients, buffers: Buffers
) -> Callable[[], None]:
    """Takes one optimizer step without waiting. If the flag is set, changes nothing and restores the buffers.

    Returns:
        A function that the host must call if it learns that the flag was set.
    """
    half.stopped.logical_or_(refused)
    for buffer, before in buffers:
        torch.where(refused, before, buffer, out=buffer)
    put_back = half.move_masked(refused, gradients)

    def go_on() -> None:
        put_back()
        half.stopped.zero_()

    return go_on


def move_masked(half: Replica, refused: Tensor, gradients: Gradients) -> Callable[[], None]:
    """Takes one optimizer step, after clipping. If the flag is set, changes nothing.

    Args:
        refused: 0-d bool, on the device.

    Returns:
        A function that the host must call if it learns that the flag was set.
    """
    optimizer = half.optimizer
    if optimizer is None:
        return lambda: None
    learning = {p for p, gradient in zip(half.parameters, gradients, strict=True) if gradient is not None}
    # Copies are needed if the optimizer creates state in this step, or if girih does not know the place of its state.
    if not learning <= half.begun or not _keeps_state_as_torch(optimizer):
        half.begun |= learning
        if not refused:
            half.move(gradients)
        return lambda: None
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # One fused kernel takes the whole step, and reads the flag.
        scaled: Any = optimizer
        scaled.grad_scale, scaled.found_inf = None, refused.float()
        try:
            half.move(gradients)
        finally:
            del scaled.grad_scale, scaled.found_inf
        return lambda: None
    kept, put_back = copies_of(optimizer, half.device)
    half.move(gradients)
    for tensor, before in kept:
        torch.where(refused, before, tensor, out=tensor)
    return put_back


def copies_of(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Buffers, Callable[[], None]]:
    """Copies parameters and optimizer state on the device. Also returns a function that restores state on the host."""
    tensors = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    numbers = []
    for state in optimizer.state.values():
        tensors += [each for each in state.values() if isinstance(each, Tensor)]
        numbers.append((state, {k: v for k, v in state.items() if not isinstance(v, Tensor)}))
    kept = [(each, each.clone()) for each in tensors]
    host = [(each, before) for each, before in kept if each.device.type != device.type]

    def put_back() -> None:
        for state, before in numbers:
            state.update(before)
        for tensor, copy in host:
            tensor.copy_(copy)

    return [pair for pair in kept if pair[0].device.type == device.type], put_back


def _keeps_state_as_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether steps change only the parameters, and tensors and numbers in the optimizer's state."""
    return type(optimizer).__module__.startswith(("torch.optim.", "girih."))
