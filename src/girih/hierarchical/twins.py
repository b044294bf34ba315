"""Twins of a module: Parameters and buffers of their own over the same memory."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def twin_of(module: AnyModule) -> AnyModule:
    """A copy that reads and moves the same numbers, and that autograd watches apart: ``.data`` begins a count of versions of its own."""
    held: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        for parameter in module.parameters()
    }
    held |= {id(buffer): buffer.data for buffer in module.buffers()}
    return copy.deepcopy(module, held)
