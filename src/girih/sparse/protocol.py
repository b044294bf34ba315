"""Requests among trainers, loaders, embedding workers and embedding servers: the frames of the sparse half.

A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`. G groups, W columns of a row, K keys, T tables.

    loader  ─STORE_IDS──►  worker                  ids; answers the number it keeps them under (Persia §4.1, step 1)
    trainer ─PULL──►  worker  ─LOOKUP──► server keys; answers rows; bags (steps 3 to 5)
    trainer ─PUSH──►  worker  ─UPDATE──► server gradients of bags; of rows (steps 6 and 7)
    trainer ─PEEK──►  worker  ─LOOKUP──► server ids; bags, for evaluation
    trainer ─DROP──►  worker  ─DROP──► server a batch that will not be pushed
    trainer ─BEGIN, NEXT, END──► loader       a pass over the data; a share of it without its ids
    trainer ─RESUME, STORE_AGAIN──► loader    the same, where a loader or a worker came back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from girih.comm.codecs import rows as row_codecs
from girih.data.batch import Batch
from girih.errors import WireError
from girih.models.needs import SEQUENCE, Needs
from girih.schema import Schema
from girih.store import Push
from girih.store.memory.pushes import LANES

NO_VERSION = -1
"""The version before a snapshot."""
NO_TURN = -1
"""The turn of a batch that was read ahead for nothing."""
TOOK_NO_PART = (0, 0)
"""Shape of the gradients of a group that took no part in the loss."""


KEYS_MISSING = 1
"""Answer to an UPDATE whose rows this life of the server has not read: it is to be sent again, with its keys."""


class SparseVerb(IntEnum):
    """Requests, with the integers and arrays of each:

    STORE_IDS: (pass, trainer, share, examples); packed ids → (sample,). DROP_IDS: (pass, trainer, taken): samples of the pass from
        that share on, for nobody pulls them.
    PULL: (sample, trainer, number, step, answered: the trainer's batches before this number are applied or dropped) → (staleness,); the outputs of all groups, then bounds of sequences.
    PEEK: (examples); packed ids → as PULL. PUSH: (sample, trainer, number, turn, step, lr_scale); gradients of the outputs → ().
    LOOKUP: (sample, trainer, number, step, answered, train); of each group: lengths int64[T], keys, counts → (staleness,); rows;
        in evaluations also whether each key of each group has no row, uint8[K].
    UPDATE: (sample, trainer, number, turn, step, lr_scale); of each group: gradients of rows, or none; then, to a server that came
        back, of each group: lengths, keys → (), or (KEYS_MISSING,).
    DROP: to a worker, and on to its servers: (sample, trainer, number, turn); NO_TURN for a batch that was never
        trained on.
    To loaders, BEGIN: (pass, trainer); text. NEXT: (pass, trainer, which share) → (1, worker, sample, examples of the whole batch); numeric,
    labels, weight, text of the position after it, weights of examples if any, weights of labels with their scale
        if any; or (0,); text of skipped rows.
    END: (pass, trainer, taken): so many shares are pulled, or will be, and no more.
    RESUME: (pass, trainer, share); text, to a loader that came back: the rest of the pass, from that share on, for this trainer.
    STORE_AGAIN: (pass, trainer, share); text (where its batch begins): the worker that kept its ids came back without them → (worker, sample).
    RESET: trainers restart; the server drops batches that earlier ones began → (updates lost by this, or by an earlier one; the last step).
    STATS: (with spans) → text. SAVE: text (the checkpoint's address) → (). WRITE: (whether to write) → text (facts of parts). LOAD: text (address, parts) → ().
    HAS_CHANGES: (version) → (whether all shards know what changed since then). SEGMENT: (number, the version it is to be applied to, or NO_VERSION for
        all rows); text (the segment's address) → (). SEND: (whether all rows, whether to write) → text (facts of parts).
    """

    STORE_IDS = 1
    DROP_IDS = 2
    PULL = 3
    PEEK = 4
    PUSH = 5
    LOOKUP = 6
    UPDATE = 7
    DROP = 8
    STATS = 9
    SAVE = 10
    WRITE = 11
    LOAD = 12
    BEGIN = 13
    NEXT = 14
    END = 15
    RESET = 16
    RESUME = 17
    STORE_AGAIN = 18
    HAS_CHANGES = 19
    SEGMENT = 20
    SEND = 21


Arrays: TypeAlias = tuple[NDArray[Any], ...]
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
            return row_codecs.pack(batch.ids, batch.offsets, batch.num_examples, pooled, batch.weights)
        plain: Arrays = (np.ascontiguousarray(batch.ids), np.ascontiguousarray(batch.offsets))
        return plain if batch.weights is None else (*plain, np.ascontiguousarray(batch.weights))

    def unpack_ids(self, arrays: Arrays, num_examples: int) -> Batch:
        """A batch of ids alone, copied out of a frame's arrays.

        Raises:
            WireError: what came is no batch of so many examples and these features.
        """
        weights: NDArray[Any] | None
        if self.compress_ids and num_examples:
            ids, offsets, weights = row_codecs.unpack(arrays)
        else:
            if len(arrays) not in (2, 3) or any(array.ndim != 1 for array in arrays):
                shapes = [list(array.shape) for array in arrays]
                raise WireError(
                    f"ids of shapes {shapes}; expected ids, bounds, and weights where there are any"
                )
            ids, offsets, *weights_or_none = (np.array(array) for array in arrays)
            weights = weights_or_none[0] if weights_or_none else None
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
        no_columns = np.empty((num_examples, 0), np.float32)
        return Batch(ids=ids, offsets=offsets, numeric=no_columns, labels=no_columns, weights=weights)

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
    return tuple(part for row in rows for part in (row_codecs.shrink(row) if row.ndim > 1 else (row, row)))


def _unpacked(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [row_codecs.grow(halves, scales) if halves.ndim > 1 else halves for halves, scales in pairs]


class DoneBatches:
    """The batches of one trainer that are done: all before a number, and some behind it.

    Attributes:
        all_before: that number.
    """

    def __init__(self) -> None:
        self.all_before, self._behind = 0, set[int]()

    @property
    def count(self) -> int:
        """The number of those that are done."""
        return self.all_before + len(self._behind)

    def add(self, number: int) -> None:
        """Notes one as done; once more is no more."""
        if number >= self.all_before:
            self._behind.add(number)
            self._advance()

    def reach(self, number: int) -> None:
        """Notes all before a number as done."""
        if number > self.all_before:
            self.all_before = number
            self._behind = {other for other in self._behind if other >= number}
            self._advance()

    def _advance(self) -> None:
        while self.all_before in self._behind:
            self._behind.remove(self.all_before)
            self.all_before += 1


def push_of(num_senders: int, trainer: int, turn: int) -> Push:
    """The name of a turn's push."""
    num_lanes = LANES // num_senders
    sender = trainer if num_senders > 1 else 0
    return Push(sender * num_lanes + turn % num_lanes, turn + 1)


def why_resent_pushes_clash(num_senders: int, staleness: int) -> str:
    """Why resent pushes could not be recognized, and which option would change that; "" if they can."""
    most = LANES // num_senders - 1
    if most < 0:
        return (
            f"pushes that come again are told apart for {LANES} trainers at most where each goes on its own, not"
            f" {num_senders}; strategy 'hybrid' knows no such bound"
        )
    if staleness > most:
        return f"pushes that come again are told apart up to strategy.staleness = {most}, not {staleness}"
    return ""
