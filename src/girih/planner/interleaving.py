"""Interleaving groups: sets of packed embedding groups that use a resource one after the other (PICASSO §III-C)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from girih.errors import ConfigError
from girih.planner import traffic
from girih.planner.facts import Facts
from girih.planner.packing import PackedGroup, packed, spread, volumes_of
from girih.planner.traffic import FLOAT_BYTES

PASSES = 4
"""Memory accesses per number of a bag: read its row, write the bag, read its gradient, and add it up."""
EXCHANGES = 2
"""Messages that an interleaving group adds to a step for each other trainer: one with rows, one with their gradients.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The groups of a step, and their order.

    Attributes:
        interleaving: names of the groups in each interleaving group, in order.
        excluded: names of the groups that run before the interleaving groups.
        capacity: maximum numbers in an interleaving group, or None without a limit.
        why: the reason for the number of interleaving groups. Empty if the config gives the number.
    """

    groups: tuple[PackedGroup, ...]
    interleaving: tuple[tuple[str, ...], ...]
    excluded: tuple[str, ...]
    capacity: float | None
    why: str

    def schedule(self) -> dict[str, object]:
        """Returns the part of ``Plan.schedule``."""
        return {"interleaving": [list(names) for names in self.interleaving], "excluded": list(self.excluded)}

    def predicted(self) -> dict[str, object]:
        """Returns the part of ``Plan.predicted``."""
        volumes = {group.name: round(group.volume) for group in self.groups}
        if not self.why:
            return {"volumes": volumes}
        sets = {
            "volumes": [sum(volumes[name] for name in names) for names in self.interleaving],
            "capacity": None if self.capacity is None else round(self.capacity),
            "why": self.why,
        }
        return {"volumes": volumes, "interleaving": sets}


def arrange(facts: Facts) -> Arrangement:
    """Packs tables into groups, and spreads the groups over interleaving groups, by the options ``[schedule]``.

    The options give the number of interleaving groups, or :func:`capacity` decides it. The largest volume is close to
    the smallest possible one (:func:`~girih.planner.packing.spread`). The order follows the schema. It is the same on
    every trainer, because all trainers must do an exchange together. The order changes no sum.

    Raises:
        ConfigError: there are fewer tables than interleaving groups, or an excluded feature does not exist.
    """
    wanted = facts.schedule.interleaving_groups
    bound: float | None = None
    if wanted == "auto":
        bound, why = capacity(facts)
        total = sum(group.volume for group in packed(facts) if not group.excluded)
        number = 1 if bound is None else max(1, math.ceil(total / max(bound, 1.0)))
    else:
        number, why = wanted, "" if wanted == 1 else "as schedule.interleaving_groups says"
    groups = packed(facts, split=number != 1, at_least=number)
    included = [group for group in groups if not group.excluded]
    if len(included) < number:
        if wanted != "auto" and number > 1:
            raise ConfigError(
                f"schedule: interleaving_groups = {number}, but there are {len(included)} tables that are not excluded, and a"
                f" table is never cut; set at most {max(1, len(included))}"
            )
        why += f"; {number} are needed, but there are {len(included)} tables" if number > 1 else ""
    sets = spread([group.volume for group in included], min(number, max(1, len(included))))
    return Arrangement(
        groups=groups,
        interleaving=tuple(tuple(included[member].name for member in members) for members in sets),
        excluded=tuple(group.name for group in groups if group.excluded),
        capacity=bound,
        why=why,
    )


def capacity(facts: Facts) -> tuple[float | None, str]:
    """Returns Capacity_g = min_op (RBound_op / RParam_op) and the reason (PICASSO §III-C, eq. 3).

    The capacity is the most numbers of a step that an interleaving group may have. The embedding layer has two
    operations. The network limits the exchange of rows. Memory limits lookup and pooling.

    RBound is the amount that a resource carries while a trainer computes the dense half for its share of a step. So a
    trainer waits for no group longer than this. RBound is bytes per second × seconds of a forward and backward pass.
    Both are nominal.

    RParam is a trainer's bytes per number of a step. For the network, these are the bytes that it sends for keys, rows
    and gradients, for the unique keys of the first batches. For memory, these are four passes. The bytes are divided by
    the volume of all numbers (eq. 1).

    A group must not be too small, because its messages have a latency. So the capacity is at least the numbers that the
    network carries during the latency of the group's messages. The result is None, no limit, if a fact is missing.
    """
    profile, speeds = facts.profile, facts.speeds
    volume = sum(volumes_of(facts).values())
    if facts.num_trainers == 1:
        return None, "one: a single trainer exchanges nothing"
    if profile is None or not profile.ids_of_tables or facts.batch_size is None or not volume:
        return None, "one: the lookups of a step are not known yet"
    if not facts.model.num_parameters:
        return None, "one: the dense half has no parameters, so there is nothing to compute meanwhile"
    if facts.dense_cost is None:
        return None, "one: the cost of an example in the model is not known yet"
    window_s = facts.dense_cost.seconds(facts.batch_size / facts.num_trainers)
    sent = traffic.synchronous(
        facts.num_trainers, keys=profile.keys_of_share, numbers=profile.numbers_of_share, parameters=0
    )
    bounds: Mapping[str, float] = {
        "network": _ratio(speeds.bytes_per_s * window_s, sent.total / volume),
        "memory": _ratio(
            speeds.memory_bytes_per_s * window_s, PASSES * traffic.FLOAT_BYTES / facts.num_trainers
        ),
    }
    resource, least = min(bounds.items(), key=lambda each: each[1])
    if math.isinf(least):
        return None, "one: neither network nor memory bounds anything here"
    latency_s = EXCHANGES * (facts.num_trainers - 1) * speeds.latency_s
    hidden = bounds["network"] * latency_s / window_s
    why = f"by eq. 3: while a trainer computes, {1e3 * window_s:.3g} ms, {resource} carries {least:,.0f} numbers"
    if hidden > least:
        why += f"; at least {hidden:,.0f}, which the network carries in the {1e3 * latency_s:.3g} ms of its messages"
    return max(least, hidden), why


def _ratio(bound: float, cost: float) -> float:
    """Returns RBound / RParam. The ratio is infinite if the resource has no limit, or if nothing is sent."""
    return bound / cost if bound and cost else math.inf


MEMORY_SHARE = 0.25
"""The fraction of memory for the values that the backward pass needs. The rest is for tables and gradients."""
MOST = 64
ROUNDING = 1e-9
"""A remainder below this fraction of a part is a rounding error. It does not add another part."""


def micro_batch_size(bounds: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Returns BS_micro = min_op (RBound_op / RInstance_op), and the resource that decides (PICASSO §III-C, eq. 2).

    BS_micro is a number of examples.

    Args:
        bounds: resource → the available amount, and the amount per example, in the same unit; not empty.
    """
    sizes = {name: bound / each if each else math.inf for name, (bound, each) in bounds.items()}
    least = min(sizes, key=lambda name: sizes[name])
    return sizes[least], least


