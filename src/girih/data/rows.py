"""Decoded rows, column by column, and the batches that are gathered from them.

Shapes: R rows, B examples of a batch, F features, M values of one feature, N ids of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.errors import DataError
from girih.kernels.cpu import jagged

MAX_IDS = 2**31 - 1


class Bags(NamedTuple):
    """One feature of R rows.

    ids is int64[M]; offsets int64[R+1], or None where every row has one id; weights float32[M], or None
    where all are 1.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None

    def take(self, index: NDArray[np.int64]) -> Bags:
        """The bags of some rows."""
        if self.offsets is None:
            return Bags(self.ids[index], None, None if self.weights is None else self.weights[index])
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        jagged.bag_ends(self.offsets, index, 0, offsets[1:])
        ids = np.empty(offsets[-1], dtype=np.int64)
        jagged.gather_bags(_sealed(self.ids), _sealed(self.offsets), index, ids)
        weights = None
        if self.weights is not None:
            weights = np.empty(offsets[-1], dtype=np.float32)
            jagged.gather_bags(_sealed(self.weights), _sealed(self.offsets), index, weights)
        return Bags(ids, offsets, weights)

    def bounds(self) -> NDArray[np.int64]:
        """Offsets int64[R+1], made up where every row has one id."""
        return np.arange(len(self.ids) + 1) if self.offsets is None else self.offsets


@dataclass(frozen=True, slots=True)
class Rows:
    """R decoded rows, yet to be cut into batches; fields as in :class:`~girih.data.batch.Batch`."""

    num_rows: int
    bags: tuple[Bags, ...]
    numeric: NDArray[np.float32]
    labels: NDArray[np.float32]
    example_weights: NDArray[np.float32] | None = None
    kept: Any = None

    def take(self, index: NDArray[np.int64]) -> Rows:
        """Some of the rows, in the order of ``index``, int64[B]."""
        return Rows(
            len(index),
            tuple(bags.take(index) for bags in self.bags),
            self.numeric[index],
            self.labels[index],
            None if self.example_weights is None else self.example_weights[index],
            None if self.kept is None else self.kept.take(pa.array(index)),
        )

    def batch(self, index: NDArray[np.int64]) -> Batch:
        """The rows ``index``, int64[B], as a batch.

        Raises:
            DataError: more ids than a batch can hold.
        """
        num_examples, num_features = len(index), len(self.bags)
        offsets = np.zeros(num_features * num_examples + 1, dtype=np.int32)
        starts = self._lay_out(index, offsets)
        ids = np.empty(starts[-1], dtype=np.int64)
        weighted = any(bags.weights is not None for bags in self.bags)
        weights = np.ones(starts[-1], dtype=np.float32) if weighted else None
        for bags, start, end in zip(self.bags, starts, starts[1:], strict=False):
            _gather(bags.ids, bags.offsets, index, ids[start:end])
            if weights is not None and bags.weights is not None:
                _gather(bags.weights, bags.offsets, index, weights[start:end])
        return Batch(
            ids=ids,
            offsets=offsets,
            weights=weights,
            numeric=_gather_rows(self.numeric, index),
            labels=_gather_rows(self.labels, index),
            example_weights=None if self.example_weights is None else self.example_weights[index],
            kept=None if self.kept is None else self.kept.take(pa.array(index)),
        )

    def _lay_out(self, index: NDArray[np.int64], offsets: NDArray[np.int32]) -> list[int]:
        """Writes the bounds of all bags; returns where each feature's ids start, and their number."""
        size = len(index)
        starts = [0]
        for number, bags in enumerate(self.bags):
            first = starts[-1]
            count = size if bags.offsets is None else int(jagged.count_bags(_sealed(bags.offsets), index))
            if first + count > MAX_IDS:
                raise DataError(
                    f"a batch of {size} rows has more than 2³¹ ids; lower batch_size, or set max_length"
                )
            ends = offsets[number * size + 1 : (number + 1) * size + 1]
            if bags.offsets is None:
                ends[:] = np.arange(first + 1, first + size + 1, dtype=np.int32)
            else:
                jagged.bag_ends(_sealed(bags.offsets), index, first, ends)
            starts.append(first + count)
        return starts


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Rows one below the other; the parts have the same columns."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.example_weights for part in parts if part.example_weights is not None]
    return Rows(
        sum(part.num_rows for part in parts),
        tuple(_concatenate_bags([part.bags[f] for part in parts]) for f in range(len(parts[0].bags))),
        np.concatenate([part.numeric for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate(weights) if weights else None,
        None
        if parts[0].kept is None
        else pa.concat_tables([part.kept for part in parts], promote_options="default").combine_chunks(),
    )


def _concatenate_bags(parts: list[Bags]) -> Bags:
    ids = np.concatenate([part.ids for part in parts])
    weights = None
    if any(part.weights is not None for part in parts):
        ones = [
            np.ones(len(part.ids), np.float32) if part.weights is None else part.weights for part in parts
        ]
        weights = np.concatenate(ones)
    if all(part.offsets is None for part in parts):
        return Bags(ids, None, weights)
    lengths = np.concatenate([np.diff(part.bounds()) for part in parts])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Bags(ids, offsets, weights)


def _gather(
    values: NDArray[Any], offsets: NDArray[np.int64] | None, index: NDArray[np.int64], out: NDArray[Any]
) -> None:
    if offsets is None:
        jagged.gather(_sealed(values), index, out)
    else:
        jagged.gather_bags(_sealed(values), _sealed(offsets), index, out)


def _gather_rows(values: NDArray[np.float32], index: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.empty((len(index), values.shape[1]), dtype=np.float32)
    jagged.gather_rows(_sealed(values), index, out)
    return out


def _sealed(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, as columns in Arrow's memory are: so kernels are compiled for one kind only."""
    view = array.view()
    view.flags.writeable = False
    return view
