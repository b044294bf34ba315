"""Rows on their way between chunks of GPU memory and one dense array.

Shapes: K rows on their way, V 32-bit words of a record; to and from slots all behind its meta travel.
"""

from __future__ import annotations

import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import VALUES, items, load, record, words_at


@kernel
def copy_words(
    chunks: tensor, rows: tensor, values: tensor, n: tensor, num_words: tensor, FILLS: constexpr, NUMBERED: constexpr, CHUNK_BITS: constexpr,
    STRIDE: constexpr, WORDS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Copies what lies behind the meta of records, int32[K], to ``values``, int32[K, V - 8]; ``FILLS`` copies the other way.

    Args:
        NUMBERED: 1 copies whole records to int32[K, 1 + V]: the number of each, then its words. Else 0.
    """
    i = items(BLOCK)
    mask = i < n
    word = tl.arange(0, WORDS)[None, :]
    inside = mask[:, None] & (word < num_words)
    row = load(rows + i, mask)
    first = 0 if NUMBERED else VALUES
    words = words_at(record(chunks, row, mask, CHUNK_BITS, STRIDE))[:, None] + first + word
    start = values + i.to(tl.int64) * (num_words + NUMBERED)
    if NUMBERED:
        tl.store(start, row, mask=mask)
    place = start[:, None] + NUMBERED + word
    if FILLS:
        tl.store(words, load(place, inside), mask=inside)
    else:
        tl.store(place, load(words, inside), mask=inside)
