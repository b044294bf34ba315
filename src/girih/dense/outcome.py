"""The outcome of a step: its loss, or the reason of its refusal. On a GPU the host learns it one step later."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from girih.errors import NonFiniteError
from girih.metrics.progressive import ProgressiveScores
from girih.models.loss import Targets


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
class ReadyOutcome:
    """An outcome that is known; see :class:`Outcome`."""

    loss: float
    refused: NonFiniteError | None = None
    counters: Mapping[str, int] | None = None

    def known(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class PendingOutcome:
    """An outcome on its way to the host; see :class:`Outcome`.

    Args:
        numbers: float64[K], on a device.
        read: the K numbers on the host → the outcome; asked once, in the order of steps.
        together: trainers ask for it at the same step, since they go on alike: it is not known until they do.
    """

    def __init__(
        self, numbers: Tensor, read: Callable[[Sequence[float]], ReadyOutcome], *, together: bool = False
    ) -> None:
        self._known: ReadyOutcome | None = None
        self._numbers, self._read, self._together = numbers, read, together
        self._event: Any = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))

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
        if self._known is not None or self._event is None or self._together:
            return self._known is not None
        return bool(self._event.query())

    def wait(self) -> None:
        """See :class:`Outcome`."""
        self._arrived()

    def _arrived(self) -> ReadyOutcome:
        if self._known is None:
            if self._event is not None:
                self._event.synchronize()
            self._known = self._read(self._numbers.tolist())
            self._read = _was_read  # lets go of what it held
        return self._known


def _was_read(numbers: Sequence[float]) -> ReadyOutcome:
    raise LookupError("an outcome is read once")


class _Fetched(NamedTuple):
    """Tensors on the host, by name, there once the event has passed."""

    tensors: Mapping[str, Tensor]
    event: Any


class ScoredSteps:
    """Counts the logits of every training step.

    Attributes:
        scores: what they are counted in.
    """

    def __init__(self, scores: ProgressiveScores) -> None:
        self.scores = scores
        self._lock = threading.Lock()
        self._under_way: deque[_Fetched] = deque()

    def add(self, outputs: Tensor, targets: Targets) -> None:
        """Adds B examples: logits [B, T], on any device."""
        columns = {
            "logits": outputs.detach().float(),
            "labels": targets.labels,
            "weights": targets.example_weights,
            "label_weights": targets.label_weights,
        }
        tensors = {name: each for name, each in columns.items() if each is not None}
        if outputs.device.type == "cpu":
            self._count(tensors)
            return
        with self._lock:
            hosts = {
                name: torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
                for name, each in tensors.items()
            }
            for name, host in hosts.items():
                host.copy_(tensors[name], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(outputs.device))
            self._under_way.append(_Fetched(hosts, event))
            while self._under_way[0].event.query():
                self._count(self._under_way.popleft().tensors)
                if not self._under_way:
                    return

    def settle(self) -> None:
        """Returns when all are counted."""
        with self._lock:
            while self._under_way:
                fetched = self._under_way.popleft()
                fetched.event.synchronize()
                self._count(fetched.tensors)

    def _count(self, tensors: Mapping[str, Tensor]) -> None:
        if len(tensors["logits"]):
            self.scores.add(**{name: each.numpy() for name, each in tensors.items()})
