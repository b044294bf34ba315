"""The two arguments of a store's verbs: keys, and an update of their rows.

Shapes: U unique keys, W columns of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from girih.kernels.cpu.update import Terms
from girih.store.memory.pushes import Push
from girih.store.spec import Floats, Ints, Longs

ONCE: Ints = np.zeros(0, np.int32)
"""The counts of keys that all occur once."""


class Keys(NamedTuple):
    """Unique keys of one group.

    Attributes:
        ids, tables: int64[U], int32[U].
        counts: int32[U], the number of times that each key occurs in the batch, or :data:`ONCE` if all occur once.
        rows: int32[U], hints from :meth:`Store.lookup` that save the search. Kernels check each hint.
    """

    ids: Longs
    tables: Ints
    counts: Ints = ONCE
    rows: Ints | None = None

    def cut(self, part: slice) -> Keys:
        """Returns a slice of the keys, without their counts and hints."""
        return Keys(self.ids[part], self.tables[part])


class RowUpdate(NamedTuple):
    """One optimizer step on the rows of keys.

    Attributes:
        grads: float32[U, W], the sums of gradients over equal keys, all finite. With ``terms``, a matrix whose rows
            kernels sum.
        step: the number of the training step, from 1.
        lr_scale: a factor for every learning rate.
        terms: the sums that form the gradients. Kernels read the matrix without checks.
        push: the identity of the push. A push that is sent again updates each row only once, even across processes.
    """

    grads: Floats
    step: int
    lr_scale: float = 1.0
    terms: Terms | None = None
    push: Push | None = None
