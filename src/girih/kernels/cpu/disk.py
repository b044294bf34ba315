"""Copies records to and from blocks of a file.

A segment has blocks, followed by the owner of each record. A block has ``per_block`` whole records. A record that is
larger than the smallest block has a block of its size. A record's *place* is its number, counted over all segments.

Shapes: n records, R bytes of a record.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from girih.kernels.cpu.arrays import I32, I64, U8, SealedI32, SealedI64, SealedU8x2, U8x2
from girih.kernels.cpu.jit import kernel, njit_lean
from girih.kernels.cpu.system import address_of, copy_bytes

NOBODY = -1
"""The owner of a record that was never written."""


class Blocks(NamedTuple):
    """The layout of records in a segment, and the maximum size of a read. Sizes are in bytes."""

    record_bytes: int
    block_bytes: int
    read_bytes: int
    per_block: int
    per_segment: int
    segment_bytes: int


class Reads(NamedTuple):
    """The reads for a list of records, each of one block or several adjacent blocks. :func:`plan_reads` fills them in.

    Attributes:
        offsets, sizes: int64[n], the offset of each read in the file, and its bytes. Only the first m are valid.
        starts: int64[n + 1], the first record of each read. Its records end at the first record of the next read.
        rows: int64[n], the row in ``out`` of each record.
        inside: int64[n], the offset of each record in its read.
        out: uint8[n, R], the memory for the records.
    """

    offsets: I64
    sizes: I64
    starts: I64
    rows: I64
    inside: I64
    out: U8x2


@njit_lean
def _block_of(blocks: Blocks, place: Any) -> Any:
    """Returns the offset in the segment of the block that holds a record."""
    return place % blocks.per_segment // blocks.per_block * blocks.block_bytes


@njit_lean
def _byte_of(blocks: Blocks, place: Any) -> Any:
    """Returns the offset of a record in its segment."""
    return _block_of(blocks, place) + place % blocks.per_segment % blocks.per_block * blocks.record_bytes


@njit_lean
def take_records(blocks: Blocks, reads: Reads, number: Any, memory: Any) -> None:
    """Copies the requested records of a read to ``out``. ``memory`` is the address of the bytes that were read."""
    out, size = address_of(reads.out), blocks.record_bytes
    for i in range(reads.starts[number], reads.starts[number + 1]):
        copy_bytes(out + reads.rows[i] * size, memory + reads.inside[i], size)


@kernel()
def plan_reads(blocks: Blocks, places: SealedI64, order: I64, in_memory: I64, reads: Reads) -> int:
    """Copies records of segments that are in memory, and plans reads for all other records. Each block is read once.

    Args:
        places: int64[n], one for each row of ``out``.
        order: int64[n], the indices that sort ``places``.
        in_memory: int64[S], the address of each segment's memory, or 0 if the segment is only on the disk.

    Returns:
        The number of reads, m, or -1 if a place is outside all segments.
    """
    out, size = address_of(reads.out), blocks.record_bytes
    num_reads, num_rows, start, end = 0, 0, np.int64(0), np.int64(0)
    for i in range(len(order)):
        row = order[i]
        place = places[row]
        segment = place // blocks.per_segment
        if place < 0 or segment >= len(in_memory):
            return -1
        memory = in_memory[segment]
        if memory != 0:
            copy_bytes(out + row * size, memory + _byte_of(blocks, place), size)
            continue
        base = segment * blocks.segment_bytes
        offset = base + _block_of(blocks, place)
        if offset >= end:  # places are sorted, so the block is either in the last read or after this read
            if offset > end or num_reads == 0 or offset - start == blocks.read_bytes:
                start = offset
                reads.offsets[num_reads] = start
                reads.starts[num_reads] = num_rows
                num_reads += 1
            end = offset + blocks.block_bytes
            reads.sizes[num_reads - 1] = end - start
        reads.rows[num_rows] = row
        reads.inside[num_rows] = base + _byte_of(blocks, place) - start
        num_rows += 1
    reads.starts[num_reads] = num_rows
    return num_reads


@kernel()
def put_records(
    blocks: Blocks, segment: U8, first: int, records: SealedU8x2, owners: SealedI32, start: int, stop: int
) -> None:
    """Writes records ``start`` to ``stop`` and their owners to a segment's memory, from record ``first`` on."""
    memory, source, size = address_of(segment), address_of(records), blocks.record_bytes
    owned = segment[blocks.per_segment // blocks.per_block * blocks.block_bytes :].view(np.int32)
    for i in range(start, stop):
        place = first + i - start
        owned[place] = owners[i]
        copy_bytes(memory + _byte_of(blocks, place), source + i * size, size)


@kernel()
def take_live(blocks: Blocks, segment: U8, alive: U8, owners: I32, records: U8x2) -> int:
    """Copies the live records of a segment and their owners. Returns their number.

    Args:
        segment: the bytes of the segment on disk.
        alive: uint8[·], 1 for each live record.
        owners, records: int32[·], uint8[·, R], output, filled from the start.
    """
    memory, target, size = address_of(segment), address_of(records), blocks.record_bytes
    owned = segment[blocks.per_segment // blocks.per_block * blocks.block_bytes :].view(np.int32)
    count = 0
    for i in range(blocks.per_segment):
        if alive[i]:
            owners[count] = owned[i]
            copy_bytes(target + count * size, memory + _byte_of(blocks, i), size)
            count += 1
    return count
