"""Bytes that one trainer sends in one training step, by strategy. They are averages over N equal trainers.

Only the payload counts. Network headers, the few bytes for agreement on a step's loss, and the moments of global batch
norm do not count.

B: examples of the step's batch over all trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

Wire = Mapping[str, object]
"""Encodings on the wire, as in ``Plan.wire``: the formats of "embeddings" and "gradients", and options of the strategy.
"""
FLOAT32: Wire = {"embeddings": "float32", "gradients": "float32"}
KEY_BYTES, COUNT_BYTES, FLOAT_BYTES, EXAMPLE_BYTES = 8, 4, 4, 2
FLOPS_PER_WEIGHT = 6
"""Floating-point operations per weight and example. There are three products, one forward and two backward, of two
operations each.
"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a trainer sends, by kind, the same as in ``summary.json``."""

    ids: float = 0.0
    embeddings: float = 0.0
    gradients: float = 0.0
    partials: float = 0.0
    dense: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.ids + self.embeddings + self.gradients + self.partials + self.dense


def ring_bytes(size_bytes: float, num_trainers: int) -> float:
    """Returns the bytes of an AllReduce (DES §3.2.3, T_ring).

    Every part goes around once for the sum, and once for the result.
    """
    return 2 * (num_trainers - 1) / num_trainers * size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSizes:
    """Sizes of a step of ``substitution``.

    Attributes:
        summed: columns of the operators whose partial results are added up.
        concatenated: columns of each operator whose partial results are concatenated.
        shared_parameters: number of dense parameters that all trainers have.
        split: True if each trainer computes the upper network only for its share.
        partial_bytes: bytes per number of a partial result: 4, or 2 as bfloat16.
    """

    summed: int = 0
    concatenated: tuple[int, ...] = ()
    shared_parameters: int = 0
    split: bool = False
    partial_bytes: int = FLOAT_BYTES


def substitution(batch_size: int, num_trainers: int, sizes: PartialSizes) -> Traffic:
    """Returns the traffic of ``substitution``: partial results and, if split, their gradients and dense gradients."""
    others, column_bytes = (num_trainers - 1) / num_trainers, batch_size * sizes.partial_bytes
    of_sums = ring_bytes(sizes.summed * column_bytes, num_trainers)
    of_vectors = others * sum(sizes.concatenated) * column_bytes * (2 / num_trainers if sizes.split else 1)
    dense = ring_bytes(sizes.shared_parameters * FLOAT_BYTES, num_trainers) if sizes.split else 0.0
    return Traffic(partials=of_sums + of_vectors, dense=dense)


def synchronous(
    num_trainers: int, *, keys: float, numbers: float, parameters: int, wire: Wire = FLOAT32
) -> Traffic:
    """Returns the traffic of ``synchronous``: keys to their owners, rows back, row gradients to owners, and dense
    gradients.

    Args:
        keys: unique keys of one trainer's share of the batch.
        numbers: numbers in all rows of these keys.
        parameters: number of parameters of the whole dense half.
        wire: the formats of rows and their gradients. A float16 row also has a scale.
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
        ids, keys: number of ids, and of unique keys.
        numbers: numbers in all rows of these keys.
        vectors, outputs: number of pooled vectors, and of numbers in them.
        parameters: number of parameters of the whole dense half.
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
    """Returns the traffic with embedding servers, in bytes that all processes send for one trainer's share of a step.

    Ids go to a worker, and keys go to servers. Rows and bags come back. Gradients go in the opposite direction.

    Args:
        in_step: True if dense gradients are summed over the trainers. Otherwise they go to a dense server, and
            parameters come back.
        wire: the formats between worker and trainer. A float16 vector also has a scale. With ``compress_ids``, each
            unique id goes to the worker once, with the examples that contain it.
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

    They are constants, not measurements, so that a config has the same plan on a busy machine and on an idle one. Only
    their ratios matter, and ratios differ less between machines.

    Attributes:
        bytes_per_s: bytes sent to other trainers, over a link of 10 Gbit/s. 0 means no limit.
        flops_per_s: operations of matrix products on one core.
        memory_bytes_per_s: bytes that one core reads and writes. 0 means no limit.
        latency_s: time of a small message to another trainer.
        pass_s: the fixed time of a forward and backward pass.
    """

    bytes_per_s: float = 1.25e9
    flops_per_s: float = 2e10
    memory_bytes_per_s: float = 1e10
    latency_s: float = 1e-4
    pass_s: float = 1e-3

    def example_s(self, weights: int) -> float:
        """Returns seconds per example in a forward and backward pass of a number of weights."""
        return FLOPS_PER_WEIGHT * weights / self.flops_per_s


NOMINAL = Speeds()


def split_pays(
    batch_size: int, num_trainers: int, *, shared_parameters: int, weights: int, speeds: Speeds
) -> bool:
    """Returns whether each trainer should compute the upper network only for its share.

    Partial results cost the same in both cases. Splitting saves the dense computation for the other trainers' shares.
    It adds an AllReduce of the shared parameters' gradients.

    Args:
        shared_parameters: parameters of the upper network. weights: the part of them in matrix products.
    """
    saved_s = (1 - 1 / num_trainers) * batch_size * speeds.example_s(weights)
    added_s = ring_bytes(shared_parameters * FLOAT_BYTES, num_trainers) / speeds.bytes_per_s
    return saved_s > added_s + 2 * (num_trainers - 1) * speeds.latency_s
