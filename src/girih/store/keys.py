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
"""Counts of keys if each occurs once."""


class Keys(NamedTuple):
    """Keys of one group, each once.

    Attributes:
        ids, tables: int64[U], int32[U].
        counts: int32[U], how often each key occurs in the batch; :data:`ONCE` if all occur once.
        rows: int32[U], hints from :meth:`Store.lookup` that save the search. Kernels check each hint against its key.
    """

    ids: Longs
    tables: Ints
    counts: Ints = ONCE
    rows: Ints | None = None

    def cut(self, part: slice) -> Keys:
        """Returns some of the keys, without their counts and hints."""
        return Keys(self.ids[part], self.tables[part])


class RowUpdate(NamedTuple):
    """One optimizer step on the rows of keys.

    Attributes:
        grads: float32[U, W], the sums over equal keys, all finite; with ``terms``, the rows of a matrix that kernels
            sum.
        step: from 1.
        lr_scale: multiplies every learning rate.
        terms: the sums that form the gradients; a kernel reads the matrix unchecked.
        push: the name of the push, which may be sent again. A push moves each row once, even across processes.
    """

    grads: Floats
    step: int
    lr_scale: float = 1.0
    terms: Terms | None = None
    push: Push | None = None
