"""Requests among trainers, loaders, embedding workers and embedding servers: the frames of the sparse half.

A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`.

    loader  ─STORE_IDS──► worker                   ids → number of the kept sample (Persia §4.1, step 1)
    trainer ─PULL──► worker ─LOOKUP──► server      keys → rows → bags (steps 3 to 5)
    trainer ─PUSH──► worker ─UPDATE──► server      gradients of bags → gradients of rows (steps 6 and 7)
    trainer ─PEEK──► worker ─LOOKUP──► server      ids → rows → bags, for evaluation
    trainer ─DROP──► worker ─DROP──► server        a batch that will not be pushed
    trainer ─BEGIN, NEXT, END──► loader            a pass over the data; its shares, without their ids
    trainer ─RESUME, STORE_AGAIN──► loader         the same after the restart of a loader or a worker

Shapes: G groups, W columns of a row, K keys, T tables, S shards of a server.
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
"""Says in a SEGMENT that there is no version before: the segment has all rows."""
NO_TURN = -1
"""The turn of a batch that was read ahead and never trained on."""
TOOK_NO_PART = (0, 0)
"""Shape of the gradients of a group that took no part in the loss."""


KEYS_MISSING = 1
"""The reply to an UPDATE if this incarnation of the server has not read its rows. Resend it with its keys."""


class SparseVerb(IntEnum):
    """The kinds of requests. Each line has the integers and arrays of a request, then those of its reply.

    STORE_IDS: (pass, trainer, share, examples); packed ids → (sample,).
    DROP_IDS: (pass, trainer, taken) → (). Forgets samples from share ``taken`` on, which no trainer will pull.
    PULL: (sample, trainer, number, step, answered) → (staleness,); the outputs of all groups, then bounds of sequences.
        The trainer's batches before number ``answered`` are applied or dropped.
    PEEK: (examples,); packed ids → the same as PULL.
    PUSH: (sample, trainer, number, turn, step, lr_scale); gradients of the outputs → ().
    LOOKUP: (sample, trainer, number, step, answered, train); per group lengths int64[S · T], keys, counts → (staleness,);
        rows of each group. In evaluations the reply also says per group whether each key has no row, uint8[K]. The keys
        are unique, and sorted by shard and table.
    UPDATE: (sample, trainer, number, turn, step, lr_scale); per group the gradients of rows, or none → (), or
        (KEYS_MISSING,). A restarted server then also gets lengths and keys of each group.
    DROP: (sample, trainer, number, turn) → (). A worker sends it on to its servers. ``turn`` is NO_TURN if the batch
        was never trained on.
    BEGIN: (pass, trainer); text of epoch and position → (). Starts a pass of a loader.
    NEXT: (pass, trainer, number of the share) → (1, worker, sample, examples of the whole batch); numeric, labels,
        weight, text of the position after it, weights of examples if any, weights of labels with their scale if any.
        After the last share: (0,); text of skipped rows.
    END: (pass, trainer, taken) → (). The trainer has pulled or will pull this number of shares, and no more.
    RESUME: (pass, trainer, share); text of epoch and position → (). A restarted loader gives this trainer the pass from
        that share on.
    STORE_AGAIN: (pass, trainer, share); text of epoch and position of its batch → (worker, sample). The worker that
        kept the ids of the share restarted without them.
    RESET: () → (updates lost by this reset and earlier resets, last step). Trainers restart, and the server drops the
        batches that earlier trainers began.
    STATS: (with spans,) → (); text.
    SAVE: text of the checkpoint's address → (). WRITE: (whether to write,) → (); text of the facts of parts.
    LOAD: text of the address and the parts → ().
    HAS_CHANGES: (version,) → (whether all shards know the changes since then,).
    SEGMENT: (number, the version to which it is applied, or NO_VERSION for all rows); text of its address → ().
    SEND: (whether all rows, whether to write) → (); text of the facts of parts.
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
    """The encoding of messages among trainers, loaders and embedding workers.

    Attributes:
        pooled: bool[F] as a tuple: True if the order of a feature's ids within a bag does not matter.
        compress_ids: True sends unique ids, and for each the examples that contain it, without loss.
        float16_embeddings, float16_gradients: True sends vectors as float16 with one scale each, with a small loss.
    """

    pooled: tuple[bool, ...]
    compress_ids: bool = False
    float16_embeddings: bool = False
    float16_gradients: bool = False

    @classmethod
    def of(cls, schema: Schema, needs: Needs, **options: bool) -> BatchCodec:
        """Returns the codec for a model's features."""
        return cls(tuple(SEQUENCE not in needs.get(f.name, ()) for f in schema.sparse), **options)

    def pack_ids(self, batch: Batch) -> Arrays:
        """Packs a batch for :meth:`unpack_ids`: ids, bounds of bags, and weights if there are any."""
        if self.compress_ids and batch.num_examples:
            pooled = np.array(self.pooled)
            return row_codecs.pack(batch.ids, batch.offsets, batch.num_examples, pooled, batch.weights)
        plain: Arrays = (np.ascontiguousarray(batch.ids), np.ascontiguousarray(batch.offsets))
        return plain if batch.weights is None else (*plain, np.ascontiguousarray(batch.weights))

    def unpack_ids(self, arrays: Arrays, num_examples: int) -> Batch:
        """Returns a batch of ids alone, copied from a frame's arrays.

        Raises:
            WireError: the arrays are not a batch of ``num_examples`` examples with these features.
        """
        weights: NDArray[Any] | None
        if self.compress_ids and num_examples:
            ids, offsets, weights = row_codecs.unpack(arrays)
        else:
            if len(arrays) not in (2, 3) or any(array.ndim != 1 for array in arrays):
                shapes = [list(array.shape) for array in arrays]
                raise WireError(
                    f"ids of shapes {shapes}; expected ids, bounds and optional weights, all of one dimension"
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
        """Returns float32[..., D] for each output."""
        return _unpacked(arrays) if self.float16_embeddings else list(arrays)

    def pack_gradients(self, gradients: Sequence[NDArray[np.float32] | None]) -> Arrays:
        """Packs gradients for :meth:`unpack_gradients`."""
        rows = [NO_ROWS if gradient is None else gradient for gradient in gradients]
        return _packed(rows) if self.float16_gradients else tuple(rows)

    def unpack_gradients(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32] | None]:
        """Returns float32[·, D] for each output, or None if it took no part in the loss."""
        rows = _unpacked(arrays) if self.float16_gradients else arrays
        return [None if row.shape == NO_ROWS.shape else row.reshape(-1, row.shape[-1]) for row in rows]


