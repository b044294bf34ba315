"""Turns rows into bags and sequences, and the gradients of these into gradients of keys.

Shapes: B examples, F features of the group, N ids in the batch, W columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers, Take
from girih.kernels.cpu import gradients as gradient_kernels
from girih.kernels.cpu import pool as pool_kernels
from girih.kernels.cpu.arrays import sealed
from girih.kernels.cpu.update import Terms
from girih.sparse.groups.pack import Group, GroupOutput
from girih.sparse.groups.shards import FEW_IDS, GroupKeys, ShardKeys, UniqueRows, copied, run_parts


@dataclass(frozen=True)
class Members:
    """Some features of an output: their indices, their places in the output, and their pooling modes."""

    features: NDArray[np.int64]
    places: NDArray[np.int64]
    modes: NDArray[np.int8]


@dataclass(frozen=True)
class WorkSlice:
    """One part of a group's keys: all keys of some tables, or of some adjacent shards. Parts do not overlap.

    Attributes:
        first, last: the range of the group's features that read these tables.
        shards: the number of the part and the number of parts, if parts have different shards. None for all shards.
        members: for each output, its features in the part.
    """

    first: int
    last: int
    shards: tuple[int, int] | None
    members: tuple[Members, ...]

    def key_ranges(self, shards: Sequence[ShardKeys]) -> list[tuple[int, int]]:
        """Returns, for each shard, the range of key numbers that belong to the part: begin and end."""
        ranges = []
        for number, shard in enumerate(shards):
            before, behind = 0, 0
            if self.shards is None or number * self.shards[1] // len(shards) == self.shards[0]:
                before = int(shard.ends[self.first - 1]) if self.first else 0
                behind = int(shard.ends[self.last - 1])
            ranges.append((shard.first + before, shard.first + behind))
        return ranges


def partition(group: Group, num_shards: int) -> list[WorkSlice]:
    """Divides a group into at most ``num_shards`` parts.

    Divides by tables, with features spread evenly, or by shards if there are too few tables.
    """
    num_features = len(group.features)
    changes = [f for f in range(1, num_features) if group.tables[f] != group.tables[f - 1]]
    if len(changes) + 1 < num_shards:
        return [_part(group, 0, num_features, (part, num_shards)) for part in range(num_shards)]
    wanted = [part * num_features / num_shards for part in range(1, num_shards)]
    cuts = {min(changes, key=lambda f, w=w: abs(f - w)) for w in wanted}  # type: ignore[misc]
    return [_part(group, first, last, None) for first, last in pairwise([0, *sorted(cuts), num_features])]


def _part(group: Group, first: int, last: int, shards: tuple[int, int] | None) -> WorkSlice:
    inside = set(group.features[first:last].tolist())
    members = []
    for output in group.outputs:
        places = [place for place, feature in enumerate(output.features) if int(feature) in inside]
        members.append(Members(output.features[places], np.array(places, np.int64), output.modes[places]))
    return WorkSlice(first, last, shards, tuple(members))


def passes(outputs: tuple[GroupOutput, ...]) -> list[tuple[int, ...]]:
    """Returns the outputs that each pass serves.

    One pass serves embeddings and first-order weights if both have the same features, since their columns are adjacent.
    Otherwise each output has its own pass.
    """
    pooled = [number for number, output in enumerate(outputs) if not output.whole]
    whole = [(number,) for number, output in enumerate(outputs) if output.whole]
    if len(pooled) == 2 and np.array_equal(outputs[pooled[0]].features, outputs[pooled[1]].features):
        return [tuple(pooled), *whole]
    return [*((number,) for number in pooled), *whole]


@dataclass(frozen=True)
class Stitching:
    """Describes the outputs of a group for ``pool.stitch``.

    Attributes:
        served: the outputs of each pass: see :func:`~girih.sparse.groups.bags.passes`.
        described: the arguments ``passes``, ``features`` and ``modes`` of ``pool.stitch``.
    """

    served: Sequence[tuple[int, ...]]
    described: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]

    @classmethod
    def of(cls, outputs: Sequence[GroupOutput], served: Sequence[tuple[int, ...]]) -> Stitching:
        """Makes the description of some outputs."""
        first = [outputs[numbers[0]] for numbers in served]
        ends = np.cumsum([len(output.features) for output in first])
        passes = [
            [
                end - len(output.features),
                end,
                output.first_column,
                output.segment.dim,
                sum(outputs[number].segment.dim for number in numbers[1:]),
                output.whole,
            ]
            for output, end, numbers in zip(first, ends.tolist(), served, strict=True)
        ]
        features = np.concatenate([output.features for output in first])
        modes = np.concatenate([output.modes for output in first])
        return cls(served, (np.array(passes, np.int64), features, modes))

    def targets(self, tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.int64]:
        """Returns int64[O, 2], the addresses of the tensors of each pass. The second is 0 if a pass has one tensor."""
        addresses = np.zeros((len(self.served), 2), np.int64)
        for row, numbers in zip(addresses, self.served, strict=True):
            for place, number in enumerate(numbers):
                row[place] = tensors[number].ctypes.data
        return addresses


Gradients = Sequence[NDArray[np.float32] | None]
"""The gradient of each output, float32[·, D], or None if the output took no part in the loss."""

LARGEST_SUM = 1e38
NO_WEIGHTS = sealed(np.empty(0, np.float32))
NO_TAIL = sealed(np.empty((0, 0), np.float32))


@dataclass(frozen=True)
class DirectTerms:
    """Gradients that are not summed per key yet.

    Attributes:
        gradient, tail: float32[B·F, D], float32[B·F, E], the gradients of the one or two outputs of a pass.
        terms_of: returns, for a shard's keys, the rows of the gradients that belong to each key.
    """

    gradient: NDArray[np.float32]
    tail: NDArray[np.float32]
    terms_of: Callable[[ShardKeys], Terms]


@dataclass(frozen=True)
class Pooling:
    """The tensors of all outputs of a batch. Micro-batches are filled in one after the other.

    Attributes:
        outputs: float32[B, F, D], or float32[L, D] for a whole output. Values that are not filled in are arbitrary.
        fill: fills in a range of examples. The rows of their keys must have arrived.
    """

    outputs: list[NDArray[np.float32]]
    fill: Callable[[slice], None]


class BagPooler:
    """Pools the rows of one group into bags, and scatters the gradients of bags to keys.

    Args:
        num_parts: the number of parts of the work. At most the number of shards with common key numbers.
        pool: runs the parts in parallel; None runs them in turn.
    """

    def __init__(self, group: Group, num_parts: int, pool: ThreadPoolExecutor | None) -> None:
        self.group = group
        self._num_parts = num_parts
        self._pool = pool
        self._buffers = Buffers()
        self._passes = passes(group.outputs)
        self._stitching = Stitching.of(group.outputs, self._passes)
        self._parts = partition(group, num_parts)
        served = group.outputs[self._passes[0][0]] if len(self._passes) == 1 else None
        self._one_pass = (
            served is not None and not served.whole and len(served.features) == len(group.features)
        )

    def pool(
        self, rows: UniqueRows, keys: GroupKeys, batch: Batch, take: Take | None = None
    ) -> list[NDArray[np.float32]]:
        """Returns the filled tensors of all outputs: float32[B, F, D], or float32[L, D] for a whole output.

        The arguments are the same as in :meth:`pooling`.
        """
        pooling = self.pooling(rows, keys, batch, take)
        pooling.fill(slice(0, batch.num_examples))
        return pooling.outputs

    def pooling(self, rows: UniqueRows, keys: GroupKeys, batch: Batch, take: Take | None = None) -> Pooling:
        """Returns empty tensors for all outputs, and the function that fills them in.

        Args:
            rows: the rows, by key number.
            take: allocates the tensors; None takes the pooler's own buffers.
        """
        outputs = []
        for output in self.group.outputs:
            outputs.append((take or self._buffers.take)(np.float32, *output.shape_in(batch)))
        return Pooling(outputs, partial(self._fill, rows, keys, batch, outputs))

    def _fill(
        self,
        rows: UniqueRows,
        keys: GroupKeys,
        batch: Batch,
        outputs: list[NDArray[np.float32]],
        examples: slice,
    ) -> None:
        """See :class:`Pooling`."""
        stitching = self._stitching
        size, num_examples = batch.num_examples, examples.stop - examples.start
        num_ids = len(keys.inverse) * num_examples // max(1, size)
        num_parts = self._num_parts if num_ids >= FEW_IDS else 1
        offsets, weights = sealed(batch.offsets), _weights_of(batch)
        targets, num_features = stitching.targets(outputs), len(stitching.described[1])

        def fill_part(part: int) -> None:
            begin = examples.start + part * num_examples // num_parts
            end = examples.start + (part + 1) * num_examples // num_parts
            pool_kernels.stitch(
                rows.addresses, keys.inverse, offsets, weights, size, *stitching.described, targets,
                np.empty(num_features, np.int64), begin, end,
            )  # fmt: skip

        run_parts(self._pool, num_parts, fill_part, num_ids)

    def terms(self, gradients: Gradients, keys: GroupKeys, batch: Batch) -> DirectTerms | None:
        """Returns gradients to sum per key during the row update, or None if :meth:`scatter` must sum them first.

        Summing during the update pays if the sums do not fit into the caches. It requires that one pass serves all
        outputs. :meth:`scatter` forms all sums that might overflow.
        """
        many = len(keys.shards) > self._num_parts  # each shard would search all ids for its terms
        if not self._one_pass or many or copied(keys.num_keys, self.group.spec.dim):
            return None
        taking_part = self._taking_part(gradients)
        if len(taking_part) > 1 or any(gradients[number] is None for number in self._passes[0]):
            return None
        ((_, gradient, tail),) = taking_part
        weight = 1.0 if batch.weights is None else float(np.abs(batch.weights).max(initial=0.0))

        def largest(part: int) -> int:
            first, last = (number * len(gradient) // self._num_parts for number in (part, part + 1))
            return int(gradient_kernels.largest(gradient[first:last], tail[first:last]))

        bits = max(run_parts(self._pool, self._num_parts, largest, len(keys.inverse)))
        most = float(np.uint32(bits).view(np.float32))
        if not most * weight * keys.num_ids < LARGEST_SUM:
            return None
        return DirectTerms(gradient, tail, partial(self._terms_of, keys, batch, tail))

    def _terms_of(self, keys: GroupKeys, batch: Batch, tail: NDArray[np.float32], part: ShardKeys) -> Terms:
        """Returns the terms of a shard's keys."""
        output, firsts, weights = (
            self.group.outputs[self._passes[0][0]],
            self._firsts(batch),
            _weights_of(batch),
        )
        take, num_terms = self._buffers.take, int(part.counts.sum())
        feature_firsts = firsts[output.features]
        scaled = len(weights) > 0 or bool(((feature_firsts < 0) & (output.modes != pool_kernels.SUM)).any())
        starts, order = take(np.int32, len(part.keys) + 1), take(np.int32, num_terms)
        factors = take(np.float32, num_terms if scaled else 0)
        gradient_kernels.order_terms(
            keys.inverse, sealed(batch.offsets), weights, batch.num_examples, output.features, feature_firsts, output.modes,
            part.first, part.counts, starts, order, factors,
        )  # fmt: skip
        return Terms(starts, order, factors, tail)

    def scatter(self, gradients: Gradients, keys: GroupKeys, batch: Batch) -> tuple[NDArray[np.float32], int]:
        """Sums the gradients of each key.

        Returns:
            float32[·, W], the gradient of each key, by key number; and a key with a gradient that is not finite, or -1.
        """
        firsts, offsets, weights = self._firsts(batch), sealed(batch.offsets), _weights_of(batch)
        totals = self._buffers.take(np.float32, keys.end, self.group.spec.dim)
        taking_part = self._taking_part(gradients)

        def scatter_part(number: int) -> int:
            part = self._parts[number]
            ranges = part.key_ranges(keys.shards)
            for first, last in ranges:
                totals[first:last] = 0
            # parts by tables: no key of another part can occur
            filled = [each for each in ranges if each[0] < each[1]] or [(0, 0)]
            first, last = (0, len(totals)) if part.shards is None else (filled[0][0], filled[-1][1])
            for n, gradient, tail in taking_part:
                output, mine = self.group.outputs[n], part.members[n]
                if output.whole and len(mine.features):
                    start = output.ids_in(batch).start
                    gradient_kernels.scatter_whole(
                        gradient, output.first_column, keys.inverse, start, first, last, totals
                    )
                elif len(mine.features):
                    gradient_kernels.scatter(
                        gradient, tail, output.first_column, keys.inverse, offsets, weights, batch.num_examples,
                        mine.features, firsts[mine.features], mine.places, mine.modes, len(output.features), first, last,
                        totals,
                    )  # fmt: skip
            nonfinite = -1
            for first, last in ranges:
                nonfinite = max(nonfinite, gradient_kernels.first_nonfinite(first, last, sealed(totals)))
            return nonfinite

        return totals, max(run_parts(self._pool, len(self._parts), scatter_part, len(keys.inverse)))

    def _taking_part(
        self, gradients: Gradients
    ) -> list[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
        """Returns, for each pass: an output, its gradient, and the gradient of the output with the next columns."""
        parts = []
        for number, *following in self._passes:
            gradient, tail = gradients[number], gradients[following[0]] if following else None
            if gradient is None and tail is not None:
                number, gradient, tail = following[0], tail, None
            if gradient is not None:
                parts.append((number, sealed(gradient), NO_TAIL if tail is None else sealed(tail)))
        return parts

    def _firsts(self, batch: Batch) -> NDArray[np.int64]:
        """Returns int64[·], by feature: the position of its first id if each bag has one unweighted id, else -1."""
        firsts = np.full(1 + int(self.group.features.max()), -1, np.int64)
        if batch.weights is None:
            pool_kernels.find_singles(sealed(batch.offsets), batch.num_examples, self.group.features, firsts)
        return firsts


def _weights_of(batch: Batch) -> NDArray[np.float32]:
    return NO_WEIGHTS if batch.weights is None else sealed(batch.weights)
