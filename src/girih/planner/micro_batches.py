"""Micro-batches: parts in which a batch is computed, one beside the exchange of the next (D-interleaving, PICASSO §III-C)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from girih.planner.facts import Facts
from girih.planner.traffic import FLOAT_BYTES

MEMORY_SHARE = 0.25
"""Part of the memory that what is kept for the backward pass may take; the rest is for tables, and for gradients."""
MOST = 64
ROUNDING = 1e-9
"""Parts below which a remainder comes of rounding, and is not one more part."""


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

    - memory: RBound is :data:`MEMORY_SHARE` of a trainer's part of the machine's memory, RInstance the bytes that the model keeps of an
      example for its backward pass, counted.
    - network: of n micro-batches the rows of all but the first travel while another is computed, which hides (1 - 1 / n) · H
      seconds, H being the shorter of a step's rows and its examples in the model. Each micro-batch costs L, the latency of its messages
      and what a pass of the model takes however few its examples. n · L + H / n is least for the least n with n · (n + 1) ≥ H / L.
      RBound is the bytes of rows that this leaves for each, RInstance those of an example. Where L is 0 there is no bound.
    """
    wanted = facts.schedule.micro_batches
    if wanted != "auto":
        return wanted, ""
    if facts.batch_size is None or facts.dense_cost is None:
        return 1, "what an example costs the model is not known yet"
    share = facts.batch_size / facts.num_trainers
    kept = facts.dense_cost.bytes_per_example
    bounds = {"memory": (MEMORY_SHARE * facts.dense_cost.memory_bytes, kept)}
    profile, speeds, others = facts.profile, facts.speeds, facts.num_trainers - 1
    if facts.schedule.micro_batches_from == "embedding" and profile is not None:
        sent = FLOAT_BYTES * profile.numbers_of_share * others / facts.num_trainers
        added_s = others * speeds.latency_s + facts.dense_cost.pass_s
        if sent and added_s and speeds.bytes_per_s:
            hidden_s = min(sent / speeds.bytes_per_s, share * facts.dense_cost.example_s)
            bounds["network"] = (sent / _fewest(hidden_s / added_s), sent / share)
    size, resource = micro_batch_size(bounds)
    count = max(1, min(MOST, math.floor(share), math.ceil(share / max(size, 1.0) - ROUNDING)))
    bound, each = bounds[resource]
    return count, (
        f"by eq. 2: {resource} is for {size:,.0f} examples, {bound:,.0f} bytes at {each:,.0f} each; a trainer's share of a"
        f" step has {share:,.0f}"
    )


def _fewest(ratio: float) -> int:
    """The least n ≥ 1 with n · (n + 1) ≥ ratio."""
    return max(1, math.ceil(math.sqrt(ratio + 0.25) - 0.5))
