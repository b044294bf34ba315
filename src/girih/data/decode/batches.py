"""Cuts decoded rows into batches.

All batches of a window are filled at once, column by column, so that a column stays in cache while it is read.

Shapes: R rows, K batches of B examples each, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.batch import Batch, offsets_of
from girih.errors import DataError
from girih.kernels.buffers import Buffers
from girih.kernels.cpu import take as kernels
from girih.kernels.cpu.arrays import F32, I64, Bools, sealed


class BagColumn(NamedTuple):
    """One feature of R rows.

    ids is int64[M]. offsets is int64[R+1], or None if each row has one id. weights is float32[M], or None if all
    weights are 1.
    """

    ids: I64
    offsets: I64 | None = None
    weights: F32 | None = None

    def bounds(self) -> I64:
        """Returns offsets int64[R+1], and creates them if each row has one id."""
        return np.arange(len(self.ids) + 1) if self.offsets is None else self.offsets


@dataclass(slots=True)
class DecodedRows:
    """R decoded rows that are not yet cut into batches.

    Attributes:
        bags: the ids of each feature.
        numeric: float32[R, X]. labels: float32[R, T]. example_weights: float32[R], or None if all are 1.
        label_weights: float32[R, T], or None if all are 1.
        kept: a ``pyarrow.Table`` of R rows, or None.
        good: bool[R], True for usable rows. None if all rows are usable.
    """

    bags: list[BagColumn]
    numeric: F32
    labels: F32
    example_weights: F32 | None = None
    kept: Any = None
    good: Bools | None = None
    label_weights: F32 | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.numeric)

    @property
    def num_good(self) -> int:
        """Number of usable rows."""
        return self.num_rows if self.good is None else int(self.good.sum())


def good_rows(parts: Sequence[DecodedRows]) -> I64 | None:
    """Returns the numbers of the usable rows in the concatenated parts, or None if all rows are usable."""
    if all(part.good is None for part in parts):
        return None
    masks = [np.ones(part.num_rows, np.bool_) if part.good is None else part.good for part in parts]
    return np.flatnonzero(np.concatenate(masks))


def joined_bags(parts: Sequence[BagColumn], buffers: Buffers) -> BagColumn:
    """Concatenates the rows of one feature."""
    if len(parts) == 1:
        return parts[0]
    ids = joined_arrays([part.ids for part in parts], buffers)
    weights = filled_weights(parts)
    joined = None if weights is None else joined_arrays(weights, buffers)
    if all(part.offsets is None for part in parts):
        return BagColumn(ids, None, joined)
    lengths = np.concatenate([np.diff(part.bounds()) for part in parts])
    return BagColumn(ids, offsets_of(lengths), joined)


def filled_weights(parts: Sequence[BagColumn] | Sequence[Batch]) -> list[F32] | None:
    """Returns the weights of each part, with ones for a part without weights, or None if no part has weights."""
    if all(part.weights is None for part in parts):
        return None
    return [np.ones(len(part.ids), np.float32) if part.weights is None else part.weights for part in parts]


def joined_others(parts: Sequence[DecodedRows] | Sequence[Batch], buffers: Buffers) -> DecodedRows:
    """Concatenates everything except the ids."""
    weights = [part.example_weights for part in parts if part.example_weights is not None]
    of_labels = [part.label_weights for part in parts if part.label_weights is not None]
    tables = [part.kept for part in parts if part.kept is not None]
    if len(tables) > 1:
        tables = [pa.concat_tables(tables, promote_options="default").combine_chunks()]
    return DecodedRows(
        [],
        joined_arrays([part.numeric for part in parts], buffers),
        joined_arrays([part.labels for part in parts], buffers),
        joined_arrays(weights, buffers) if weights else None,
        tables[0] if tables else None,
        label_weights=joined_arrays(of_labels, buffers) if of_labels else None,
    )


def joined_arrays(parts: Sequence[NDArray[Any]], buffers: Buffers) -> NDArray[Any]:
    """Concatenates arrays: T[R, …]. Returns a single array unchanged."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return np.concatenate(parts, out=buffers.take(parts[0].dtype, *shape))


MAX_IDS = 2**31 - 1
GROUP_BYTES = 16 << 20  # ids that are allocated together: few enough that malloc reuses the memory
GROUP_ROWS = 1 << 12  # minimum for wide rows: one kernel call costs as much as some thousand ids


