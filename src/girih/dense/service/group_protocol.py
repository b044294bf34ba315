"""Requests of trainers to the group servers of their group: the frames of hierarchical training (HT §3.1.1).

    trainer ─FORWARD──►  server   input tensors of a part; answers its outputs
    trainer ─BACKWARD──► server   gradients of the outputs; answers those of the inputs, and keeps the parameters'
    trainer ─NORMS──►    server   norms of the parameters' gradients, where they are to be clipped
    trainer ─APPLY──►    server   moves the live parameters by what the net's batch left here; DISCARD drops it
    trainer ─STATE, RESTORE──►    parameters and optimizer state, by their names in the whole model
    trainer ─REST, PUT_REST──►    what a run needs beside them to go on as if it had not ended

A frame has a kind, integers and arrays; see :mod:`girih.comm.rpc`. Tensors are packed by :mod:`girih.dense.service.tensors`.
"""

from __future__ import annotations

from enum import IntEnum

MOST_ENTRIES = 100
"""A frame of STATE, RESTORE, REST or PUT_REST has at most this number."""
MOST_ENTRY_BYTES = 64 << 20
"""A frame has at most this number, unless a single tensor has more."""

RANDOM = "random"
"""The name of the entry of REST that is the state of the random generator, uint8[]."""


class GroupVerb(IntEnum):
    """Requests, with the integers and arrays of each:

    FORWARD: (net, batch, call, part, train); needs int8[inputs], packed inputs → (); has int8[outputs], packed outputs. ``part`` is
        the number of one among the server's, ``call`` counts the forward passes of the batch; ``needs`` and ``has`` say which
        tensors have gradients.
    BACKWARD: (net, batch, call); packed gradients of the outputs → (); text of a parameter whose gradient is not finite (null:
        all are), packed gradients of the inputs.
    NORMS: (net, batch) → (); text of names in the whole model, with the norm of each gradient.
    APPLY: (net, batch); text of the optimizer's options now, and of what gradients are multiplied by → (staleness,). DISCARD: (net, batch) → ().
    STATE: (first entry, with the optimizer's) → (next entry, entries); text, packed tensors. RESTORE: (first frame,); text, packed
        tensors → ().
    REST: (first entry,) → (next entry, entries); text, packed tensors: the state of the random generator, where parts draw from it, and what
        top-k has left out of the gradients that this trainer's nets got. PUT_REST: text, packed tensors → ().
    STATS: (with spans) → text of a snapshot, and of those of dense servers by title, from the first server.
    BEGIN: () → (): the averaging of groups begins with these parameters. MEET: () → (), once all groups have met: what is evaluated and
        answered to STATE is the model of all groups from here on, until the next meeting. LEAVE: () → (): this trainer makes no step
        before the next meeting; rounds of averaging do not wait for a group whose trainers all say so.
    """

    FORWARD = 1
    BACKWARD = 2
    APPLY = 3
    DISCARD = 4
    STATE = 5
    RESTORE = 6
    STATS = 7
    BEGIN = 8
    MEET = 9
    LEAVE = 10
    REST = 11
    PUT_REST = 12
    NORMS = 13
