"""Requests among trainers, loaders, embedding workers and embedding servers: the frames of the sparse half.

A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`. G groups, W columns of a row, K keys, T tables.

    loader  ─STORE_IDS──►  worker                  ids; answers the number it keeps them under (Persia §4.1, step 1)
    trainer ─PULL──►  worker  ─LOOKUP──► server keys; answers rows; bags (steps 3 to 5)
    trainer ─PUSH──►  worker  ─UPDATE──► server gradients of bags; of rows (steps 6 and 7)
    trainer ─PEEK──►  worker  ─LOOKUP──► server ids; bags, for evaluation
    trainer ─DROP──►  worker  ─DROP──► server a batch that will not be pushed
    trainer ─BEGIN, NEXT, END──► loader       a pass over the data; a share of it without its ids
    trainer ─GO_ON, STORE_AGAIN──► loader     the same, where a loader or a worker came back
"""

from __future__ import annotations

from enum import IntEnum

NO_VERSION = -1
"""The version before a snapshot."""
NO_TURN = -1
"""The turn of a batch that was read ahead for nothing."""
TOOK_NO_PART = (0, 0)
"""Shape of the gradients of a group that took no part in the loss."""


KEYS_MISSING = 1
"""Answer to an UPDATE whose rows this life of the server has not read: it is to be sent again, with its keys."""


class Verb(IntEnum):
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
    GO_ON: (pass, trainer, share); text, to a loader that came back: the rest of the pass, from that share on, for this trainer.
    STORE_AGAIN: (pass, trainer, share); text (where its batch begins): the worker that kept its ids came back without them → (worker, sample).
    ANEW: trainers begin anew; what others began is dropped → (updates lost by this, or by an earlier one; the last step).
    STATS: (with spans) → text. SAVE: text (the checkpoint's address) → (). WRITE: (whether to write) → text (facts of parts). LOAD: text (address, parts) → ().
    KNOW: (version) → (whether all shards know what changed since then). SEGMENT: (number, the version it is to be applied to, or NO_VERSION for
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
    ANEW = 16
    GO_ON = 17
    STORE_AGAIN = 18
    KNOW = 19
    SEGMENT = 20
    SEND = 21
