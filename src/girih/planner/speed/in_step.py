"""Costs of a step with tables in the trainers, which make each step together.

The strategies are ``local``, ``synchronous`` and ``substitution``. Steps do not overlap, except that a thread reads
ahead, which also needs a core. So the path is the sum of the parts of a step. :mod:`girih.planner.costs` gives the
seconds of communication.

B, T, t, c: the same as in :mod:`girih.planner.speed.step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from girih.planner import costs, traffic
from girih.planner.calibration import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Links
from girih.planner.costs import BUCKET_BYTES
from girih.planner.facts import AccessProfile, Facts
from girih.planner.interleaving import arrange, micro_batches
from girih.planner.speed.step import BACKWARD, TRAINER_LINK, WIRE, Basis, StepCost
from girih.planner.traffic import Traffic, Wire


def local(basis: Basis) -> StepCost:
    """Predicts a step in one process. Lookups, pass and updates follow one another, and each uses all threads.

    Another thread reads ahead.

    path = (lookups + row updates) / min(c, t) + pass + dense update + step.
    """
    return _in_turn(basis, readings=1.0)


def synchronous(basis: Basis, wire: Wire) -> StepCost:
    """Predicts a step with an exchange of rows (PICASSO §III-A); gradients are summed during the backward pass.

    path = lookups and row updates of all trainers over the cores that they have + exchanges + forward
    + max(backward + last ring, rings) + dense update + step. Each trainer reads all examples and keeps its share.

    Args:
        wire: the number formats of embeddings and gradients.
    """
    if basis.trainers == 1:
        return local(basis)
    sent = synchronous_traffic(basis.facts, basis.profile, wire)
    seconds, num_exchanges = synchronous_seconds(basis.facts, sent, basis.calibration.links)
    num_messages = float((basis.trainers - 1) * num_exchanges)
    exchanged = sum(each for kind, each in seconds.items() if kind != "dense")
    cost = _in_turn(basis, readings=basis.trainers, share=basis.share, hidden_s=seconds.get("dense", 0.0))
    links, others = basis.calibration.links, sent.total - sent.dense
    rings = ring_messages(sent.dense, basis.trainers)
    wire_s = basis.trainers * (
        links[ALL_TO_ALL].cpu_s(num_messages, others) + links[ALL_REDUCE].cpu_s(rings, sent.dense)
    )
    busy_s = others / links[ALL_TO_ALL].bytes_per_s + sent.dense / links[ALL_REDUCE].bytes_per_s
    return cost.adding(work_s={WIRE: wire_s}, path_s={WIRE: exchanged}, busy_s={TRAINER_LINK: busy_s})


def synchronous_traffic(facts: Facts, profile: AccessProfile, wire: Wire) -> Traffic:
    """Returns the bytes that a trainer sends per step; ``wire`` as in :func:`synchronous`."""
    return traffic.synchronous(
        facts.num_trainers,
        keys=profile.keys_of_share,
        numbers=profile.numbers_of_share,
        parameters=facts.model.num_parameters,
        wire=wire,
    )


def synchronous_seconds(facts: Facts, sent: Traffic, links: Links) -> tuple[Mapping[str, float], int]:
    """Returns the seconds of communication per step, by kind, and the number of row exchanges.

    The kind "dense" overlaps the backward pass.
    """
    arranged = arrange(facts)
    num_sets = len(arranged.interleaving) + bool(arranged.excluded)
    parts = micro_batches(facts)[0] if facts.schedule.micro_batches_from == "embedding" else 1
    seconds = costs.synchronous_step(sent, facts.num_trainers, links, num_sets=num_sets, micro_batches=parts)
    return seconds, 2 + num_sets * parts + num_sets


def substitution(
    basis: Basis, sent: Traffic, seconds: Mapping[str, float], *, split: bool, num_messages: float
) -> StepCost:
    """Predicts a step of ``substitution`` (DES, Algorithm 1).

    Each table is on one trainer, and partial results are aggregated.

    The path is the same as in :func:`synchronous`, with one difference: each trainer computes the upper network for all
    B examples, unless it is split. A trainer computes the operators only for its own features, a T-th of all. girih
    assumes that the operators' fraction of a pass equals their fraction of the parameters.
    """
    aggregated = sum(each for kind, each in seconds.items() if kind != "dense")
    model = basis.facts.model
    upper = 0.0 if split else model.upper_parameters / max(1, model.num_parameters)
    share = basis.share + upper * (basis.batch_size - basis.share)
    cost = _in_turn(basis, readings=basis.trainers, share=share, hidden_s=seconds.get("dense", 0.0))
    links = basis.calibration.links
    wire_s = basis.trainers * links[ALL_REDUCE].cpu_s(num_messages, sent.total)
    busy_s = sent.total / min(links[name].bytes_per_s for name in (ALL_REDUCE, ALL_GATHER))
    return cost.adding(work_s={WIRE: wire_s}, path_s={WIRE: aggregated}, busy_s={TRAINER_LINK: busy_s})


def reduced_s(basis: Basis, examples: float, rings_s: float) -> float:
    """Returns the seconds of a pass whose gradients are summed in buckets: forward + max(backward + the last ring,
    rings).

    The last bucket is full when the backward pass ends. It has the parameters of the layers next to the input. It is
    often the largest bucket.
    """
    pass_s, model = basis.pass_s(examples), basis.facts.model
    last = 1.0 if model.last_bucket is None else model.last_bucket / max(1, model.num_parameters)
    return pass_s * (1 - BACKWARD) + max(pass_s * BACKWARD + last * rings_s, rings_s)


def ring_messages(sent_bytes: float, trainers: int) -> float:
    """Returns the number of messages that one trainer sends for its gradients and the vote.

    A ring has 2(T − 1) messages. Each bucket has one ring.
    """
    if trainers == 1:
        return 0.0
    others = 2 * (trainers - 1)
    return float(others * (1 + math.ceil(sent_bytes * trainers / others / BUCKET_BYTES)))


def _in_turn(basis: Basis, *, readings: float, share: float | None = None, hidden_s: float = 0.0) -> StepCost:
    """Returns a step in which all trainers do the same work at once. They look up, then compute, then update."""
    examples = float(basis.batch_size) if share is None else share
    return basis.cost(
        readings=readings,
        examples=examples,
        passes_s=reduced_s(basis, examples, hidden_s),
        rows_at_once=basis.parallel,
        steps_s=basis.work.step_s * max(1.0, basis.trainers / basis.cores),
    )
