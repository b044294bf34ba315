"""Strategies, a page each: which tiles, which schedule, which roles."""

from __future__ import annotations

from girih.strategies.asynchronous import Asynchronous
from girih.strategies.hybrid import Hybrid
from girih.strategies.local import Local
from girih.strategies.placing import place, plan
from girih.strategies.substitution import Substitution
from girih.strategies.synchronous import Synchronous

Strategy = Asynchronous | Hybrid | Local | Substitution | Synchronous
BY_NAME: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Asynchronous, Hybrid, Local, Substitution, Synchronous)
}

__all__ = [
    "BY_NAME",
    "Asynchronous",
    "Hybrid",
    "Local",
    "Strategy",
    "Substitution",
    "Synchronous",
    "place",
    "plan",
]