def micro_batches(facts: Facts) -> tuple[int, str]:
    """Returns the number of micro-batches in a trainer's share of a step, and the reason.

    "auto" uses :func:`micro_batch_size`.

    Two resources can limit a micro-batch. The network counts only if the embedding layer also runs by micro-batches.

    - memory: RBound is :data:`MEMORY_SHARE` of a trainer's part of the machine's memory. RInstance is the counted bytes
      per example that the model keeps for its backward pass.
    - network: with n micro-batches, the rows of each micro-batch except the first travel while another one is computed.
      This hides (1 - 1 / n) · H seconds. H is the shorter of the times for a step's rows and for its examples in the
      model. Each micro-batch costs L, the latency of its messages and the fixed time of a pass. n · L + H / n is
      smallest for the least n with n · (n + 1) ≥ H / L. RBound is the bytes of rows per micro-batch at this n,
      RInstance the bytes per example. If L is 0, there is no bound.
    """
    wanted = facts.schedule.micro_batches
    if wanted != "auto":
        return wanted, ""
    if facts.batch_size is None or facts.dense_cost is None:
        return 1, "the cost of an example in the model is not known yet"
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
        f"by eq. 2: {resource} allows {size:,.0f} examples, {bound:,.0f} bytes at {each:,.0f} each; a trainer's share of a"
        f" step has {share:,.0f}"
    )


def _fewest(ratio: float) -> int:
    """Returns the smallest n ≥ 1 with n · (n + 1) ≥ ratio."""
    return max(1, math.ceil(math.sqrt(ratio + 0.25) - 0.5))


def exchanges_of(facts: Facts) -> tuple[int, int]:
    """Returns the number of sets of groups that travel together, and of exchanges of a set's rows in a step."""
    arranged = arrange(facts)
    parts = micro_batches(facts)[0] if facts.schedule.micro_batches_from == "embedding" else 1
    return len(arranged.interleaving) + bool(arranged.excluded), parts
