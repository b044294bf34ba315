"""The messages between trainers, loaders, embedding workers and embedding servers.

A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`. G groups, W columns of a row, K keys, T tables.

    loader  ─STORE_IDS──►  worker                  ids; the reply is the number of the sample (Persia §4.1, step 1)
    trainer ─PULL──►  worker  ─LOOKUP──► server    keys; the replies are rows, then bags (steps 3 to 5)
    trainer ─PUSH──►  worker  ─UPDATE──► server    gradients of bags; gradients of rows (steps 6 and 7)
    trainer ─PEEK──►  worker  ─LOOKUP──► server    ids; the reply is bags, for evaluation
    trainer ─DROP──►  worker  ─DROP──► server      a batch that will not be pushed
    trainer ─BEGIN, NEXT, END──► loader            a pass over the data; a share of a batch without its ids
    trainer ─RESUME, STORE_AGAIN──► loader         the same, after the restart of a loader or a worker
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
"""Stands for the base version of a snapshot, which has none."""
NO_TURN = -1
"""The turn of a batch that was pulled ahead and never trained on."""
TOOK_NO_PART = (0, 0)
"""The shape of the gradients of a group that took no part in the loss."""


KEYS_MISSING = 1
"""The reply to an UPDATE if this incarnation of the server has not read its rows. The worker resends it with keys."""


class SparseVerb(IntEnum):
    """The kinds of requests.

    The lists below give a request's integers; then its arrays; and after → the integers and arrays of the reply.

    To embedding workers:

    - STORE_IDS: (pass, trainer, share, examples); packed ids → (sample,). Keeps the ids of a share.
    - DROP_IDS: (pass, trainer, taken) → (). Forgets the samples of the pass from share ``taken`` on. Nobody will pull
      them.
    - PULL: (sample, trainer, number, step, answered) → (staleness,); the outputs of all groups, then bounds of
      sequences. The trainer's batches before number ``answered`` are applied or dropped.
    - PEEK: (examples,); packed ids → the same as for PULL.
    - PUSH: (sample, trainer, number, turn, step, lr_scale); gradients of the outputs → ().
    - DROP: (sample, trainer, number, turn) → (). The worker sends it on to its servers. The turn is NO_TURN if the
      batch was never trained on.

    To embedding servers:

    - LOOKUP: (sample, trainer, number, step, answered, train); of each group: lengths int64[T], keys, counts →
      (staleness,); rows. In evaluations the reply also has uint8[K] for each group: 1 for keys without a row.
    - UPDATE: (sample, trainer, number, turn, step, lr_scale); of each group: gradients of rows, or none →
      (), or (KEYS_MISSING,). A restarted server also needs of each group: lengths, keys.
    - RESET: () → (lost updates of all resets, last step). Trainers restart, and the server drops the batches that the
      earlier trainers began.
    - SAVE: text (address of the checkpoint) → ().
    - WRITE: (whether to write) → text (facts of parts).
    - LOAD: text (address, parts) → ().
    - HAS_CHANGES: (version) → (whether all shards know their changes since this version).
    - SEGMENT: (number, base version or NO_VERSION for all rows); text (address of the segment) → ().
    - SEND: (whether all rows, whether to write) → text (facts of parts).

    To loaders:

    - BEGIN: (pass, trainer); text (epoch, position) → (). Begins a pass.
    - NEXT: (pass, trainer, number of the share) → (1, worker, sample, examples of the whole batch); numeric, labels,
      weight, text of the position after the share, then optional arrays: weights of examples, weights of labels with
      their scale. After the last share → (0,); text of skipped rows.
    - END: (pass, trainer, taken) → (). The trainer pulls the first ``taken`` shares of the pass and no more.
    - RESUME: (pass, trainer, share); text (epoch, position) → (). A restarted loader serves the rest of the pass, from
      this share on, to this trainer.
    - STORE_AGAIN: (pass, trainer, share); text (start of the share's batch) → (worker, sample). The worker that kept
      the ids restarted without them.

    To all of them:

    - STATS: (with spans) → text of a snapshot of the statistics.
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
    """Encodes ids, embeddings and gradients for messages between trainers, loaders and embedding workers.

    Attributes:
        pooled: bool[F] as a tuple: True for features whose ids may change their order within a bag.
        compress_ids: sends each unique id once, with the examples that contain it. Lossless.
        float16_embeddings, float16_gradients: sends vectors as float16 with a scale for each vector. Loses some
            precision.
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
        """Packs a batch for :meth:`unpack_ids`: ids, bounds of bags, and weights if the batch has weights."""
        if self.compress_ids and batch.num_examples:
            pooled = np.array(self.pooled)
            return row_codecs.pack(batch.ids, batch.offsets, batch.num_examples, pooled, batch.weights)
        plain: Arrays = (np.ascontiguousarray(batch.ids), np.ascontiguousarray(batch.offsets))
        return plain if batch.weights is None else (*plain, np.ascontiguousarray(batch.weights))

    def unpack_ids(self, arrays: Arrays, num_examples: int) -> Batch:
        """Returns a batch with only the ids, copied from a frame's arrays.

        Raises:
            WireError: the arrays are not a batch of ``num_examples`` examples with these features.
        """
        weights: NDArray[Any] | None
        if self.compress_ids and num_examples:
            ids, offsets, weights = row_codecs.unpack(arrays)
        else:
            if len(arrays) not in (2, 3) or any(array.ndim != 1 for array in arrays):
                shapes = [list(array.shape) for array in arrays]
                raise WireError(f"ids of shapes {shapes}; expected ids, bounds, and optional weights")
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
        """Returns float32[·, D] for each output, or None if the output took no part in the loss."""
        rows = _unpacked(arrays) if self.float16_gradients else arrays
        return [None if row.shape == NO_ROWS.shape else row.reshape(-1, row.shape[-1]) for row in rows]


def _packed(rows: Sequence[NDArray[np.float32]]) -> Arrays:
    return tuple(part for row in rows for part in (row_codecs.shrink(row) if row.ndim > 1 else (row, row)))


def _unpacked(arrays: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [row_codecs.grow(halves, scales) if halves.ndim > 1 else halves for halves, scales in pairs]


class DoneBatches:
    """The completed batches of one trainer: all batches before a number, and some later batches.

    Attributes:
        all_before: all batches before this number are completed.
    """

    def __init__(self) -> None:
        self.all_before, self._behind = 0, set[int]()

    @property
    def count(self) -> int:
        """The number of completed batches."""
        return self.all_before + len(self._behind)

    def add(self, number: int) -> None:
        """Marks one batch as completed. A repeated call changes nothing."""
        if number >= self.all_before:
            self._behind.add(number)
            self._advance()

    def reach(self, number: int) -> None:
        """Marks all batches before a number as completed."""
        if number > self.all_before:
            self.all_before = number
            self._behind = {other for other in self._behind if other >= number}
            self._advance()

    def _advance(self) -> None:
        while self.all_before in self._behind:
            self._behind.remove(self.all_before)
            self.all_before += 1


def push_of(num_senders: int, trainer: int, turn: int) -> Push:
    """Returns the name of a turn's push."""
    num_lanes = LANES // num_senders
    sender = trainer if num_senders > 1 else 0
    return Push(sender * num_lanes + turn % num_lanes, turn + 1)


def why_resent_pushes_clash(num_senders: int, staleness: int) -> str:
    """Returns why a server cannot recognize resent pushes, and the option that would allow it. Returns "" if it can."""
    most = LANES // num_senders - 1
    if most < 0:
        return (
            f"servers recognize resent pushes of at most {LANES} trainers that do not train in step, not"
            f" {num_senders}; strategy 'hybrid' has no such limit"
        )
    if staleness > most:
        return f"servers recognize resent pushes up to strategy.staleness = {most}, not {staleness}"
    return ""
