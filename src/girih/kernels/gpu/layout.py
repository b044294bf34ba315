"""The layout of a record in GPU memory, the same as in :mod:`girih.kernels.cpu.layout`, as constants for kernels.

A record has the same words as on the CPU, so a row is copied between CPU and GPU without conversion. Only two words
have another meaning. On the CPU they have the row's neighbours in a list. On a GPU they have the row's *stamp*, which
is the moment of its last use, an int64 that only grows. Its upper half is the number of the call. The lower half has a
bit for rows that the call made, and the index of the key in the call.

Rows are in chunks of 2^``CHUNK_BITS`` records of ``STRIDE`` words. ``chunks``, int64[·], has the addresses of the
chunks.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import constexpr, tensor

from girih.kernels.cpu import layout as at
from girih.kernels.gpu.jit import kernel

ID, TABLE, LAST_USED, COUNT, VERSION, VALUES = map(
    constexpr, (0, at.TABLE, at.LAST_USED, at.COUNT, at.VERSION, at.VALUES)
)
STAMP = constexpr(at.NEWER)  # the first of the stamp's two words
FLOAT32, BFLOAT16, NO_ROW = map(constexpr, (at.FLOAT32, at.BFLOAT16, at.NO_ROW))
STRIDE_WORDS = 8  # a record begins at a multiple of 32 bytes, the cache sector of a GPU


def stride_of(num_words: int) -> int:
    """Returns the number of words from one record to the next."""
    return -(-num_words // STRIDE_WORDS) * STRIDE_WORDS


@triton.jit
def items(BLOCK: constexpr) -> Any:
    """Returns the numbers of the items of a program, int32[BLOCK]."""
    return tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def load(pointer: tensor, mask: tensor) -> Any:
    """Returns the values at pointers, or 0 if ``mask`` is false."""
    return tl.load(pointer, mask=mask, other=0)


@triton.jit
def record(chunks: tensor, row: tensor, mask: tensor, CHUNK_BITS: constexpr, STRIDE: constexpr) -> Any:
    """Returns the address of each row's record, int64, or 0 if ``mask`` is false."""
    number = row.to(tl.int64)
    base = load(chunks + (number >> CHUNK_BITS), mask)
    return base + (number & ((1 << CHUNK_BITS) - 1)) * (4 * STRIDE)


@triton.jit
def words_at(address: tensor) -> Any:
    """Returns addresses as pointers to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def longs_at(address: tensor) -> Any:
    """Returns addresses as pointers to int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def floats_at(address: tensor) -> Any:
    """Returns addresses as pointers to float32."""
    return address.to(tl.pointer_type(tl.float32))


@triton.jit
def halves_at(address: tensor) -> Any:
    """Returns addresses as pointers to 16 bits."""
    return address.to(tl.pointer_type(tl.int16))


@triton.jit
def columns_at(address: tensor, column: tensor, DTYPE: constexpr, ALIGNED: constexpr) -> Any:
    """Returns pointers to columns, int32[1, C], of rows at addresses, int64[K]: to float32, or to 16 bits.

    Args:
        ALIGNED: True if the addresses of rows and the bytes of their columns are multiples of 16. Then a thread copies
            16 bytes in one operation. The compiler cannot infer the alignment of addresses that are read from memory,
            or of the number of columns. See :func:`whole_vectors`.
    """
    if DTYPE == FLOAT32:
        place = floats_at(address)[:, None] + column
    else:
        place = halves_at(address)[:, None] + column
    if ALIGNED:
        tl.device_assert(address % 16 == 0)
        place = tl.multiple_of(place, [1, 16])
    return place


@triton.jit
def whole_vectors(dim: tensor, DTYPE: constexpr, ALIGNED: constexpr) -> Any:
    """Returns ``dim``. If rows are ``ALIGNED``, the compiler sees a multiple of 16 bytes; see :func:`columns_at`."""
    if ALIGNED:
        NUMBERS: constexpr = 4 if DTYPE == FLOAT32 else 8
        tl.device_assert(dim % NUMBERS == 0)
        dim = dim // NUMBERS * NUMBERS
    return dim


@triton.jit
def holds_key(address: tensor, key_id: tensor, table: tensor, mask: tensor) -> Any:
    """Returns whether the record at each address belongs to the key."""
    found_id = load(longs_at(address), mask)
    found_table = tl.load(words_at(address) + TABLE, mask=mask, other=NO_ROW)
    return mask & (found_id == key_id) & (found_table == table)


@kernel
def copy_words(
    chunks: tensor, rows: tensor, values: tensor, n: tensor, num_words: tensor, FILLS: constexpr, NUMBERED: constexpr, CHUNK_BITS: constexpr,
    STRIDE: constexpr, WORDS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """Copies the words after the meta of records, int32[K], to ``values``, int32[K, V - 8].

    Args:
        FILLS: 1 copies in the other direction, else 0.
        NUMBERED: 1 copies whole records to int32[K, 1 + V], each after its number, else 0.
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
