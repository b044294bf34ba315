"""The record of a forward pass: its calls, and where each of their tensors comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from girih.dense.graph.structures import Key


class Opaque(BaseException):
    """A module cannot be recorded; no exception that a model would catch.

    Attributes:
        scope: path of the module; reason: why, in words.
    """

    def __init__(self, scope: str, reason: str) -> None:
        super().__init__(f"{scope!r}: {reason}")
        self.scope, self.reason = scope, reason


@dataclass(frozen=True, slots=True)
class NetInput:
    """``numeric``, ``embeddings`` as a whole, or a tensor of these: see :data:`girih.dense.graph.batches.Place`."""

    kind: str
    key: int | str = ""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class ConstantTensor:
    """A tensor that the model has from elsewhere, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor of what a call returned: the call's number, and the leaf's."""

    call: int
    leaf: int


Ref = NetInput | Attribute | ConstantTensor | Result


@dataclass(frozen=True, slots=True)
class Call:
    """One operator in one pass; tensors in its arguments are :data:`Ref`.

    Attributes:
        scope: path of the module whose code called it.
        shapes: of each leaf of the result. ways: to each; ((),) where the result is one tensor.
    """

    kind: Literal["module", "method", "function"]
    target: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scope: str
    shapes: tuple[torch.Size, ...]
    ways: tuple[tuple[Key, ...], ...]


@dataclass(eq=False)
class Recording:
    """A forward pass.

    Attributes:
        logits: what it returned. left: tensors that it left on modules: (path, attribute) → which.
        shapes: of inputs.
    """

    calls: list[Call] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    shapes: dict[Ref, torch.Size] = field(default_factory=dict)
    logits: Ref | None = None
    left: dict[tuple[str, str], Ref] = field(default_factory=dict)
