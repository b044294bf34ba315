"""Micro-batches: parts in which a batch is computed, one beside the exchange of the next (D-interleaving, PICASSO §III-C)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from girih.planner.facts import Facts
from girih.planner.traffic import FLOAT_BYTES

MEMORY_SHARE = 0.25
"""Part of the free memory that what is kept for the backward pass may take; the rest is for tables, and for gradients."""
MOST = 64


def micro_batch_size(bounds: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """BS_micro = min_op (RBound_op / RInstance_op), examples, and the resource that decides it (PICASSO §III-C, eq. 2).

    Args:
        bounds: resource → what there is of it, and what an example takes, in the same unit; not empty.
    """
    sizes = {name: bound / each if each else math.inf for name, (bound, each) in bounds.items()}
    least = min(sizes, key=lambda name: sizes[name])
    return sizes[least], least


def micro_batches(facts: Facts) -> tuple[int, str]:
    """The number of micro-batches that a trainer's share of a step is cut into, and why; by :func:`micro_batch_size` where "auto".

    Resources are memory, and, from the embedding layer on, the network:

    - memory: RBound is :data:`MEMORY_SHARE` of what is free for a trainer, RInstance what the model keeps of an example for its
      backward pass, both measured.
    - network: all rows but those of the first micro-batch travel beside dense compute. With n micro-batches rows of T
      seconds keep a trainer waiting for T / n, and their messages for n · L, L being the latency of those of one; least for
      n = √(T / L). So RBound is what the network carries in √(T · L), and RInstance the bytes of an example's rows.
    """
    wanted = facts.schedule.micro_batches
    if wanted != "auto":
        return wanted, ""
    if facts.batch_size is None or facts.activations is None:
        return 1, "what the model keeps of an example is not measured yet"
    share = facts.batch_size / facts.num_trainers
    kept = facts.activations.bytes_per_example
    bounds = {"memory": (MEMORY_SHARE * facts.activations.free_bytes, kept)}
    profile, speeds, others = facts.profile, facts.speeds, facts.num_trainers - 1
    if facts.schedule.micro_batches_from == "embedding" and profile is not None and speeds is not None:
        sent = FLOAT_BYTES * profile.numbers_of_share * others / facts.num_trainers
        latency_s = others * speeds.latency_s
        if sent and latency_s and speeds.bytes_per_s:
            carried = math.sqrt(sent * latency_s * speeds.bytes_per_s)  # = bytes per second · √(T · L)
            bounds["network"] = (carried, sent / share)
    size, resource = micro_batch_size(bounds)
    count = max(1, min(MOST, math.floor(share), math.ceil(share / max(size, 1.0))))
    bound, each = bounds[resource]
    return count, (
        f"by eq. 2: {resource} is for {size:,.0f} examples, {bound:,.0f} bytes at {each:,.0f} each; a trainer's share of a"
        f" step has {share:,.0f}"
    )
