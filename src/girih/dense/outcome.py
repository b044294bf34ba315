"""The outcome of a step: its loss, or why it was refused; on a GPU the host learns it a step late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from girih.errors import NonFiniteError


class Outcome(Protocol):
    """The outcome of a step.

    Attributes:
        loss: its mean loss; waits until it is known.
        refused: why nothing was applied, or None; waits.
        counters: those of the sparse half as they were after the step; None where the half is to be asked; waits.
    """

    @property
    def loss(self) -> float: ...

    @property
    def refused(self) -> NonFiniteError | None: ...

    @property
    def counters(self) -> Mapping[str, int] | None: ...

    def known(self) -> bool:
        """Whether asking for it waits for nothing."""
        ...

    def wait(self) -> None:
        """Waits until it is known."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """An outcome that is known; see :class:`Outcome`."""

    loss: float
    refused: NonFiniteError | None = None
    counters: Mapping[str, int] | None = None

    def known(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class Late:
    """An outcome on its way to the host; see :class:`Outcome`.

    Args:
        told: float64[K], on a device, the loss first.
        explain: the K numbers → why the step was refused, or None; asked once.
        count: the K numbers → counters, where they are among them.
    """

    def __init__(
        self,
        told: Tensor,
        explain: Callable[[Sequence[float]], NonFiniteError | None],
        count: Callable[[Sequence[float]], Mapping[str, int] | None] = lambda numbers: None,
    ) -> None:
        self._explain, self._count = explain, count
        self._known: Known | None = None
        self._told = told
        self._event: Any = None
        if told.device.type == "cuda":
            self._told = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._told.copy_(told, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(told.device))

    @property
    def loss(self) -> float:
        """See :class:`Outcome`."""
        return self._arrived().loss

    @property
    def refused(self) -> NonFiniteError | None:
        """See :class:`Outcome`."""
        return self._arrived().refused

    @property
    def counters(self) -> Mapping[str, int] | None:
        """See :class:`Outcome`."""
        return self._arrived().counters

    def known(self) -> bool:
        """See :class:`Outcome`; without a GPU, once it was asked for."""
        return self._known is not None or (self._event is not None and bool(self._event.query()))

    def wait(self) -> None:
        """See :class:`Outcome`."""
        self._arrived()

    def _arrived(self) -> Known:
        if self._known is None:
            if self._event is not None:
                self._event.synchronize()
            numbers = self._told.tolist()
            self._known = Known(numbers[0], self._explain(numbers), self._count(numbers))
            self._explain = self._count = _explained  # lets go of what they held
        return self._known


def _explained(numbers: Sequence[float]) -> None:
    return None
