"""The row that a verb is amid, noted in the shard's state: a repair finds there what a process left half done that was killed.

What it had written by then is what stands before that place in the program, so the compiler must not move a row's writes
past the note: :func:`settle` costs no instruction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu import layout as at
from girih.kernels.cpu.jit import JIT_DISABLED, intrinsic, njit_lean, types
from girih.kernels.cpu.layout import Shard

MAKING, LEAVING, SETTING = range(3)
"""Kinds of notes below 0: a row that is made for a key, that leaves its key, that is set from outside."""
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1

if JIT_DISABLED:

    def settle() -> None:
        """Does nothing without the JIT, which alone moves writes."""

else:

    @intrinsic
    def settle(typing_context: Any) -> Any:
        """Has all writes before it stand before all writes behind it, as a signal that ends the process sees them."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.fence("seq_cst", "singlethread")
            return context.get_dummy_value()

        return types.void(), generate


@njit_lean
def note(shard: Shard, kind: Any, row: Any) -> None:
    """Says what is about to happen to a row; it stands until the next note, or the next verb."""
    settle()
    shard.state[at.AMID] = ~((np.int64(kind) << _ROW_BITS) | np.int64(row))
    settle()


@njit_lean
def note_move(shard: Shard, position: Any, row: Any) -> None:
    """Says that the gradient of the key at ``position`` is about to move a row; ``NO_ROW``: that those before have moved theirs."""
    settle()
    shard.state[at.AMID] = (np.int64(position) << _ROW_BITS) | (np.int64(row) + 1)
    settle()


def noted(word: int) -> tuple[int | None, int, int]:
    """(kind, row, position) of a note: the kind is None where it is one of a move, the row ``NO_ROW`` where none was moving."""
    if word < 0:
        return ~word >> _ROW_BITS, ~word & _ROW_MASK, 0
    return None, (word & _ROW_MASK) - 1, word >> _ROW_BITS
