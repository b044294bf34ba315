"""Decoded rows, column by column.

Shapes: R rows, B rows taken, X numeric features, T labels, M values of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.kernels.buffers import Buffers
from girih.kernels.cpu import take as kernels


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
        first, whole = np.zeros(1, dtype=np.int64), index[None]
        offsets = np.zeros(len(index) + 1, dtype=np.int64)
        kernels.bag_ends(sealed(self.offsets), whole, first, offsets[None, 1:])
        ids = np.empty(offsets[-1], dtype=np.int64)
        kernels.take_bags(sealed(self.ids), sealed(self.offsets), whole, first, ids)
        weights = None
        if self.weights is not None:
            weights = np.empty(offsets[-1], dtype=np.float32)
            kernels.take_bags(sealed(self.weights), sealed(self.offsets), whole, first, weights)
        return Bags(ids, offsets, weights)

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def bounds(self) -> NDArray[np.int64]:
        """Offsets int64[R+1], made up where every row has one id."""
        return np.arange(len(self.ids) + 1) if self.offsets is None else self.offsets


@dataclass(slots=True)
class DecodedRows:
    """R decoded rows, yet to be cut into batches.

    Attributes:
        bags: the ids of each feature.
        numeric: float32[R, X]. labels: float32[R, T]. example_weights: float32[R], or None where all are 1.
        kept: a ``pyarrow.Table`` of R rows, or None.
    """

    num_rows: int
    bags: list[Bags]
    numeric: NDArray[np.float32]
    labels: NDArray[np.float32]
    example_weights: NDArray[np.float32] | None = None
    kept: Any = None

    def take(self, index: NDArray[np.int64]) -> DecodedRows:
        """Some of the rows, in the order of ``index``, int64[B]."""
        return DecodedRows(
            len(index),
            [bags.take(index) for bags in self.bags],
            self.numeric[index],
            self.labels[index],
            None if self.example_weights is None else self.example_weights[index],
            None if self.kept is None else self.kept.take(pa.array(index)),
        )


def joined_bags(parts: Sequence[Bags], buffers: Buffers) -> Bags:
    """One feature of rows one below the other."""
    if len(parts) == 1:
        return parts[0]
    ids = _joined([part.ids for part in parts], buffers)
    weights = None
    if any(part.weights is not None for part in parts):
        ones = [
            np.ones(len(part.ids), np.float32) if part.weights is None else part.weights for part in parts
        ]
        weights = _joined(ones, buffers)
    if all(part.offsets is None for part in parts):
        return Bags(ids, None, weights)
    lengths = np.concatenate([np.diff(part.bounds()) for part in parts])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Bags(ids, offsets, weights)


def joined_others(parts: Sequence[DecodedRows], buffers: Buffers) -> DecodedRows:
    """All but the ids of rows one below the other."""
    if len(parts) == 1:
        return replace(parts[0], bags=[])
    weights = [part.example_weights for part in parts if part.example_weights is not None]
    tables = [part.kept for part in parts if part.kept is not None]
    return DecodedRows(
        sum(part.num_rows for part in parts),
        [],
        _joined([part.numeric for part in parts], buffers),
        _joined([part.labels for part in parts], buffers),
        np.concatenate(weights) if weights else None,
        pa.concat_tables(tables, promote_options="default").combine_chunks() if tables else None,
    )


def take_rows(values: NDArray[np.float32], index: NDArray[np.int64], buffers: Buffers) -> NDArray[np.float32]:
    """Some rows of a matrix: float32[R, X], int64[B] to float32[B, X]."""
    out = buffers.take(np.float32, len(index), values.shape[1])
    kernels.take_rows(sealed(values), index, out)
    return out


def sealed(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, as columns in Arrow's memory are: so kernels are compiled for one kind only."""
    view = array.view()
    view.flags.writeable = False
    return view


def _joined(parts: Sequence[NDArray[Any]], buffers: Buffers) -> NDArray[Any]:
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return np.concatenate(parts, out=buffers.take(parts[0].dtype, *shape))
