"""Decoded rows, column by column.

Shapes: R rows, X numeric features, T labels, M values of one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from girih.data.batch import Batch
from girih.kernels.buffers import Buffers


class BagColumn(NamedTuple):
    """One feature of R rows.

    ids is int64[M]; offsets int64[R+1], or None where every row has one id; weights float32[M], or None
    where all are 1.
    """

    ids: NDArray[np.int64]
    offsets: NDArray[np.int64] | None = None
    weights: NDArray[np.float32] | None = None

    def bounds(self) -> NDArray[np.int64]:
        """Offsets int64[R+1], made up where every row has one id."""
        return np.arange(len(self.ids) + 1) if self.offsets is None else self.offsets


@dataclass(slots=True)
class DecodedRows:
    """R decoded rows, yet to be cut into batches.

    Attributes:
        bags: the ids of each feature.
        numeric: float32[R, X]. labels: float32[R, T]. example_weights: float32[R], or None where all are 1.
        label_weights: float32[R, T], or None where all are 1.
        kept: a ``pyarrow.Table`` of R rows, or None.
        good: bool[R], the rows that may be used, or None where all are.
    """

    bags: list[BagColumn]
    numeric: NDArray[np.float32]
    labels: NDArray[np.float32]
    example_weights: NDArray[np.float32] | None = None
    kept: Any = None
    good: NDArray[np.bool_] | None = None
    label_weights: NDArray[np.float32] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.numeric)

    @property
    def num_good(self) -> int:
        """Number of rows that may be used."""
        return self.num_rows if self.good is None else int(self.good.sum())


def good_rows(parts: Sequence[DecodedRows]) -> NDArray[np.int64] | None:
    """The numbers of the rows that may be used, of parts one below the other, or None where all are."""
    if all(part.good is None for part in parts):
        return None
    masks = [np.ones(part.num_rows, np.bool_) if part.good is None else part.good for part in parts]
    return np.flatnonzero(np.concatenate(masks))


def joined_bags(parts: Sequence[BagColumn], buffers: Buffers) -> BagColumn:
    """One feature of rows one below the other."""
    if len(parts) == 1:
        return parts[0]
    ids = joined_arrays([part.ids for part in parts], buffers)
    weights = filled_weights(parts)
    joined = None if weights is None else joined_arrays(weights, buffers)
    if all(part.offsets is None for part in parts):
        return BagColumn(ids, None, joined)
    lengths = np.concatenate([np.diff(part.bounds()) for part in parts])
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return BagColumn(ids, offsets, joined)


def filled_weights(parts: Sequence[BagColumn] | Sequence[Batch]) -> list[NDArray[np.float32]] | None:
    """The weights of each part, ones where it has none; None where no part has any."""
    if all(part.weights is None for part in parts):
        return None
    return [np.ones(len(part.ids), np.float32) if part.weights is None else part.weights for part in parts]


def joined_others(parts: Sequence[DecodedRows] | Sequence[Batch], buffers: Buffers) -> DecodedRows:
    """All but the ids of rows one below the other."""
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
    """Arrays one below the other: T[R, …]; one alone as it is."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return np.concatenate(parts, out=buffers.take(parts[0].dtype, *shape))
