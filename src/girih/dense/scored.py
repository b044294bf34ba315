"""Logits of training steps on their way to a count of scores; those on a GPU are fetched without waiting for it.

Shapes: B examples, T labels.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from girih.metrics.progressive import ProgressiveScores
from girih.models.loss import Targets


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
        given = {
            "logits": outputs.detach().float(),
            "labels": targets.labels,
            "weights": targets.example_weights,
            "label_weights": targets.label_weights,
        }
        tensors = {name: each for name, each in given.items() if each is not None}
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
