"""Kernels of the codecs in ``comm/codecs/`` (Persia §4.2.3), which send unique ids with their samples, and float16.

Shapes: B examples, F features, N ids in the batch, U unique ids of a feature, n ids of a feature, R blocks of W
floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from girih.kernels.cpu.arrays import (
    F32,
    I32,
    I64,
    U16,
    U32,
    Bools,
    SealedF32,
    SealedF32x2,
    SealedI32,
    SealedI64,
    SealedU16,
    SealedU32,
    U16x2,
)
from girih.kernels.cpu.hashing import key_hash, low_bits
from girih.kernels.cpu.jit import kernel, njit_lean

PLAIN, SINGLES = -1, -2
"""These values replace the number of unique ids of a feature whose ids are sent unchanged.

``SINGLES`` also means that each example has one id.
"""

KAPPA = 32768.0
_INFINITY = 0x7F80_0000
_MAGNITUDE = 0x7FFF_FFFF
_LEAST_NORMAL = 0x3880_0000  # 2⁻¹⁴, in float16
SMALL = 2.0**-100


@njit_lean
def _number(ids: I64, table: I32, base: Any, inverse: I32, unique: I64, counts: U32) -> Any:
    """Numbers ids in the order of their first occurrence. Returns the number of unique ids."""
    mask = len(table) - 1
    num = np.int64(0)
    for i in range(len(ids)):
        id_ = ids[i]
        slot = low_bits(key_hash(id_, 0), mask)
        while True:
            entry = np.int64(table[slot])
            if entry < base:
                table[slot] = base + num
                unique[num] = id_
                counts[num] = 0
                entry = base + num
                num += 1
            u = entry - base
            if unique[u] == id_:
                counts[u] += 1
                inverse[i] = u
                break
            slot = (slot + 1) & mask
    return num


@njit_lean
def _is_singles(bounds: I32) -> Any:
    """Returns whether each bag has one id. ``bounds`` is int32[B+1]."""
    for b in range(len(bounds) - 1):
        if bounds[b + 1] - bounds[b] != 1:
            return False
    return True


@njit_lean
def _pack_by_id(
    bounds: I32, inverse: I32, counts: U32, places: I64, samples: Any, weights: F32, packed_weights: F32
) -> Any:
    """Writes the example of each occurrence, id by id, and its weight. Returns the largest count.

    Args:
        bounds: int32[B+1], the bounds of the feature's bags in the batch. inverse: int32[n]. counts: uint32[U].
        weights, packed_weights: float32[n] or [0].
    """
    place, largest = np.int64(0), np.int64(0)
    for u in range(len(counts)):
        places[u] = place
        place += counts[u]
        largest = max(largest, np.int64(counts[u]))
    start = bounds[0]
    for b in range(len(bounds) - 1):
        for i in range(bounds[b] - start, bounds[b + 1] - start):
            place = places[inverse[i]]
            places[inverse[i]] = place + 1
            samples[place] = b
            if len(weights) > 0:
                packed_weights[place] = weights[i]
    return largest


@njit_lean
def _pack_sizes(bounds: I32, counts: U32) -> Any:
    """Writes the number of ids in each bag. Returns the largest number."""
    largest = np.int64(0)
    for b in range(len(bounds) - 1):
        size = bounds[b + 1] - bounds[b]
        counts[b] = size
        largest = max(largest, np.int64(size))
    return largest


@kernel({"samples": U16}, {"samples": U32})
def pack_ids(
    ids: SealedI64,
    offsets: SealedI32,
    num_examples: int,
    pooled: Bools,
    weights: SealedF32,
    table: I32,
    inverse: I32,
    places: I64,
    sizes: I64,
    packed_ids: I64,
    counts: U32,
    samples: Any,
    packed_weights: F32,
) -> Any:
    """Packs a batch feature by feature. A feature that would become larger is sent unchanged.

    Args:
        ids, offsets, weights: int64[N], int32[F·B+1], float32[N] or [0]: the batch.
        pooled: bool[F]: True if the order within a bag does not matter.
        table: scratch, int32, zeros, a power of two above twice the ids of any one feature.
        inverse, places: scratch, int32, int64, with room for the ids of any one feature.
        sizes: int64[2·F], output: the ids of each feature, and the number of unique ids, ``PLAIN`` or ``SINGLES``.
        packed_ids: int64[N], output: unique ids, or all ids of a feature that is sent unchanged.
        counts: uint32[N + F·B], output: occurrences of each unique id, or ids of each example.
        samples: uint16 or uint32[N], output: the example of each occurrence.
        packed_weights: float32[N] or [0], output.

    Returns:
        The numbers of ids, counts and samples that were written, and the largest count.
    """
    sample_bytes = samples.itemsize
    num_ids, num_counts, num_samples, largest = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    base = np.int64(1)
    for f in range(len(pooled)):
        bounds = offsets[f * num_examples : (f + 1) * num_examples + 1]
        start, end = np.int64(bounds[0]), np.int64(bounds[num_examples])
        n = end - start
        singles = n == num_examples and _is_singles(bounds)
        sizes[2 * f] = n
        num = np.int64(0)
        if pooled[f]:
            new_counts = counts[num_counts : num_counts + n]
            num = _number(ids[start:end], table, base, inverse, packed_ids[num_ids:], new_counts)
            base += num
        plain_bytes = 8 * n if singles else 8 * n + 4 * num_examples
        if pooled[f] and 12 * num + sample_bytes * n <= plain_bytes:
            sizes[2 * f + 1] = num
            most = _pack_by_id(
                bounds, inverse, counts[num_counts : num_counts + num], places, samples[num_samples:],
                weights[start:end], packed_weights[start:end],
            )  # fmt: skip
            largest = max(largest, most)
            num_ids, num_counts, num_samples = num_ids + num, num_counts + num, num_samples + n
            continue
        sizes[2 * f + 1] = SINGLES if singles else PLAIN
        for i in range(n):
            packed_ids[num_ids + i] = ids[start + i]
        if len(weights) > 0:
            for i in range(start, end):
                packed_weights[i] = weights[i]
        num_ids += n
        if not singles:
            largest = max(largest, _pack_sizes(bounds, counts[num_counts:]))
            num_counts += num_examples
    return num_ids, num_counts, num_samples, largest


@kernel({"counts": SealedU16, "samples": SealedU16}, {"counts": SealedU32, "samples": SealedU32})
def unpack_ids(
    sizes: SealedI64,
    num_examples: int,
    packed_ids: SealedI64,
    counts: Any,
    samples: Any,
    places: I32,
    ids: I64,
    offsets: I32,
    order: I32,
) -> Any:
    """Reverses ``pack_ids``. The order within bags may differ.

    The caller must have checked ``sizes`` against the lengths of all arrays.

    Args:
        places: scratch, int32[B].
        ids, offsets, order: int64[N], int32[F·B+1], int32[N], output. ``order`` has the packed position of each id.

    Returns:
        False if counts do not add up or a sample is not in the batch. Even then, all accesses are within the arrays.
    """
    num_ids, num_counts, num_samples, start = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    offsets[0] = 0
    for f in range(len(sizes) // 2):
        n, num = np.int64(sizes[2 * f]), np.int64(sizes[2 * f + 1])
        first = f * num_examples
        if num < 0:
            total = np.int64(0)
            for b in range(num_examples):
                total += np.int64(1) if num == SINGLES else np.int64(counts[num_counts + b])
                if total > n:
                    return False
                offsets[first + b + 1] = start + total
            if total != n:
                return False
            for i in range(n):
                ids[start + i] = packed_ids[num_ids + i]
                order[start + i] = start + i
            num_ids += n
            if num == PLAIN:
                num_counts += num_examples
            start += n
            continue
        total = np.int64(0)
        for u in range(num):
            total += np.int64(counts[num_counts + u])
        if total != n:
            return False
        places[:num_examples] = 0
        for i in range(n):
            sample = np.int64(samples[num_samples + i])
            if sample >= num_examples:
                return False
            places[sample] += 1
        end = start
        for b in range(num_examples):
            size = np.int64(places[b])
            places[b] = end
            end += size
            offsets[first + b + 1] = end
        number = np.int64(0)
        for u in range(num):
            for _ in range(np.int64(counts[num_counts + u])):
                sample = np.int64(samples[num_samples + number])
                at = places[sample]
                places[sample] = at + 1
                ids[at] = packed_ids[num_ids + u]
                order[at] = start + number
                number += 1
        num_ids, num_counts, num_samples, start = num_ids + num, num_counts + num, num_samples + n, start + n
    return True


@kernel()
def shrink_blocks(values: SealedF32x2, scaled: F32, halves: U16x2, scales: F32) -> None:
    """Scales each block of floats to ±κ, and rounds it to float16, to nearest, ties to even.

    Args:
        values: float32[R, W].
        scaled: scratch, float32[W].
        halves: uint16[R, W], output: bits of float16.
        scales: float32[R], output: the largest finite magnitude of each block.
    """
    bits, scaled_bits, scale_bits = values.view(np.uint32), scaled.view(np.uint32), scales.view(np.uint32)
    width = values.shape[1]
    for r in range(values.shape[0]):
        largest = np.uint32(0)
        for i in range(width):
            largest = max(largest, np.uint32(bits[r, i] & np.uint32(_MAGNITUDE)))
        scale_bits[r] = largest  # the bits of magnitudes have the same order as the magnitudes
        if largest >= np.uint32(_INFINITY):
            scales[r] = np.float32(0)
            for i in range(width):
                if np.uint32(bits[r, i] & np.uint32(_MAGNITUDE)) < np.uint32(_INFINITY):
                    scales[r] = max(scales[r], abs(values[r, i]))
            if scales[r] == 0:
                scales[r] = np.float32(1)  # so that infinity stays infinity
        scale = scales[r]
        if scale >= np.float32(SMALL):
            factor = np.float32(np.float32(KAPPA) / scale)
            for i in range(width):
                scaled[i] = values[r, i] * factor
        elif scale > 0:  # the factor exceeds float32
            wide = KAPPA / np.float64(scale)
            for i in range(width):
                scaled[i] = np.float32(np.float64(values[r, i]) * wide)
        else:
            for i in range(width):
                scaled[i] = values[r, i]
        for i in range(width):
            magnitude = np.uint32(scaled_bits[i] & np.uint32(_MAGNITUDE))
            sign = np.uint32(scaled_bits[i] & np.uint32(0x8000_0000)) >> np.uint32(16)
            odd = np.uint32(magnitude >> np.uint32(13)) & np.uint32(1)
            moved = np.uint32(max(magnitude, np.uint32(_LEAST_NORMAL)) - np.uint32(0x3800_0000))
            normal = np.uint32(moved + odd + np.uint32(0xFFF)) >> np.uint32(13)
            # a subnormal half counts units of 2⁻²⁴
            is_normal = magnitude >= np.uint32(_LEAST_NORMAL)
            units = np.float32(0) if is_normal else abs(scaled[i]) * np.float32(2.0**24)
            small = np.uint32(np.int32(np.rint(units)))
            half = normal if is_normal else small
            if magnitude >= np.uint32(_INFINITY):
                half = np.uint32(0x7C00) if magnitude == np.uint32(_INFINITY) else np.uint32(0x7E00)
            halves[r, i] = np.uint16(sign | half)
