"""What the store's tests have in common: one group of tables, and verbs without ceremony."""

import numpy as np

from girih import optim
from girih.store import GroupSpec, Segment, TableSpec
from girih.tables import Normal
from girih.testing.stores import columns_of as contents

__all__ = ["contents", "group", "keys_of", "look", "peek"]


def group(tables=("t",), dim=4, optimizer=None, dtype="float32", seed=1, **rules):
    """A group of tables of one segment; ``rules`` are those of every table."""
    return GroupSpec(
        name="group",
        tables=tuple(TableSpec(name, (Normal(std=1.0),), **rules) for name in tables),
        segments=(Segment("embedding", dim, optimizer or optim.SGD(lr=0.5)),),
        dtype=dtype,
        seed=seed,
    )


def keys_of(*ids, table=0):
    """(int64[U], int32[U])."""
    return np.array(ids, np.int64), np.full(len(ids), table, np.int32)


def look(store, ids, tables, step, counts=None):
    """A training read; returns rows and values."""
    out = np.full((len(ids), store.spec.dim), np.nan, np.float32)
    counts = None if counts is None else np.asarray(counts, np.int32)
    return store.lookup(ids, tables, counts, step, out), out


def peek(store, ids, tables):
    """The values of keys."""
    out = np.full((len(ids), store.spec.dim), np.nan, np.float32)
    store.peek(ids, tables, out)
    return out
