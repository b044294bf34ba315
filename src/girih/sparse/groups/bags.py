"""The examples' side of a group: rows become bags and sequences, and their gradients become gradients of keys.

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
    """Some features of an output: which, where they stand in it, and how they are pooled."""

    features: NDArray[np.int64]
    places: NDArray[np.int64]
    modes: NDArray[np.int8]


@dataclass(frozen=True)
class WorkSlice:
    """Keys that no other part has: all those of some tables, or all those of one shard.

    Attributes:
        first, last: the features whose tables they are, among the group's.
        shard: the one shard, or None for all.
        members: of each output.
    """

    first: int
    last: int
    shard: int | None
    members: tuple[Members, ...]

    def key_ranges(self, shards: Sequence[ShardKeys]) -> list[tuple[int, int]]:
        """For each shard: numbers of the first of its keys that are the part's, and of the first behind them."""
        ranges = []
        for number, shard in enumerate(shards):
            before, behind = 0, 0
            if self.shard in (None, number):
                before = int(shard.ends[self.first - 1]) if self.first else 0
                behind = int(shard.ends[self.last - 1])
            ranges.append((shard.first + before, shard.first + behind))
        return ranges


def partition(group: Group, num_shards: int) -> list[WorkSlice]:
    """At most so many parts: by tables, features spread evenly, where there are tables enough; else by shards."""
    num_features = len(group.features)
    changes = [f for f in range(1, num_features) if group.tables[f] != group.tables[f - 1]]
    if len(changes) + 1 < num_shards:
        return [_part(group, 0, num_features, shard) for shard in range(num_shards)]
    wanted = [part * num_features / num_shards for part in range(1, num_shards)]
    cuts = {min(changes, key=lambda f, w=w: abs(f - w)) for w in wanted}  # type: ignore[misc]
    return [_part(group, first, last, None) for first, last in pairwise([0, *sorted(cuts), num_features])]


def _part(group: Group, first: int, last: int, shard: int | None) -> WorkSlice:
    inside = set(group.features[first:last].tolist())
    members = []
    for output in group.outputs:
        places = [place for place, feature in enumerate(output.features) if int(feature) in inside]
        members.append(Members(output.features[places], np.array(places, np.int64), output.modes[places]))
    return WorkSlice(first, last, shard, tuple(members))


def passes(outputs: tuple[GroupOutput, ...]) -> list[tuple[int, ...]]:
    """Which outputs one pass serves: embeddings and first-order weights, columns side by side, of the same features;
    else one."""
    pooled = [number for number, output in enumerate(outputs) if not output.whole]
    whole = [(number,) for number, output in enumerate(outputs) if output.whole]
    if len(pooled) == 2 and np.array_equal(outputs[pooled[0]].features, outputs[pooled[1]].features):
        return [tuple(pooled), *whole]
    return [*((number,) for number in pooled), *whole]


@dataclass(frozen=True)
class Stitching:
    """The outputs of a group, described for ``pool.stitch``.

    Attributes:
        served: the outputs of each pass: see :func:`~girih.sparse.groups.bags.passes`.
        described: its arguments ``passes``, ``features`` and ``modes``.
    """

    served: Sequence[tuple[int, ...]]
    described: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]

    @classmethod
    def of(cls, outputs: Sequence[GroupOutput], served: Sequence[tuple[int, ...]]) -> Stitching:
        """Those of some outputs."""
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
        """int64[O, 2], the addresses of the tensors of each pass; 0 where it has one alone."""
        addresses = np.zeros((len(self.served), 2), np.int64)
        for row, numbers in zip(addresses, self.served, strict=True):
            for place, number in enumerate(numbers):
                row[place] = tensors[number].ctypes.data
        return addresses


Gradients = Sequence[NDArray[np.float32] | None]
"""The gradient of each output, float32[·, D], or None where it took no part in the loss."""

LARGEST_SUM = 1e38
NO_WEIGHTS = sealed(np.empty(0, np.float32))
NO_TAIL = sealed(np.empty((0, 0), np.float32))


