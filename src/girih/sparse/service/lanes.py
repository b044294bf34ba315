"""The names of pushes in the shards of a server: lanes so far apart that no push overtakes another of its lane.

Who numbers pushes by itself is a sender: all trainers together where they are in step, each of them otherwise. A sender has at
most τ + 1 pushes on their way, through different workers, in any order.
"""

from __future__ import annotations

from girih.store import Push
from girih.store.memory.pushes import LANES


def push_of(num_senders: int, trainer: int, turn: int) -> Push:
    """The name of a turn's push."""
    num_lanes = LANES // num_senders
    sender = trainer if num_senders > 1 else 0
    return Push(sender * num_lanes + turn % num_lanes, turn + 1)


def why_not_told_apart(num_senders: int, staleness: int) -> str:
    """Why pushes that are sent again could not be told from others, and which option would change that; "" where they can."""
    most = LANES // num_senders - 1
    if most < 0:
        return (
            f"pushes that come again are told apart for {LANES} trainers at most where each goes on its own, not"
            f" {num_senders}; strategy 'hybrid' knows no such bound"
        )
    if staleness > most:
        return f"pushes that come again are told apart up to strategy.staleness = {most}, not {staleness}"
    return ""
