"""Rows on their way between chunks of GPU memory and one dense array.

Shapes: K rows on their way, V 32-bit words of a record; to and from slots all behind its meta travel.
"""

from __future__ import annotations

import triton.language as tl

from girih.kernels.gpu.jit import kernel
from girih.kernels.gpu.layout import VALUES, record, words_at


@kernel
def put_values(
    chunks: tl.tensor, slots: tl.tensor, values: tl.tensor, n: tl.tensor, num_words: tl.tensor, CHUNK_BITS: tl.constexpr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Fills slots, int32[K], by ``values``, int32[K, V - 8]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    word = tl.arange(0, WORDS)[None, :]
    inside = mask[:, None] & (word < num_words)
    slot = tl.load(slots + i, mask=mask, other=0)
    address = record(chunks, slot, mask, CHUNK_BITS, STRIDE)
    found = tl.load(values + i.to(tl.int64)[:, None] * num_words + word, mask=inside, other=0)
    tl.store(words_at(address)[:, None] + VALUES + word, found, mask=inside)


@kernel
def copy_values(
    chunks: tl.tensor, slots: tl.tensor, values: tl.tensor, n: tl.tensor, num_words: tl.tensor, CHUNK_BITS: tl.constexpr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copies what slots, int32[K], hold to ``values``, int32[K, V - 8]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    word = tl.arange(0, WORDS)[None, :]
    inside = mask[:, None] & (word < num_words)
    slot = tl.load(slots + i, mask=mask, other=0)
    address = record(chunks, slot, mask, CHUNK_BITS, STRIDE)
    found = tl.load(words_at(address)[:, None] + VALUES + word, mask=inside, other=0)
    tl.store(values + i.to(tl.int64)[:, None] * num_words + word, found, mask=inside)


@kernel
def copy_records(
    chunks: tl.tensor, rows: tl.tensor, out: tl.tensor, n: tl.tensor, num_words: tl.tensor, CHUNK_BITS: tl.constexpr,
    STRIDE: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copies whole records of rows, int32[K], to ``out``, int32[K, 1 + V]: the row's number, then its words."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    word = tl.arange(0, WORDS)[None, :]
    inside = mask[:, None] & (word < num_words)
    row = tl.load(rows + i, mask=mask, other=0)
    address = record(chunks, row, mask, CHUNK_BITS, STRIDE)
    found = tl.load(words_at(address)[:, None] + word, mask=inside, other=0)
    place = out + i.to(tl.int64) * (num_words + 1)
    tl.store(place, row, mask=mask)
    tl.store(place[:, None] + 1 + word, found, mask=inside)