@dataclass(frozen=True)
class DirectTerms:
    """Gradients that are still to be summed.

    Attributes:
        gradient, tail: float32[B·F, D], float32[B·F, E], of the one or two outputs that one pass serves.
        terms_of: for a shard's keys, which rows are theirs.
    """

    gradient: NDArray[np.float32]
    tail: NDArray[np.float32]
    terms_of: Callable[[ShardKeys], Terms]


@dataclass(frozen=True)
class Pooling:
    """The tensors of all outputs of a batch, which rows become, micro-batch by micro-batch.

    Attributes:
        outputs: float32[B, F, D], or float32[L, D] where one is whole; any numbers where nothing was filled in.
        fill: fills in what is some examples'; the rows of their keys must be there.
    """

    outputs: list[NDArray[np.float32]]
    fill: Callable[[slice], None]


class BagPooler:
    """Pools rows, and scatters gradients.

    Args:
        num_parts: shards whose keys are numbered together; the work is split into as many parts.
        pool: runs the parts side by side; None runs them in turn.
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
        """The tensors of all outputs: float32[B, F, D], or float32[L, D] where one is whole; see :meth:`pooling`."""
        pooling = self.pooling(rows, keys, batch, take)
        pooling.fill(slice(0, batch.num_examples))
        return pooling.outputs

    def pooling(self, rows: UniqueRows, keys: GroupKeys, batch: Batch, take: Take | None = None) -> Pooling:
        """Tensors of all outputs that are still to be filled.

        Args:
            rows: of the key of each number.
            take: gives the memory for the tensors; its own where None.
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
        """Gradients of outputs of which those of keys are summed while rows are moved, where that pays; else None.

        It does where sums would leave the caches before rows are moved by them, and where one pass serves all outputs. Sums of
        gradients as large as might overflow are formed first, by :meth:`scatter`.
        """
        if not self._one_pass or copied(keys.num_keys, self.group.spec.dim):
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
        """The terms of a shard's keys."""
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
            float32[·, W], the gradient of the key of each number; and a key whose own is not finite, or -1.
        """
        firsts, offsets, weights = self._firsts(batch), sealed(batch.offsets), _weights_of(batch)
        totals = self._buffers.take(np.float32, keys.end, self.group.spec.dim)
        taking_part = self._taking_part(gradients)

        def scatter_part(number: int) -> int:
            part = self._parts[number]
            ranges = part.key_ranges(keys.shards)
            for first, last in ranges:
                totals[first:last] = 0
            # by tables, no other key can come up
            first, last = (0, len(totals)) if part.shard is None else ranges[part.shard]
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
                nonfinite = max(nonfinite, gradient_kernels.first_nonfinite(first, last, totals))
            return nonfinite

        return totals, max(run_parts(self._pool, len(self._parts), scatter_part, len(keys.inverse)))

    def _taking_part(
        self, gradients: Gradients
    ) -> list[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
        """For each pass: an output, its gradient, and that of the output whose columns follow."""
        parts = []
        for number, *following in self._passes:
            gradient, tail = gradients[number], gradients[following[0]] if following else None
            if gradient is None and tail is not None:
                number, gradient, tail = following[0], tail, None
            if gradient is not None:
                parts.append((number, sealed(gradient), NO_TAIL if tail is None else sealed(tail)))
        return parts

    def _firsts(self, batch: Batch) -> NDArray[np.int64]:
        """int64[·], by feature: its first id where each of its bags holds one, without a weight; else -1."""
        firsts = np.full(1 + int(self.group.features.max()), -1, np.int64)
        if batch.weights is None:
            pool_kernels.find_singles(sealed(batch.offsets), batch.num_examples, self.group.features, firsts)
        return firsts


def _weights_of(batch: Batch) -> NDArray[np.float32]:
    return NO_WEIGHTS if batch.weights is None else sealed(batch.weights)