def _packed(rows: Sequence[NDArray[np.float32]]) -> Arrays:
    return tuple(part for row in rows for part in (row_codecs.shrink(row) if row.ndim > 1 else (row, row)))


def _unpacked(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [row_codecs.grow(halves, scales) if halves.ndim > 1 else halves for halves, scales in pairs]


class DoneBatches:
    """The batches of one trainer that are done: all batches before a number, and some later batches.

    Attributes:
        all_before: this number.
    """

    def __init__(self) -> None:
        self.all_before, self._behind = 0, set[int]()

    @property
    def count(self) -> int:
        """The number of batches that are done."""
        return self.all_before + len(self._behind)

    def add(self, number: int) -> None:
        """Records a batch as done. A second call for the same batch has no effect."""
        if number >= self.all_before:
            self._behind.add(number)
            self._advance()

    def reach(self, number: int) -> None:
        """Records all batches before a number as done."""
        if number > self.all_before:
            self.all_before = number
            self._behind = {other for other in self._behind if other >= number}
            self._advance()

    def _advance(self) -> None:
        while self.all_before in self._behind:
            self._behind.remove(self.all_before)
            self.all_before += 1


def push_of(num_senders: int, trainer: int, turn: int) -> Push:
    """Returns the name of a turn's push: its lane, and its number in the lane."""
    num_lanes = LANES // num_senders
    sender = trainer if num_senders > 1 else 0
    return Push(sender * num_lanes + turn % num_lanes, turn + 1)


def why_resent_pushes_clash(num_senders: int, staleness: int) -> str:
    """Returns why servers could not recognize resent pushes, or "" if they can.

    The text names the option that would change this.
    """
    most = LANES // num_senders - 1
    if most < 0:
        return (
            f"resent pushes are recognized for at most {LANES} trainers that do not wait for each other, not"
            f" {num_senders}; use fewer trainers, or strategy 'hybrid'"
        )
    if staleness > most:
        return f"resent pushes are recognized up to strategy.staleness = {most}, not {staleness}"
    return ""
