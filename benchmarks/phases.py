"""What every trainer of a run did between two moments, on the clock that all processes of a machine share.

A trainer's trail holds its spans and when it entered and left each collective. All trainers call the same collectives in
the same order, so that the trails of all tell when the last one came: until then a trainer waits for others, and what
is left of the call is communication.

A wait for rows or for updates is not communication alone. It contains the lookups and pooling of embedding workers, and the
lookups and optimizer of embedding servers. If these processes share the trainer's cores, it contains their queue as well.
No span divides such a wait. Compare the bytes of links, or subtract the processor time of these roles.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from girih.comm.group import TrainerGroup
from girih.dense.halves.parameter_server import ParameterServer, ParameterServerReplica

COLLECTIVES = ("all_reduce", "exchange", "broadcast_tensor", "largest", "barrier")
WAITS = ("read", "wait for rows", "wait for update", "wait for parameters")
"""Spans of a trainer that waits: for its next batch, for rows, for its updates of rows and of parameters.

The work of other processes for this trainer is inside; a strategy without such processes has the same work as computing."""
ALL_REDUCE = "allreduce"
LAST_OF_STEP = "apply"

Trail = Mapping[str, Any]
"""``spans``: (name, start, seconds) each. ``collectives``: (entered, left) each. ``dense_staleness``: (time, updates) each."""


class Recorder:
    """Notes what this process's spans do not tell, from its making on: it wraps girih's own methods."""

    def __init__(self) -> None:
        self._inside = threading.local()
        self._clear()
        for name in COLLECTIVES:
            self._wrap(TrainerGroup, name, self._collective)
        self._wrap(ParameterServerReplica, "_take_arrived", self._waiting)
        self._wrap(ParameterServer, "step", self._dense_step)

    def take(self, spans: Sequence[tuple[str, float, float]]) -> Trail:
        """The trail since the last call, with the spans of the run; all trainers call it at the same place."""
        trail = {
            "spans": [*spans, *self._waits],
            "collectives": self._calls,
            "dense_staleness": self._staleness,
        }
        self._clear()
        return trail

    def _clear(self) -> None:
        self._calls: list[tuple[float, float]] = []
        self._waits: list[tuple[str, float, float]] = []
        self._staleness: list[tuple[float, int]] = []

    def _wrap(self, owner: type, name: str, wrapper: Callable[..., Any]) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *words, **options: wrapper(call, *words, **options))

    def _collective(self, call: Callable[..., Any], *words: Any, **options: Any) -> Any:
        """Notes the outermost call: one may be made of others. Those that run beside have spans."""
        if options.get("async_op") or getattr(self._inside, "one", False):
            return call(*words, **options)
        self._inside.one, entered = True, time.perf_counter()
        try:
            return call(*words, **options)
        finally:
            self._inside.one = False
            self._calls.append((entered, time.perf_counter()))

    def _waiting(self, call: Callable[..., Any], *words: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*words)
        finally:
            self._waits.append(("wait for parameters", start, time.perf_counter() - start))

    def _dense_step(
        self, call: Callable[..., Any], server: ParameterServer, gradient: Any, given: Any, version: int
    ) -> Any:
        self._staleness.append((time.perf_counter(), server.version - version))
        return call(server, gradient, given, version)


def divide(trails: Sequence[Trail], start: float, end: float) -> list[dict[str, float]]:
    """Each trainer's ``steps`` between two moments, and its seconds a step by phase.

    Phases: those of ``WAITS``; ``communication``, of which all trainers were there; ``waiting``, for the last of them;
    ``beside``, while an AllReduce ran beside the backward pass, which is part of what is left; ``step``, the whole.
    """
    arrivals = [max(calls) for calls in zip(*(_entered(trail) for trail in trails), strict=False)]
    return [_divide(trail, arrivals, start, end) for trail in trails]


def last_step(trail: Trail) -> float:
    """The moment at which a trainer ended its last step."""
    return max(_step_ends(trail))


def dense_staleness(trails: Sequence[Trail], start: float, end: float) -> list[int]:
    """Of each dense gradient that a dense server applied: updates since its parameters were read."""
    return [
        updates for trail in trails for moment, updates in trail["dense_staleness"] if start <= moment < end
    ]


def _divide(trail: Trail, arrivals: Sequence[float], start: float, end: float) -> dict[str, float]:
    def within(first: float, last: float) -> float:
        return max(0.0, min(last, end) - max(first, start))

    seconds: defaultdict[str, float] = defaultdict(float)
    for name, begin, length in trail["spans"]:
        if name in WAITS:
            seconds[name] += within(begin, begin + length)
    for (entered, left), last in zip(trail["collectives"], arrivals, strict=False):
        met = min(max(last, entered), left)
        seconds["waiting"] += within(entered, met)
        seconds["communication"] += within(met, left)
    covered = start
    for _, begin, length in sorted((s for s in trail["spans"] if s[0] == ALL_REDUCE), key=lambda s: s[1]):
        seconds["beside"] += within(max(begin, covered), begin + length)
        covered = max(covered, begin + length)
    ends = _step_ends(trail)
    first, last = np.interp([start, end], ends, np.arange(1.0, len(ends) + 1))
    seconds["step"] = end - start
    return {"steps": float(last - first)} | {name: s / (last - first) for name, s in seconds.items()}


def _entered(trail: Trail) -> list[float]:
    return [entered for entered, _ in trail["collectives"]]


def _step_ends(trail: Trail) -> list[float]:
    return sorted(begin + length for name, begin, length in trail["spans"] if name == LAST_OF_STEP)
