"""Bytes that one trainer sends in one training step, by strategy, averaged over N equal trainers.

Payload alone: what a network adds in headers, the few bytes by which trainers agree on a step's loss, and the moments of global
batch norm are left out.

B: examples of the step's batch over all trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

Wire = Mapping[str, object]
"""The way numbers travel, as ``Plan.wire``: the formats of "embeddings" and "gradients", and what else a strategy has."""
FLOAT32: Wire = {"embeddings": "float32", "gradients": "float32"}
KEY_BYTES, COUNT_BYTES, FLOAT_BYTES, EXAMPLE_BYTES = 8, 4, 4, 2
FLOPS_PER_WEIGHT = 6
"""Floating-point operations of a weight and an example: two products backward for one forward, each of two operations."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a trainer sends, by kind, as in ``summary.json``."""

    ids: float = 0.0
    embeddings: float = 0.0
    gradients: float = 0.0
    partials: float = 0.0
    dense: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.ids + self.embeddings + self.gradients + self.partials + self.dense


def ring_bytes(size_bytes: float, num_trainers: int) -> float:
    """AllReduce: every part goes around once to be summed and once to be told (DES §3.2.3, T_ring)."""
    return 2 * (num_trainers - 1) / num_trainers * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSizes:
    """Sizes of a step of ``substitution``.

    Attributes:
        summed: columns of the operators that add up. concatenated: those of each operator that needs vectors whole.
        shared_parameters: numbers of the dense half that all trainers have whole.
        split: whether each trainer computes the upper network for its share only.
        partial_bytes: of one number of a partial result: 4, or 2 as bfloat16.
    """

    summed: int = 0
    concatenated: tuple[int, ...] = ()
    shared_parameters: int = 0
    split: bool = False
    partial_bytes: int = FLOAT_BYTES


def substitution(batch_size: int, num_trainers: int, sizes: PartialSizes) -> Traffic:
    """Partial results forward; if split, their gradients back as well, and those of the dense half."""
    others, column_bytes = (num_trainers - 1) / num_trainers, batch_size * sizes.partial_bytes
    of_sums = ring_bytes(sizes.summed * column_bytes, num_trainers)
    of_vectors = others * sum(sizes.concatenated) * column_bytes * (2 / num_trainers if sizes.split else 1)
    dense = ring_bytes(sizes.shared_parameters * FLOAT_BYTES, num_trainers) if sizes.split else 0.0
    return Traffic(partials=of_sums + of_vectors, dense=dense)


def synchronous(
    num_trainers: int, *, keys: float, numbers: float, parameters: int, wire: Wire = FLOAT32
) -> Traffic:
    """Keys to the trainers that own them, rows back, their gradients there again; all dense gradients summed.

    Args:
        keys: unique keys of one trainer's share of the batch; numbers: of all their rows together.
        parameters: numbers of the whole dense half.
        wire: the formats of rows and their gradients; a row of float16 has a scale.
    """
    others = (num_trainers - 1) / num_trainers
    rows = others * numbers * FLOAT_BYTES
    half = others * (numbers * FLOAT_BYTES / 2 + keys * FLOAT_BYTES)
    return Traffic(
        ids=others * keys * (KEY_BYTES + COUNT_BYTES),
        embeddings=half if wire["embeddings"] == "float16" else rows,
        gradients=half if wire["gradients"] == "float16" else rows,
        dense=ring_bytes(parameters * FLOAT_BYTES, num_trainers),
    )


class ShareCounts(TypedDict):
    """Counts of one trainer's share of a step.

    Attributes:
        ids, keys: of the share, and the unique ones. numbers: of all their rows. vectors: pooled ones. outputs: their numbers.
        parameters: numbers of the whole dense half.
    """

    ids: float
    keys: float
    numbers: float
    vectors: float
    outputs: float
    parameters: int


def remote(
    num_trainers: int,
    *,
    in_step: bool,
    wire: Wire = FLOAT32,
    **counts: Unpack[ShareCounts],
) -> Traffic:
    """Tables in embedding servers: ids to a worker, keys to the servers, rows and bags back, gradients there again.

    Bytes that all processes send for one trainer's share of a step.

    Args:
        in_step: dense gradients are summed over the trainers; else they go to a dense server, and parameters back.
        wire: the formats of what goes between worker and trainer; a vector of float16 has a scale. With ``compress_ids`` each unique
            id goes once to the worker, with the examples that it is in.
    """
    ids, keys, parameter_bytes = counts["ids"], counts["keys"], counts["parameters"] * FLOAT_BYTES
    rows, whole = counts["numbers"] * FLOAT_BYTES, counts["outputs"] * FLOAT_BYTES
    half = whole / 2 + counts["vectors"] * FLOAT_BYTES
    sent_ids = keys * KEY_BYTES + ids * EXAMPLE_BYTES if wire.get("compress_ids") else ids * KEY_BYTES
    dense = ring_bytes(parameter_bytes, num_trainers) if in_step else 2.0 * parameter_bytes
    return Traffic(
        ids=sent_ids + keys * (KEY_BYTES + COUNT_BYTES),
        embeddings=rows + (half if wire["embeddings"] == "float16" else whole),
        gradients=rows + (half if wire["gradients"] == "float16" else whole),
        dense=dense if num_trainers > 1 else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Speeds:
    """Nominal speeds of a machine, from which plans decide.

    They are constants and not measurements, so that a config has the same plan on a busy machine as on an idle one. Their ratios matter,
    and those differ less between machines than the speeds do.

    Attributes:
        bytes_per_s: sent to other trainers, over a link of 10 Gbit/s; 0 bounds nothing.
        flops_per_s: of the matrix products of one core.
        memory_bytes_per_s: read and written by one core; 0 bounds nothing.
        latency_s: of a small message to another trainer.
        pass_s: of a forward and backward pass without examples.
    """

    bytes_per_s: float = 1.25e9
    flops_per_s: float = 2e10
    memory_bytes_per_s: float = 1e10
    latency_s: float = 1e-4
    pass_s: float = 1e-3

    def example_s(self, weights: int) -> float:
        """Seconds that an example adds to a forward and backward pass of so many weights."""
        return FLOPS_PER_WEIGHT * weights / self.flops_per_s


NOMINAL = Speeds()


def split_pays(
    batch_size: int, num_trainers: int, *, shared_parameters: int, weights: int, speeds: Speeds
) -> bool:
    """Returns whether each trainer should compute the upper network for its share only.

    Partial results cost the same either way. Splitting saves the dense computation of the others' shares and costs the
    AllReduce of shared parameters' gradients.

    Args:
        shared_parameters: of the upper network. weights: those of them that are in products.
    """
    saved_s = (1 - 1 / num_trainers) * batch_size * speeds.example_s(weights)
    added_s = ring_bytes(shared_parameters * FLOAT_BYTES, num_trainers) / speeds.bytes_per_s
    return saved_s > added_s + 2 * (num_trainers - 1) * speeds.latency_s
