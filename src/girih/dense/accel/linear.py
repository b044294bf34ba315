"""Linear layers computed by another function, put on a model from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Linear = Callable[..., Tensor]
"""``torch.nn.functional.linear`` by other means: [..., I], [O, I] and [O] or None to [..., O]."""


class LinearBy(TorchFunctionMode):
    """While entered, ``torch.nn.functional.linear`` is computed by a function.

    A mode reaches every model as it is: its modules, their types and state dicts stay what they were, and
    nothing changes for other threads or outside of the ``with``.
    """

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return (self._linear if func is F.linear and not types else func)(*args, **(kwargs or {}))
