"""Ids and rows as the arrays of a frame, and back; compressed where that is asked for (Persia §4.2.3).

Shapes: B examples, F features, N ids, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs import index_codec, value_codec
from girih.data.batch import Batch
from girih.errors import WireError
from girih.models.needs import SEQUENCE, Needs
from girih.schema import Schema

Arrays = tuple[NDArray[Any], ...]
NO_ROWS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class BatchCodec:
    """Encoding of what trainers, loaders and embedding workers write to each other.

    Attributes:
        pooled: bool[F] as a tuple, features whose order within a bag does not matter.
        compress_ids: ids as unique ids with the examples they are in, without loss.
        float16_embeddings, float16_gradients: vectors as float16 with a scale each, with a small loss.
    """

    pooled: tuple[bool, ...]
    compress_ids: bool = False
    float16_embeddings: bool = False
    float16_gradients: bool = False

    @classmethod
    def of(cls, schema: Schema, needs: Needs, **options: bool) -> BatchCodec:
        """Makes the codec for a model's features."""
        return cls(tuple(SEQUENCE not in needs.get(f.name, ()) for f in schema.sparse), **options)

    def pack_ids(self, batch: Batch) -> Arrays:
        """Packs a batch for :meth:`unpack_ids`: ids, bounds of bags, and weights where there are any."""
        if self.compress_ids and batch.num_examples:
            pooled = np.array(self.pooled)
            return index_codec.pack(batch.ids, batch.offsets, batch.num_examples, pooled, batch.weights)
        plain: Arrays = (np.ascontiguousarray(batch.ids), np.ascontiguousarray(batch.offsets))
        return plain if batch.weights is None else (*plain, np.ascontiguousarray(batch.weights))

    def unpack_ids(self, arrays: Arrays, num_examples: int) -> Batch:
        """A batch of ids alone, copied out of a frame's arrays.

        Raises:
            WireError: what came is no batch of so many examples and these features.
        """
        weights: NDArray[Any] | None
        if self.compress_ids and num_examples:
            ids, offsets, weights = index_codec.unpack(arrays)
        else:
            if len(arrays) not in (2, 3) or any(array.ndim != 1 for array in arrays):
                shapes = [list(array.shape) for array in arrays]
                raise WireError(
                    f"ids of shapes {shapes}; expected ids, bounds, and weights where there are any"
                )
            ids, offsets, *rest = (np.array(array) for array in arrays)
            weights = rest[0] if rest else None
        if (
            ids.dtype != np.int64
            or offsets.dtype != np.int32
            or len(offsets) != num_examples * len(self.pooled) + 1
            or offsets[0] != 0
            or offsets[-1] != len(ids)
            or (offsets[1:] < offsets[:-1]).any()  # differences could overflow
            or (weights is not None and (weights.dtype != np.float32 or len(weights) != len(ids)))
        ):
            raise WireError(
                f"ids {ids.dtype}[{len(ids)}] with bounds {offsets.dtype}[{len(offsets)}]; expected"
                f" {len(self.pooled)} features of {num_examples} examples"
            )
        nothing = np.empty((num_examples, 0), np.float32)
        return Batch(ids=ids, offsets=offsets, numeric=nothing, labels=nothing, weights=weights)

    def pack_embeddings(self, rows: Sequence[NDArray[np.float32]]) -> Arrays:
        """Packs embeddings for :meth:`unpack_embeddings`."""
        return _packed(rows) if self.float16_embeddings else tuple(rows)

    def unpack_embeddings(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """float32[..., D] each."""
        return _unpacked(arrays) if self.float16_embeddings else list(arrays)

    def pack_gradients(self, gradients: Sequence[NDArray[np.float32] | None]) -> Arrays:
        """Packs gradients for :meth:`unpack_gradients`."""
        rows = [NO_ROWS if gradient is None else gradient for gradient in gradients]
        return _packed(rows) if self.float16_gradients else tuple(rows)

    def unpack_gradients(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32] | None]:
        """float32[·, D] each, or None where an output took no part in the loss."""
        rows = _unpacked(arrays) if self.float16_gradients else arrays
        return [None if row.shape == NO_ROWS.shape else row.reshape(-1, row.shape[-1]) for row in rows]


def _packed(rows: Sequence[NDArray[np.float32]]) -> Arrays:
    return tuple(part for row in rows for part in (value_codec.shrink(row) if row.ndim > 1 else (row, row)))


def _unpacked(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [value_codec.grow(halves, scales) if halves.ndim > 1 else halves for halves, scales in pairs]