def cut(parts: Sequence[DecodedRows], order: I64, first: int, size: int, buffers: Buffers) -> list[Batch]:
    """Cuts rows into one batch of ``first`` rows, then batches of ``size``, then one batch of the remaining rows.

    Args:
        parts: rows with the same columns, to concatenate. Their ids are removed, to free the memory.
        order: int64[·], the order of the rows.

    Raises:
        DataError: more ids than a batch can hold.
    """
    last = first + (len(order) - first) // size * size
    columns = [[part.bags[f] for part in parts] for f in range(len(parts[0].bags))]
    for part in parts:
        part.bags = []
    for f, column in enumerate(columns):
        if any(bags.offsets is not None for bags in column):
            columns[f] = [joined_bags(column, buffers)]
    pieces = (order[None, :first], order[first:last].reshape(-1, size), order[None, last:])
    num_ids = sum(len(bags.ids) for column in columns for bags in column)
    ids_per_row = num_ids / sum(part.num_rows for part in parts)
    weighted = any(bags.weights is not None for column in columns for bags in column)
    groups = []
    for index in pieces:
        rows = max(GROUP_ROWS, int(GROUP_BYTES / (8 * ids_per_row + 1)))
        step = max(1, rows // max(1, index.shape[1]))
        for start in range(0, len(index) if index.size else 0, step):
            groups.append(_BatchRun(index[start : start + step], columns, weighted, buffers))
    for f in range(len(columns)):
        bags = joined_bags(columns[f], buffers)
        columns[f] = []
        for group in groups:
            group.fill(f, bags)
    others = joined_others(parts, buffers)
    return [batch for group in groups for batch in group.batches(others)]


def joined(parts: Sequence[Batch], buffers: Buffers) -> Batch:
    """Joins the examples of several batches into one batch.

    Raises:
        DataError: more ids than a batch can hold.
    """
    if len(parts) == 1:
        return parts[0]
    others = joined_others(parts, buffers)
    _check_ids(sum(len(part.ids) for part in parts), others.num_rows)
    lengths = [np.diff(part.offsets).reshape(-1, part.num_examples) for part in parts]
    offsets = offsets_of(np.concatenate(lengths, axis=1), np.int32)
    weights = filled_weights(parts)
    return Batch(
        ids=_by_feature([part.ids for part in parts], parts, buffers),
        offsets=offsets,
        weights=None if weights is None else _by_feature(weights, parts, buffers),
        numeric=others.numeric,
        labels=others.labels,
        example_weights=others.example_weights,
        label_weights=others.label_weights,
        kept=others.kept,
    )


def _by_feature(values: Sequence[NDArray[Any]], parts: Sequence[Batch], buffers: Buffers) -> NDArray[Any]:
    """Joins the per-id values of several batches, in the order of a single batch: by feature, then by part."""
    bounds = np.stack([part.offsets[:: part.num_examples] for part in parts]).astype(np.int64)
    counts = np.diff(bounds, axis=1)
    ends = np.cumsum(counts.T).reshape(-1, len(parts)).T
    out = buffers.take(values[0].dtype, int(counts.sum()))
    for own, bound, starts in zip(values, bounds, ends - counts, strict=True):
        kernels.copy_stretches(sealed(own), bound[:-1], bound[1:], np.ascontiguousarray(starts), out)
    return out


def _check_ids(num_ids: int, size: int) -> None:
    if num_ids > MAX_IDS:
        raise DataError(f"a batch of {size} rows has more than 2³¹ ids; lower batch_size, or set max_length")


class _BatchRun:
    """K batches of about :data:`GROUP_BYTES`, whose ids are in one array, batch after batch.

    Args:
        index: int64[K, B], the rows of each batch.
        weighted: True if any feature has weights.
    """

    def __init__(
        self,
        index: I64,
        columns: Sequence[Sequence[BagColumn]],
        weighted: bool,
        buffers: Buffers,
    ) -> None:
        self._buffers = buffers
        self._index = index
        num_batches, size = index.shape
        counts = np.full((len(columns), num_batches), size, dtype=np.int64)
        for f, column in enumerate(columns):
            if column[0].offsets is not None:
                kernels.count_values(sealed(column[0].offsets), index, counts[f])
        totals = counts.sum(axis=0)
        _check_ids(int(totals.max()), size)
        self._ends = np.cumsum(totals)
        self._firsts = np.cumsum(counts, axis=0) - counts  # start of each feature within its batch
        self._starts = self._firsts + (self._ends - totals)
        self._ids = buffers.take(np.int64, int(self._ends[-1]))
        self._weights = None
        if weighted:
            self._weights = buffers.take(np.float32, len(self._ids))
            self._weights[:] = 1.0
        self._has_bags = any(column[0].offsets is not None for column in columns)
        if self._has_bags:
            self._offsets = buffers.take(np.int32, num_batches, len(columns) * size + 1)
            self._offsets[:, 0] = 0
        else:  # the same offsets for all batches
            self._offsets = np.arange(len(columns) * size + 1, dtype=np.int32)

    def fill(self, f: int, bags: BagColumn) -> None:
        """Copies the ids and weights of feature ``f`` into each batch."""
        size = self._index.shape[1]
        if self._has_bags:
            column = f * size + 1
            if bags.offsets is None:
                ends = self._firsts[f][:, None] + np.arange(1, size + 1)
                self._offsets[:, column : column + size] = ends
            else:
                kernels.bag_ends(sealed(bags.offsets), self._index, self._firsts[f], column, self._offsets)
        for values, out in ((bags.ids, self._ids), (bags.weights, self._weights)):
            if values is None or out is None:
                continue
            if bags.offsets is None:
                kernels.take(sealed(values), self._index, self._starts[f], out)
            else:
                kernels.take_bags(sealed(values), sealed(bags.offsets), self._index, self._starts[f], out)

    def batches(self, others: DecodedRows) -> Iterator[Batch]:
        """Yields the batches, completed with numeric features, labels, weights and kept columns."""
        size = self._index.shape[1]
        rows = self._index.reshape(-1)
        numeric, labels = self._taken(others.numeric, rows), self._taken(others.labels, rows)
        weights = None if others.example_weights is None else others.example_weights[rows]
        of_labels = None if others.label_weights is None else self._taken(others.label_weights, rows)
        begin = 0
        for k, end in enumerate(self._ends):
            part = slice(k * size, (k + 1) * size)
            yield Batch(
                ids=self._ids[begin:end],
                offsets=self._offsets[k] if self._has_bags else self._offsets,
                weights=None if self._weights is None else self._weights[begin:end],
                numeric=numeric[part],
                labels=labels[part],
                example_weights=None if weights is None else weights[part],
                label_weights=None if of_labels is None else of_labels[part],
                kept=None if others.kept is None else others.kept.take(pa.array(self._index[k])),
            )
            begin = end

    def _taken(self, values: F32, rows: I64) -> F32:
        out = self._buffers.take(np.float32, len(rows), values.shape[1])
        kernels.take_rows(sealed(values), rows, out)
        return out
