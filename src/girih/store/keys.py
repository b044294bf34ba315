"""The two objects that verbs of a store take: keys, and an update of their rows.

Shapes: U unique keys, W columns of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from girih.kernels.cpu.update import Terms
from girih.store.memory.pushes import Push
from girih.store.spec import Floats, Ints, Longs

ONCE: Ints = np.zeros(0, np.int32)
"""Counts of keys that occur once each."""


class Keys(NamedTuple):
    """Keys of one group, each once.

    Attributes:
        ids, tables: int64[U], int32[U].
        counts: int32[U], how often each occurs in the batch; :data:`ONCE` if all occur once.
        rows: int32[U], hints from :meth:`Store.lookup` that save the search. Each is checked against its key.
    """

    ids: Longs
    tables: Ints
    counts: Ints = ONCE
    rows: Ints | None = None

    def cut(self, part: slice) -> Keys:
        """Some of the keys, without their counts and hints."""
        return Keys(self.ids[part], self.tables[part])


class RowUpdate(NamedTuple):
    """One optimizer step on the rows of keys.

    Attributes:
        grads: float32[U, W], those of equal keys summed, all finite; with ``terms``, the rows of a matrix that are summed.
        step: from 1.
        lr_scale: multiplies every learning rate.
        terms: the sums that the gradients are; a kernel reads the matrix unchecked.
        push: the name of the push, which may be sent again. A row that it moved it does not move again, even in a later process.
    """

    grads: Floats
    step: int
    lr_scale: float = 1.0
    terms: Terms | None = None
    push: Push | None = None
